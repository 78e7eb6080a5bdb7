"""Replicas of a pipeline in → the same work of each, side by side; who waits for whom.

A reduction between replicas ends on all its members together: whoever came last has the shortest
one, and what the others' lasts longer is their wait. Three replicas at one reduction:

    replica 0   compute ─────┤ waits ··············│ data goes around │
    replica 1   compute ───────────────────────────┤ data goes around │   came last
    replica 2   compute ────────────┤ waits ·······│ data goes around │

Ranks that share a stage for tensor, context or expert parallelism lie side by side as replicas do:
a pipeline each, as far as messages tell. Their groups are called so; or their collectives stand in
the middle of forward passes, where a gradient is never reduced. Fully sharded weights are gathered
there too, so a group that is called after data parallelism is believed.

What evening them out would save: a collective begins on a replica when its gradients are there and
the group's collective before it is through; it ends when all have begun and the data has gone
around. Compute that waited for an earlier collective moves with it: weights that are gathered layer
by layer keep replicas in step.

All columns of a cell are cut to members by collectives, so that no loop goes over ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from debubble.timeline.model import AT_ONCE_NS, F64, I64, Flags, RankCollectives, Role, role_of
from debubble.trace.columns import Group

_COLUMNS = ("ready_ns", "start_ns", "end_ns", "exposed_ns", "blocks", "kind", "message_bytes")

Key = tuple[int, ...] | str
"""A group by its members, or by its name where torch left the middle of a long list out."""
Place = tuple[int, int]
"""The pipeline of a rank, and its position there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaGroups:
    """What joins what."""

    keys: tuple[Key, ...]
    """The groups that join replicas."""
    number: dict[int, I64]
    """For each rank, which of them each of its collectives went through; -1 for none."""
    replica: dict[int, int]
    """Of each pipeline: those that share stages are one."""
    absent: tuple[int, ...]
    """Members without a trace."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """Where each replica stood in each step; arrays are by step and replica, NaN if unknown."""

    steps: tuple[int, ...]
    late_ns: F64
    """Later than the middle of the others, at the group whose reduction ends last on it."""
    last: F64
    """1 where no other came later."""
    waited_ns: F64
    """By all its ranks, in all groups, with nothing computed meanwhile."""


def join_groups(
    collectives: Mapping[int, RankCollectives], pipelines: Mapping[int, Sequence[int]]
) -> ReplicaGroups:
    """Tell the groups that join replicas from those that share stages."""
    places = {
        rank: (pipeline, position)
        for pipeline, ranks in pipelines.items()
        for position, rank in enumerate(ranks)
    }
    across: dict[tuple[int, ...], bool] = {}
    used = {rank: _used(rank, found, places, across) for rank, found in collectives.items()}
    members: dict[Key, set[int]] = {}
    inner: dict[Key, bool] = {}
    for rank, rows in used.items():
        for key, group, mine in rows:
            role = role_of(group)
            in_forward = bool(collectives[rank].in_forward[mine].any())
            shares = role in {Role.INNER, Role.MODEL} or (in_forward and role is not Role.DATA)
            members.setdefault(key, set()).add(rank)
            inner[key] = inner.get(key, False) or shares
    stages = [{places[rank][0] for rank in members[key]} for key in members if inner[key]]
    # Context parallelism may pass blocks around and reduce nothing: its group tells all the same.
    named = {group for found in collectives.values() for group in found.groups}
    stages += [
        {places[rank][0] for rank in group.ranks if rank in places}
        for group in named
        if role_of(group) is Role.INNER and across.get(group.ranks) and group.ranks
    ]
    replica = _unite(stages, pipelines)
    keys = tuple(
        key
        for key, ranks in members.items()
        if not inner[key] and len({replica[places[rank][0]] for rank in ranks}) > 1
    )
    number_of = {key: at for at, key in enumerate(keys)}
    number = {}
    for rank, rows in used.items():
        number[rank] = np.full(len(collectives[rank]), -1, dtype=np.int64)
        for key, _, mine in rows:
            number[rank][mine] = number_of.get(key, -1)
    absent = {rank for key in keys if not isinstance(key, str) for rank in key} - set(collectives)
    return ReplicaGroups(keys=keys, number=number, replica=replica, absent=tuple(sorted(absent)))


def _used(
    rank: int,
    found: RankCollectives,
    places: Mapping[int, Place],
    across: dict[tuple[int, ...], bool],
) -> list[tuple[Key, Group, I64]]:
    """Return the groups of a rank that hold one position of several pipelines, and their rows.

    As far as the ranks of a group tell; `across` remembers which do. gloo does not tell the group
    of a collective: where one of the rank's is such, it is that.
    """
    if rank not in places:
        return []
    for group in found.groups:
        if group.ranks not in across:
            known = [places[member] for member in group.ranks if member in places]
            lanes = {pipeline for pipeline, _ in known}
            alike = len({position for _, position in known}) == 1
            across[group.ranks] = not group.ranks or (alike and len(lanes) == len(known) > 1)
    beside = [number for number, group in enumerate(found.groups) if across[group.ranks]]
    of_row = found.group
    if len(beside) == 1:
        of_row = np.where(of_row < 0, np.int32(beside[0]), of_row)
    rows = []
    for number in beside:
        mine = np.flatnonzero(of_row == number)
        if len(mine):
            group = found.groups[number]
            rows.append((group.ranks or f"{group.name} {group.description}", group, mine))
    return rows


def _unite(stages: Sequence[set[int]], pipelines: Mapping[int, Sequence[int]]) -> dict[int, int]:
    """Give each pipeline the number of its replica: those that share a stage are one."""
    leader = {pipeline: pipeline for pipeline in pipelines}

    def lead(pipeline: int) -> int:
        while leader[pipeline] != pipeline:
            leader[pipeline] = leader[leader[pipeline]]
            pipeline = leader[pipeline]
        return pipeline

    for shared in stages:
        first, *others = sorted({lead(pipeline) for pipeline in shared})
        for other in others:
            leader[lead(other)] = lead(first)
    leaders = sorted({lead(pipeline) for pipeline in pipelines})
    number = {pipeline: replica for replica, pipeline in enumerate(leaders)}
    return {pipeline: number[lead(pipeline)] for pipeline in pipelines}


def make_cells(
    collectives: Mapping[int, RankCollectives],
    joined: ReplicaGroups,
    pipeline_of: Mapping[int, int],
    steps: Sequence[int],
) -> list[Cells]:
    """Match the n-th collective of each group and step across its members.

    A cell whose members do not hold the same collectives is left out.
    """
    rows = _gather(collectives, joined, pipeline_of)
    kept = np.isin(rows["step"], np.array(steps, dtype=np.int64))
    if not kept.any():
        return []
    rows = {name: column[kept] for name, column in rows.items()}
    cell = rows["group"] * (int(rows["step"].max()) + 1) + rows["step"]
    order = np.lexsort((np.arange(len(cell)), rows["rank"], rows["replica"], cell))
    return list(_by_shape({name: col[order] for name, col in rows.items()}, cell[order]))


def _gather(
    collectives: Mapping[int, RankCollectives],
    joined: ReplicaGroups,
    pipeline_of: Mapping[int, int],
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


def _by_shape(rows: Mapping[str, I64], cell: I64) -> Iterator[Cells]:
    """Yield the cells that have the same numbers of replicas, lanes and collectives."""
    first = np.flatnonzero(np.concatenate(([True], cell[1:] != cell[:-1])))
    size = np.diff(np.append(first, len(cell)))
    number = np.repeat(np.arange(len(first)), size)
    shape = np.stack(
        (size, _count_distinct(number, rows["replica"]), _count_distinct(number, rows["rank"]))
    )
    for total, replicas, ranks in np.unique(shape, axis=1).T.tolist():
        which = np.flatnonzero((shape == [[total], [replicas], [ranks]]).all(axis=0))
        if replicas < 2 or ranks % replicas or total % ranks:
            continue
        at = first[which][:, None] + np.arange(total)
        cut = {name: column[at] for name, column in rows.items()}
        even = _even(cut, ranks, replicas)
        if even.any():
            sides = (int(even.sum()), replicas, ranks // replicas, total // ranks)
            cut = {name: column[even].reshape(sides) for name, column in cut.items()}
            yield Cells(
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


def _count_distinct(cell: I64, values: I64) -> I64:
    """Count the different values of each cell; they come sorted by replica and rank."""
    new = (cell[1:] != cell[:-1]) | (values[1:] != values[:-1])
    return np.bincount(cell[np.concatenate(([True], new))])


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


def measure_arrivals(cells: Sequence[Cells], steps: Sequence[int], replicas: int) -> Arrivals:
    """Put each replica's deciding group of each step together."""
    columns: dict[str, list[F64]] = {}
    for cell in cells:
        length = cell.end_ns - cell.start_ns
        together = length.min(axis=(1, 2), keepdims=True)
        waited = np.maximum(cell.exposed_ns - together, 0).sum(axis=3)
        arrival = length.min(axis=2)
        late = (middle_of_others(arrival) - arrival).sum(axis=2)
        last = late == late.max(axis=1, keepdims=True)
        lanes = cell.rank.shape
        for name, column in {
            "step": np.broadcast_to(cell.step[:, None, None], lanes),
            "pipeline": cell.pipeline,
            "replica": np.broadcast_to(cell.replica[:, :, None], lanes),
            "ends": cell.end_ns[..., -1],
            "waited": waited,
            "late": np.broadcast_to(late[:, :, None], lanes),
            "last": np.broadcast_to(last[:, :, None], lanes),
        }.items():
            columns.setdefault(name, []).append(column.ravel())
    rows = {name: np.concatenate(parts) for name, parts in columns.items()}
    row_step = np.searchsorted(np.array(steps), rows["step"])
    row_replica = rows["replica"].astype(np.int64)
    waited_ns = np.zeros((len(steps), replicas))
    np.add.at(waited_ns, (row_step, row_replica), rows["waited"])
    # The row of each pipeline and step that ends last on its clock.
    order = np.lexsort((rows["ends"], rows["pipeline"], rows["step"]))
    key = np.stack((rows["step"], rows["pipeline"]))[:, order]
    deciding = order[np.append((key[:, 1:] != key[:, :-1]).any(axis=0), True)]
    at = row_step[deciding], row_replica[deciding]
    return Arrivals(
        steps=tuple(steps),
        late_ns=_mean_at(at, rows["late"][deciding], waited_ns.shape),
        last=_mean_at(at, rows["last"][deciding], waited_ns.shape),
        waited_ns=waited_ns,
    )


