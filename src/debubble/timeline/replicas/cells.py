"""Replicas of a pipeline in → the same work of each, side by side.

Ranks that share a stage for tensor, context or expert parallelism lie side by side as replicas do:
a pipeline each, as far as messages tell. Their collectives stand in the middle of forward passes,
where a gradient is never reduced; fully sharded weights are gathered there too, so a group that is
called after data parallelism is believed.

All columns of a cell are cut to members by collectives, so that no loop goes over ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from debubble.timeline.model import I64, Flags, RankCollectives
from debubble.timeline.parallelism import Role, role_of
from debubble.trace.columns import Group

Key = tuple[int, ...] | str
"""A group by its members, or by its name where torch left the middle of a long list out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a rank stands."""

    pipeline: int
    position: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """What joins what."""

    keys: tuple[Key, ...]
    """The groups that join replicas."""
    number: dict[int, I64]
    """For each rank, which of them each of its collectives went through; -1 for none."""
    replica: dict[int, int]
    """Of each pipeline: those that share stages are one."""
    absent: tuple[int, ...]
    """Members without a trace."""


def join_groups(
    collectives: Mapping[int, RankCollectives], pipelines: Mapping[int, Sequence[int]]
) -> Joined:
    """Tell the groups that join replicas from those that share stages."""
    places = {
        rank: Place(pipeline=number, position=position)
        for number, ranks in pipelines.items()
        for position, rank in enumerate(ranks)
    }
    known: dict[Key, bool] = {}
    used = {rank: _used(rank, found, places, known) for rank, found in collectives.items()}
    members: dict[Key, set[int]] = {}
    inner: dict[Key, bool] = {}
    for rank, rows in used.items():
        for key, group, mine in rows:
            members.setdefault(key, set()).add(rank)
            shares = _shares_stage(group, in_forward=bool(collectives[rank].in_forward[mine].any()))
            inner[key] = inner.get(key, False) or shares
    replica = _unite([members[key] for key in members if inner[key]], pipelines, places)
    keys = tuple(
        key
        for key, ranks in members.items()
        if not inner[key] and len({replica[places[rank].pipeline] for rank in ranks}) > 1
    )
    place = {key: number for number, key in enumerate(keys)}
    number = {}
    for rank, rows in used.items():
        number[rank] = np.full(len(collectives[rank]), -1, dtype=np.int64)
        for key, _, mine in rows:
            number[rank][mine] = place.get(key, -1)
    absent = {rank for key in keys if not isinstance(key, str) for rank in key} - set(collectives)
    return Joined(keys=keys, number=number, replica=replica, absent=tuple(sorted(absent)))


def _used(
    rank: int, found: RankCollectives, places: Mapping[int, Place], known: dict[Key, bool]
) -> list[tuple[Key, Group, I64]]:
    """Return the groups of a rank that hold one position of several pipelines, and their rows.

    gloo does not tell the group of a collective: where one of the rank's is such, it is that.
    """
    if rank not in places:
        return []
    for group in found.groups:
        if group.ranks not in known:
            known[group.ranks] = _lies_across(group, places)
    beside = [number for number, group in enumerate(found.groups) if known[group.ranks]]
    of_row = found.group
    if len(beside) == 1:
        of_row = np.where(of_row < 0, np.int32(beside[0]), of_row)
    rows = []
    for number in beside:
        mine = np.flatnonzero(of_row == number)
        if len(mine):
            one = found.groups[number]
            rows.append((one.ranks or f"{one.name} {one.description}", one, mine))
    return rows


def _lies_across(group: Group, places: Mapping[int, Place]) -> bool:
    """Tell whether a group holds one position of several pipelines, as far as its ranks tell."""
    known = [places[member] for member in group.ranks if member in places]
    pipelines = {place.pipeline for place in known}
    alike = len({place.position for place in known}) == 1
    return not group.ranks or (alike and len(pipelines) == len(known) > 1)


def _shares_stage(group: Group, *, in_forward: bool) -> bool:
    role = role_of(group)
    if role is Role.DATA:
        return False
    return role in {Role.INNER, Role.MODEL} or in_forward


def _unite(
    stages: Sequence[set[int]], pipelines: Mapping[int, Sequence[int]], places: Mapping[int, Place]
) -> dict[int, int]:
    """Give each pipeline the number of its replica: those that share a stage are one."""
    leader = {number: number for number in pipelines}

    def lead(number: int) -> int:
        while leader[number] != number:
            leader[number] = leader[leader[number]]
            number = leader[number]
        return number

    for ranks in stages:
        first, *others = sorted({lead(places[rank].pipeline) for rank in ranks})
        for other in others:
            leader[lead(other)] = lead(first)
    leaders = sorted({lead(number) for number in pipelines})
    place = {one: number for number, one in enumerate(leaders)}
    return {number: place[lead(number)] for number in pipelines}


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
