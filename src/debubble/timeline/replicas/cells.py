"""Collectives of all ranks in → the same side by side: a cell a group and step.

All columns of a cell are cut to members by collectives, so that no loop goes over ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from debubble.timeline.model import I64, Flags, RankCollectives
from debubble.timeline.replicas.groups import Joined

_COLUMNS = ("ready_ns", "start_ns", "end_ns", "exposed_ns", "blocks", "kind", "message_bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cells:
    """Cells of one shape; arrays are by cell, replica, lane (and collective)."""

    group: I64
    step: I64
    pipeline: I64
    replica: I64
    """By cell and replica."""
    rank: I64
    ready_ns: I64
    start_ns: I64
    end_ns: I64
    exposed_ns: I64
    blocks: Flags
    since_ns: I64
    """From the end of the same group's collective before it, over steps; -1 for the first."""


def make_cells(
    collectives: Mapping[int, RankCollectives],
    joined: Joined,
    pipeline_of: Mapping[int, int],
    steps: Sequence[int],
) -> list[Cells]:
    """Match the n-th collective of each group and step across its members.

    A cell whose members do not hold the same collectives is left out.
    """
    rows = _gather(collectives, joined, pipeline_of)
    rows = _kept(rows, np.isin(rows["step"], np.array(steps, dtype=np.int64)))
    if not len(rows["rank"]):
        return []
    cell = rows["group"] * (int(rows["step"].max()) + 1) + rows["step"]
    order = np.lexsort((np.arange(len(cell)), rows["rank"], rows["replica"], cell))
    rows, cell = _kept(rows, order), cell[order]
    return list(_by_shape(rows, cell))


def _gather(
    collectives: Mapping[int, RankCollectives], joined: Joined, pipeline_of: Mapping[int, int]
) -> dict[str, I64]:
    parts: dict[str, list[I64]] = {}
    for rank, found in collectives.items():
        number = joined.number[rank]
        mine = np.flatnonzero(number >= 0)
        if not len(mine):
            continue
        mine = mine[np.argsort(number[mine], kind="stable")]
        group, end = number[mine], found.end_ns[mine]
        follows = np.concatenate(([False], group[1:] == group[:-1]))
        since = np.where(follows, end - np.concatenate((end[:1], end[:-1])), -1)
        pipeline = pipeline_of[rank]
        columns = {
            "rank": np.full(len(mine), rank),
            "pipeline": np.full(len(mine), pipeline),
            "replica": np.full(len(mine), joined.replica[pipeline]),
            "group": group,
            "step": found.step[mine].astype(np.int64),
            "since_ns": since,
            **{name: getattr(found, name)[mine] for name in _COLUMNS},
        }
        for name, column in columns.items():
            parts.setdefault(name, []).append(column)
    if not parts:
        return {"rank": np.zeros(0, dtype=np.int64), "step": np.zeros(0, dtype=np.int64)}
    return {name: np.concatenate(columns) for name, columns in parts.items()}


def _kept(rows: Mapping[str, I64], kept: Flags | I64) -> dict[str, I64]:
    return {name: column[kept] for name, column in rows.items()}


def _by_shape(rows: Mapping[str, I64], cell: I64) -> Iterator[Cells]:
    """Yield the cells that have the same numbers of replicas, lanes and collectives."""
    first = np.flatnonzero(np.concatenate(([True], cell[1:] != cell[:-1])))
    size = np.diff(np.append(first, len(cell)))
    number = np.repeat(np.arange(len(first)), size)
    shape = np.stack(
        (size, _distinct(number, rows["replica"], len(first)), _distinct(number, rows["rank"],
         len(first)))
    )  # fmt: skip
    for total, replicas, ranks in np.unique(shape, axis=1).T.tolist():
        which = np.flatnonzero((shape == [[total], [replicas], [ranks]]).all(axis=0))
        if replicas < 2 or ranks % replicas or total % ranks:
            continue
        at = first[which][:, None] + np.arange(total)
        cut = {name: column[at] for name, column in rows.items()}
        even = _even(cut, ranks, replicas)
        if even.any():
            sides = (int(even.sum()), replicas, ranks // replicas, total // ranks)
            yield _cells({name: column[even].reshape(sides) for name, column in cut.items()})


def _distinct(number: I64, values: I64, cells: int) -> I64:
    """Count the different values of each cell; they come sorted by replica and rank."""
    new = (number[1:] != number[:-1]) | (values[1:] != values[:-1])
    return np.bincount(number[np.concatenate(([True], new))], minlength=cells)


def _even(cut: Mapping[str, I64], ranks: int, replicas: int) -> Flags:
    """Tell the cells in which every rank did the same, and each replica has as many ranks."""
    cells = len(cut["rank"])
    even = np.ones(cells, dtype=bool)
    for name, parts in (("rank", ranks), ("replica", replicas)):
        column = cut[name].reshape(cells, parts, -1)
        even &= (column == column[:, :, :1]).all(axis=(1, 2))
    for name in ("kind", "message_bytes"):
        column = cut[name].reshape(cells, ranks, -1)
        even &= (column == column[:, :1]).all(axis=(1, 2))
    return even


def _cells(cut: Mapping[str, I64]) -> Cells:
    return Cells(
        group=cut["group"][:, 0, 0, 0],
        step=cut["step"][:, 0, 0, 0],
        pipeline=cut["pipeline"][..., 0],
        replica=cut["replica"][:, :, 0, 0],
        rank=cut["rank"][..., 0],
        ready_ns=cut["ready_ns"],
        start_ns=cut["start_ns"],
        end_ns=cut["end_ns"],
        exposed_ns=cut["exposed_ns"],
        blocks=cut["blocks"].astype(bool),
        since_ns=cut["since_ns"],
    )