def _mean_at(at: tuple[I64, I64], values: F64, shape: tuple[int, ...]) -> F64:
    total, count = np.zeros(shape), np.zeros(shape)
    np.add.at(total, at, values)
    np.add.at(count, at, 1)
    mean: F64 = np.divide(total, count, out=np.full(shape, np.nan), where=count > 0)
    return mean


def middle_of_others(values: F64 | I64) -> F64:
    """Return for each row of the second axis the median of all others."""
    count = values.shape[1]
    order = np.argsort(values, axis=1, kind="stable")
    place = np.argsort(order, axis=1, kind="stable")
    ordered = np.take_along_axis(values, order, axis=1)

    def other(number: int) -> F64 | I64:
        """Return the n-th of the others."""
        lower, upper = ordered[:, number : number + 1], ordered[:, number + 1 : number + 2]
        return np.where(place <= number, upper, lower)

    half = (count - 1) // 2
    if count % 2:
        return np.asarray((other(half - 1) + other(half)) / 2)
    return np.asarray(other(half), dtype=np.float64)


def spread_of_ends(cells: Sequence[Cells]) -> float:
    """Return by how much members differ about the time between two ends, in the middle."""
    found = []
    for cell in cells:
        known = (cell.since_ns >= 0).all(axis=(1, 2))
        spread = cell.since_ns.max(axis=(1, 2)) - cell.since_ns.min(axis=(1, 2))
        found.append(spread[known])
    every = np.concatenate(found) if found else np.zeros(0)
    return float(np.median(every)) if len(every) else 0.0


def replay_without(cells: Cells, replica: int) -> tuple[I64, F64]:
    """Return the cells that a replica is in, and how much sooner each would end, in ns."""
    which = np.flatnonzero((cells.replica == replica).any(axis=1))
    mine = (cells.replica[which] == replica).argmax(axis=1)
    length = (cells.end_ns - cells.start_ns)[which].min(axis=2)
    # When each collective ended, from the first one's end: members agree about that.
    since = cells.end_ns[which] - cells.end_ns[which][..., :1]
    ends = np.median(
        since.reshape(len(since), math.prod(since.shape[1:-1]), since.shape[-1]), axis=1
    )
    ready = ends[:, None] - (cells.end_ns[which] - _ready(cells, which)).min(axis=2)
    takes = length.min(axis=1)
    as_was = _play(ready, takes)
    sooner = _sooner(ready, takes, as_was, _waited_for(cells, which), mine)
    return which, as_was[:, -1] - sooner[:, -1]


def _ready(cells: Cells, which: I64) -> I64:
    """Return when each rank was ready: when it began, where it did not queue."""
    start, end, ready = cells.start_ns[which], cells.end_ns[which], cells.ready_ns[which]
    queued = np.zeros(start.shape, dtype=bool)
    queued[..., 1:] = start[..., 1:] - end[..., :-1] < AT_ONCE_NS
    return np.where(queued, ready, start)


def _waited_for(cells: Cells, which: I64) -> I64:
    """Return the last collective whose end each one's replica had waited for; -1 for none.

    Each rank tells by its own clock whether one had ended when the next was ready.
    """
    end, ready = cells.end_ns[which], _ready(cells, which)
    blocks = cells.blocks[which].any(axis=2)
    found = np.full(blocks.shape, -1)
    latest = np.maximum.accumulate(np.where(blocks, np.arange(blocks.shape[2]), -1), axis=2)
    for number in range(1, blocks.shape[2]):
        over = (end[..., :number] <= ready[..., number, None]).sum(axis=3).min(axis=2) - 1
        known = np.take_along_axis(latest, np.maximum(over, 0)[..., None], axis=2)[..., 0]
        found[..., number] = np.where(over >= 0, known, -1)
    return found


def _play(ready: F64, takes: I64) -> F64:
    """Return the ends of collectives, each behind the one before it."""
    ends = np.zeros(takes.shape)
    free = np.full(len(takes), -np.inf)
    for number in range(takes.shape[1]):
        free = np.maximum(ready[:, :, number].max(axis=1), free) + takes[:, number]
        ends[:, number] = free
    return ends


def _sooner(ready: F64, takes: I64, as_was: F64, waited_for: I64, mine: I64) -> F64:
    """Play again with one replica in the middle of the others, compute moved where it waited."""
    cells = np.arange(len(takes))
    ends = np.zeros(takes.shape)
    gained = np.zeros(takes.shape)
    free = np.full(len(takes), -np.inf)
    for number in range(takes.shape[1]):
        before = waited_for[:, :, number]
        moved = gained[cells[:, None], np.maximum(before, 0)]
        begins = ready[:, :, number] - np.where(before >= 0, moved, 0)
        others = begins.copy()
        others[cells, mine] = np.nan
        begins[cells, mine] = np.fmin(begins[cells, mine], np.nanmedian(others, axis=1))
        free = np.maximum(begins.max(axis=1), free) + takes[:, number]
        ends[:, number] = free
        gained[:, number] = as_was[:, number] - free
    return ends
