"""An op table in → a `Timeline` out: passes and transfers are given, nothing has to be inferred.

All rows are on one clock, but where each message names its peer: then ranks are laid together as
those of traces are. Stamps may be rounded to whole milliseconds. What no run can have done so is
named; two passes of a rank at once are a schedule's right, and count as busy once.

    stage 0   ├ F0 ┤├ F1 ┤          ├ B0 ┤     what a stage makes, the next one needs: a pass that
    stage 1          ├ F0 ┤├─ B0 ─┤            ends before the one that it needs begins cannot be
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from debubble.errors import Code, Gap, NoPipeline
from debubble.timeline.clock import Clocks, align, shift_transfers
from debubble.timeline.figures import CLIPPING, DATA_LOADING, OPTIMIZER, REDUCTION
from debubble.timeline.model import (
    I32,
    I64,
    NEVER_WAITED_NS,
    UNKNOWN,
    CollectiveKind,
    Flags,
    Intervals,
    MemoryFigures,
    Passes,
    PassKind,
    RankCollectives,
    RankTimeline,
    Timeline,
    union_of,
)
from debubble.timeline.steps import numbered
from debubble.timeline.transfers import match_transfers
from debubble.timeline.work import Messages
from debubble.trace.columns import Group
from debubble.trace.optable import Op, OpTable
from debubble.units import show_duration

_KINDS = {
    Op.FORWARD: PassKind.F,
    Op.BACKWARD: PassKind.B,
    Op.INPUT_GRAD: PassKind.I,
    Op.WEIGHT_GRAD: PassKind.W,
}
# Which way a message goes, counted in stages.
_SENDS = {Op.FORWARD_SEND: 1, Op.BACKWARD_SEND: -1}
_RECEIVES = {Op.FORWARD_RECEIVE: -1, Op.BACKWARD_RECEIVE: 1}
# Whose result each message carries.
_MAKES = {
    Op.FORWARD_SEND: (Op.FORWARD,),
    Op.BACKWARD_SEND: (Op.BACKWARD, Op.INPUT_GRAD),
}
# What rows besides passes and messages are, by their names; else their own name tells.
_OUTSIDE = (
    (CLIPPING, re.compile(r"clip", re.IGNORECASE)),
    (OPTIMIZER, re.compile(r"optim", re.IGNORECASE)),
    (DATA_LOADING, re.compile(r"data.?load|(?:get|next).?batch|batch.?generator", re.IGNORECASE)),
)
# Reductions that share a stage's weights, or join its first and last, do not join replicas.
_INSIDE_A_REPLICA = re.compile(r"norm|embed|tensor|expert|context|tp\b|cp\b|ep\b", re.IGNORECASE)
_REDUCES = (
    (CollectiveKind.REDUCE_SCATTER, re.compile(r"reduce.?scatter", re.IGNORECASE)),
    (CollectiveKind.ALL_REDUCE, re.compile(r"all.?reduce", re.IGNORECASE)),
)
# The next message of a queue begins so soon after the one before it.
_AT_ONCE_NS = 5_000
# Timers of a rank that waits for its messages lie beside its passes for no more of them than this.
_BESIDE = 0.01
_COUNTED_FROM, _LAST_STEP = (0, 1), 2**31 - 1
# Steps on one clock begin at least so much of a step apart, however far the first rank runs ahead.
_AHEAD = 0.1
_UNKNOWN_NS = np.iinfo(np.int64).min
# First steps of production jobs took two to four times as long as the others.
_FIRST_STEP = 1.5


def build_from_table(table: OpTable) -> Timeline:
    """Lay the steps one after the other where each counts from its own start, and tabulate."""
    is_pass = np.isin(table.op, tuple(_KINDS))
    if not is_pass.any():
        raise NoPipeline(
            "no pipeline in this table: no forward or backward pass",
            hint="name the passes forward-compute, backward-compute, F, B, I or W",
            file=table.file,
        )
    last = int(table.step[np.abs(table.step).argmax()])
    if abs(last) > _LAST_STEP:
        raise NoPipeline(
            f"step {last:,} is no number that a job counts to",
            hint="number the steps from 0, not by their times",
            file=table.file,
        )
    table = _count_from_zero(table, is_pass)
    if (table.rank < 0).any():  # not given: counted through pipelines and stages
        stages = int(table.stage.max()) + 1
        table = replace(table, rank=(table.pipeline * stages + table.stage).astype(np.int32))
    table = _unfold(table)
    table = replace(table, start_ns=table.start_ns + _lift(table))
    transfers, _ = match_transfers(_posts(table, is_pass))
    pipeline_of = np.zeros(int(table.rank.max()) + 1, dtype=np.int64)
    pipeline_of[table.rank] = table.pipeline
    whole = not (table.layer >= 0).any()  # a pass is one row
    clocks = Clocks(offset_ns=dict.fromkeys(np.unique(table.rank).tolist(), 0), uncertainty_ns=0)
    if (table.peer >= 0).any():  # each message is surely the one it is paired with
        clocks = align(transfers, clocks.offset_ns)
    transfers = shift_transfers(transfers, clocks)
    ahead = np.array([clocks.offset_ns[rank] for rank in table.rank.tolist()], dtype=np.int64)
    table = replace(table, start_ns=table.start_ns + ahead)
    lines = _lines(table, is_pass, clocks)
    passes = _passes(table, is_pass)
    absent = sorted({rank for line in lines for rank in line.members} - {r.rank for r in lines})
    missing = Gap(
        code=Code.MISSING_RANKS,
        message=f"no row of {numbered('rank', absent)}, which hold stages that others name",
        hint="write the passes of all ranks",
        file=table.file,
    )
    left_out = np.zeros(len(passes), dtype=bool)
    gaps: list[Gap] = []
    refused = set()
    for pipeline, steps in (steps_out_of_order(passes, pipeline_of) if whole else {}).items():
        mine = pipeline_of[passes.rank] == pipeline
        who = numbered("rank", sorted(set().union(*steps.values())))
        every = len(steps) == len(np.unique(passes.step[mine]))
        if every:
            refused.add(pipeline)
        else:
            left_out |= mine & np.isin(passes.step, list(steps))
        what = "nothing is told of the pipeline" if every else numbered("step", sorted(steps))
        gaps.append(
            Gap(
                code=Code.IMPOSSIBLE,
                message=f"{what}{'' if every else ' left out'}: passes of {who} end before those "
                "that they need begin",
                hint="write its rows again, all on one clock and in one unit",
                file=table.file,
                moves_ns=None if every else 0,
            )
        )
    passes = passes.where(~left_out)
    gaps += doubt_times(passes, pipeline_of, table.file) if whole else []
    return Timeline(
        ranks=lines,
        passes=passes,
        transfers=transfers,
        steps=tuple(np.unique(table.step[is_pass]).tolist()),
        clock_uncertainty_ns=clocks.uncertainty_ns,
        gaps=(*([missing] if absent else ()), *gaps),
        mixed=frozenset(refused),
    )


def _count_from_zero(table: OpTable, is_pass: Flags) -> OpTable:
    """Count microbatches and stages from 0 where the table counts them from 1.

    The first rank holds the first stage; where it is missing, nothing shows how stages are counted.
    """
    first = is_pass & (table.rank == min(int(table.rank.min()), 0))

    def from_zero(column: I32, rows: Flags) -> I32:
        from_one = rows.any() and int(column[rows].min()) == 1 == int(column[is_pass].min())
        return (column - (from_one & (column > 0))).astype(np.int32)

    return replace(
        table,
        microbatch=from_zero(table.microbatch, is_pass),
        stage=from_zero(table.stage, first),
    )


def _unfold(table: OpTable) -> OpTable:
    """Count second chunks back from the last rank where data go that way: chunks lie in a V.

    A table that numbers chunks says of four ranks 0 and 4, 1 and 5, 2 and 6, 3 and 7. Where a
    microbatch comes to the second chunk of the last rank first, it is 0 and 7, 1 and 6, 2 and 5,
    3 and 4.
    """
    forward = table.op == Op.FORWARD
    held = {
        tuple(np.unique(table.stage[forward & (table.rank == rank)]).tolist())
        for rank in np.unique(table.rank[forward]).tolist()
    }
    ranks = len(held)
    if ranks < 2 or held != {(place, place + ranks) for place in range(ranks)}:
        return table
    begins: dict[int, dict[tuple[int, int, int], int]] = {ranks: {}, 2 * ranks - 1: {}}
    for row in np.flatnonzero(forward & np.isin(table.stage, tuple(begins))).tolist():
        key = int(table.step[row]), int(table.pipeline[row]), int(table.microbatch[row])
        begins[int(table.stage[row])][key] = int(table.start_ns[row])
    of_first, of_last = begins.values()
    ahead = [of_first[key] - of_last[key] for key in of_first.keys() & of_last.keys()]
    if not ahead or np.median(ahead) <= 0:
        return table
    back = np.where(table.stage >= ranks, 3 * ranks - 1 - table.stage, table.stage)
    return replace(table, stage=back.astype(np.int32))


def _set_up(table: OpTable, is_pass: Flags) -> tuple[tuple[int, str], ...]:
    """Tell whether the table holds the first step of its job, and it took as long as set-up does.

    Timers show no set-up. But jobs count their steps, and the first of all never is without.
    """
    first = int(table.step[is_pass].min())
    if first not in _COUNTED_FROM:
        return ()
    begin, reach, _ = _spans_of_steps(table, is_pass)
    lengths = reach - begin
    slow = lengths[0] > _FIRST_STEP * np.median(lengths)
    return ((first, "it is the job's first and took much longer"),) if slow else ()


def _lift(table: OpTable) -> I64:
    """Return what to add to each row so that no two steps overlap.

    Tables often count each step from its own start. Then the time between steps is not known. Where
    each begins well after the one before, they share a clock: a first rank runs ahead of the last.
    """
    begin, reach, row = _spans_of_steps(table, np.ones(len(table), dtype=bool))
    lengths = reach - begin
    count = np.bincount(row)
    in_order = table.start_ns[np.lexsort((table.start_ns, row))]
    middle = in_order[np.cumsum(count) - count + count // 2]
    if (np.diff(middle) >= np.minimum(lengths[:-1], lengths[1:]) * _AHEAD).all():
        return np.zeros(len(table), dtype=np.int64)
    return (np.concatenate(([0], np.cumsum(lengths)[:-1])) - begin)[row]


def _spans_of_steps(table: OpTable, rows: Flags) -> tuple[I64, I64, I64]:
    """Return when each step of these rows begins and ends, and which of them each row is of."""
    steps, row = np.unique(table.step[rows], return_inverse=True)
    begin = np.full(len(steps), np.iinfo(np.int64).max, dtype=np.int64)
    reach = np.full(len(steps), np.iinfo(np.int64).min, dtype=np.int64)
    np.minimum.at(begin, row, table.start_ns[rows])
    np.maximum.at(reach, row, table.end_ns[rows])
    return begin, reach, row


def _passes(table: OpTable, is_pass: Flags) -> Passes:
    order = np.flatnonzero(is_pass)[np.argsort(table.start_ns[is_pass], kind="stable")]
    kind = np.zeros(max(_KINDS) + 1, dtype=np.uint8)
    for op, meant in _KINDS.items():
        kind[op] = meant
    return Passes(
        rank=table.rank[order],
        stage=table.stage[order],
        kind=kind[table.op[order]],
        microbatch=table.microbatch[order],
        step=table.step[order].astype(np.int32),
        issued_ns=table.start_ns[order],
        start_ns=table.start_ns[order],
        end_ns=table.end_ns[order],
        busy_ns=table.duration_ns[order],
    )


def _lines(table: OpTable, is_pass: Flags, clocks: Clocks) -> tuple[RankTimeline, ...]:
    lines = []
    set_up = _set_up(table, is_pass)
    is_message = np.isin(table.op, (*_SENDS, *_RECEIVES))
    members, replicas = _places(table, is_pass)
    hosts = dict(table.hosts)
    for rank in np.unique(table.rank[is_pass]).tolist():
        of_rank = table.rank == rank
        stages = tuple(np.unique(table.stage[of_rank & is_pass]).tolist())
        busy = _union(table, of_rank & is_pass)
        pipeline = int(table.pipeline[of_rank][0])
        lines.append(
            RankTimeline(
                rank=rank,
                pipeline=pipeline,
                position=stages[0],
                stages=stages,
                busy=busy,
                occupied=busy,
                apparent=_union(table, of_rank & (is_pass | is_message)),
                clock_offset_ns=clocks.offset_ns[rank],
                memory=_memory(table.memory_bytes[of_rank]),
                members=members[pipeline],
                outside=_outside(table, of_rank & ~is_pass & ~is_message),
                collectives=_reductions(table, of_rank, replicas[stages]),
                timers=True,
                device=(hosts.get(rank, ""), UNKNOWN),
                set_up=set_up,
                file=table.file,
            )
        )
    return tuple(sorted(lines, key=lambda line: (line.pipeline, line.position)))


def _union(table: OpTable, rows: Flags | I64) -> Intervals:
    return union_of(table.start_ns[rows], table.end_ns[rows])


def _memory(noted: I64) -> MemoryFigures | None:
    """Return the most that a rank's device held; how it grows nobody noted."""
    peak = int(noted.max(initial=UNKNOWN))
    if peak < 0:
        return None
    return MemoryFigures(
        peak_bytes=peak,
        peak_reserved_bytes=None,
        static_bytes=None,
        per_microbatch_bytes=None,
        transient_bytes=None,
        most_in_flight=0,
        limit_bytes=None,
    )


def _places(
    table: OpTable, is_pass: Flags
) -> tuple[dict[int, tuple[int, ...]], dict[tuple[int, ...], tuple[int, ...]]]:
    """Return each pipeline's ranks, first to last, and the ranks that hold the same stages."""
    held: dict[int, tuple[int, tuple[int, ...]]] = {}
    for rank in np.unique(table.rank[is_pass]).tolist():
        rows = is_pass & (table.rank == rank)
        held[rank] = int(table.pipeline[rows][0]), tuple(np.unique(table.stage[rows]).tolist())
    members: dict[int, dict[int, int]] = {}
    replicas: dict[tuple[int, ...], list[int]] = {}
    for rank, (pipeline, stages) in sorted(held.items(), key=lambda item: item[1][1]):
        members.setdefault(pipeline, {})[stages[0]] = rank
        replicas.setdefault(stages, []).append(rank)
    if all(len(stages) == 1 for _, stages in held.values()):
        last = max(stages[0] for _, stages in held.values())
        strides = {_stride(ranks) for ranks in members.values() if len(ranks) > 1}
        stride = strides.pop() if len(strides) == 1 else None
        for ranks in members.values():
            known, first = next(iter(sorted(ranks.items())))
            for stage in range(last + 1 if stride else 0):
                ranks.setdefault(stage, first + (stride or 0) * (stage - known))
    return (
        {
            pipeline: tuple(rank for _, rank in sorted(ranks.items()))
            for pipeline, ranks in members.items()
        },
        {stages: tuple(sorted(ranks)) for stages, ranks in replicas.items()},
    )


def _stride(ranks: dict[int, int]) -> int | None:
    """Return how far ranks of neighbouring stages are apart, where all are as far; else None.

    So the rank of a stage is known that no row is of.
    """
    known = np.array(sorted(ranks.items()))
    apart = np.diff(known[:, 1]) / np.diff(known[:, 0])
    return int(apart[0]) if (apart == apart[0]).all() and apart[0].is_integer() else None


def _outside(table: OpTable, besides: Flags) -> tuple[tuple[str, Intervals], ...]:
    """Name what a rank does besides its passes and messages."""
    rows_of: dict[str, list[I64]] = {}
    for number in np.unique(table.name[besides]).tolist():
        rows = np.flatnonzero(besides & (table.name == number))
        name = table.names[number]
        if table.op[rows[0]] == Op.COLLECTIVE:
            kind = REDUCTION
        else:
            plain = re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")
            kind = next((kind for kind, pattern in _OUTSIDE if pattern.search(name)), plain)
        rows_of.setdefault(kind, []).append(rows)
    return tuple((kind, _union(table, np.concatenate(parts))) for kind, parts in rows_of.items())


def _reductions(
    table: OpTable, of_rank: Flags, replicas: tuple[int, ...]
) -> RankCollectives | None:
    """Return a rank's reductions with the same stages of other replicas; None where it has none.

    Each is taken to begin when the rank had done all it does by itself: timers of production jobs
    begin late, and what a rank waits before its first reduction is a wait for other replicas.
    """
    kind_of = {
        number: next((kind for kind, pattern in _REDUCES if pattern.search(name)), None)
        for number, name in enumerate(table.names)
        if not _INSIDE_A_REPLICA.search(name)
    }
    reduces = [number for number, kind in kind_of.items() if kind is not None]
    joins = (table.op == Op.COLLECTIVE) & np.isin(table.name, reduces)
    rows = np.flatnonzero(of_rank & joins)
    if len(replicas) < 2 or not len(rows):
        return None
    others = np.flatnonzero(of_rank & (joins | (table.op != Op.COLLECTIVE)))
    start, end = table.start_ns, table.end_ns
    steps = table.step[others]  # tables are sorted by step
    begins = start[rows].copy()
    for at, row in enumerate(rows.tolist()):
        first, last = np.searchsorted(steps, (table.step[row], table.step[row] + 1))
        ends = end[others[first:last]]
        begins[at] = ends[ends <= start[row]].max(initial=_UNKNOWN_NS)
    begins = np.where(begins == _UNKNOWN_NS, start[rows], begins)
    kinds = [int(kind_of[number] or 0) for number in table.name[rows].tolist()]
    return RankCollectives(
        groups=(Group(name="data parallel", description="dp", ranks=replicas),),
        group=np.zeros(len(rows), dtype=np.int32),
        kind=np.array(kinds, dtype=np.uint8),
        step=table.step[rows].astype(np.int32),
        ready_ns=begins,
        start_ns=begins,
        end_ns=end[rows],
        exposed_ns=end[rows] - begins,
        blocks=np.ones(len(rows), dtype=bool),
        in_forward=np.zeros(len(rows), dtype=bool),
        message_bytes=np.maximum(table.message_bytes[rows], 0),
    )


def _posts(table: OpTable, is_pass: Flags) -> dict[int, Messages]:
    """Return each rank's messages; a peer is the one named, else the neighbouring stage's rank.

    A rank that never computes while it sends waits for its messages, as Megatron and torch's 1F1B
    do: what it computes next is held up by them.
    """
    stages = zip(table.pipeline.tolist(), table.stage.tolist(), strict=True)
    home = dict(zip(stages, table.rank.tolist(), strict=True))
    start, end = table.start_ns, table.end_ns
    ways = {**_SENDS, **_RECEIVES}
    posts = {}
    for rank in np.unique(table.rank).tolist():
        rows = np.flatnonzero((table.rank == rank) & np.isin(table.op, tuple(ways)))
        rows = rows[np.argsort(start[rows], kind="stable")]
        peers = [
            int(table.peer[row])
            if table.peer[row] >= 0
            else home.get(
                (int(table.pipeline[row]), int(table.stage[row]) + ways[Op(table.op[row])]), -1
            )
            for row in rows.tolist()
        ]
        is_send = np.isin(table.op[rows], tuple(_SENDS))
        passes = np.flatnonzero((table.rank == rank) & is_pass)
        computes = _union(table, passes)
        beside = int(computes.covered_until(end[rows[is_send]]).sum())
        beside -= int(computes.covered_until(start[rows[is_send]]).sum())
        waits = beside < _BESIDE * int(table.duration_ns[rows[is_send]].sum())
        queue = _queues(start[rows], end[rows], np.array(peers), is_send)
        made = _made(table, passes, rows)
        stood = _stood(start[rows], end[rows], queue)
        made = np.where(made == _UNKNOWN_NS, start[rows], np.minimum(made, start[rows]))
        posts[rank] = Messages(
            issued_ns=np.where(stood, made, start[rows]),
            peer=np.array(peers, dtype=np.int32),
            is_send=is_send,
            start_ns=start[rows],
            end_ns=end[rows],
            message_bytes=table.message_bytes[rows],
            fused=_fused(start[rows], end[rows]),
            queue=queue,
            tag=np.full(len(rows), UNKNOWN, dtype=np.int32),
            timed=np.ones(len(rows), dtype=bool),
            waited_ns=start[rows] if waits else np.full(len(rows), NEVER_WAITED_NS),
            step=table.step[rows].astype(np.int32),
        )
    return posts


def _made(table: OpTable, passes: I64, rows: I64) -> I64:
    """Return when the pass ended whose result each message of a rank carries, where it is known.

    The n-th send of a stage in a step, one way, carries the result of its n-th pass that way.
    """
    made = np.full(len(rows), _UNKNOWN_NS, dtype=np.int64)
    group = table.step * (int(table.stage.max()) + 1) + table.stage
    for op, kinds in _MAKES.items():
        sends = np.flatnonzero(table.op[rows] == op)  # rows are sorted by start
        sends = sends[np.argsort(group[rows[sends]], kind="stable")]
        makers = passes[np.isin(table.op[passes], kinds)]
        makers = makers[np.lexsort((table.end_ns[makers], group[makers]))]
        if not len(sends) or not len(makers):
            continue
        groups, first, count = np.unique(group[makers], return_index=True, return_counts=True)
        own, begins, whose, sent = np.unique(
            group[rows[sends]], return_index=True, return_inverse=True, return_counts=True
        )
        at = np.minimum(np.searchsorted(groups, own), len(groups) - 1)
        known = ((groups[at] == own) & (sent % count[at] == 0))[whose]
        number = (np.arange(len(sends)) - begins[whose]) // np.maximum(sent // count[at], 1)[whose]
        maker = makers[np.minimum(first[at][whose] + number, len(makers) - 1)]
        made[sends] = np.where(known, table.end_ns[maker], _UNKNOWN_NS)
    return made


def _stood(start: I64, end: I64, queue: I32) -> Flags:
    """Tell messages that began as soon as the one before them in their queue ended.

    Then nobody noted when they were asked for: their rank may long have gone on.
    """
    stood = np.zeros(len(start), dtype=bool)
    for number in np.unique(queue[queue >= 0]).tolist():
        rows = np.flatnonzero(queue == number)
        apart = start[rows][1:] - np.maximum.accumulate(end[rows])[:-1]
        stood[rows[1:]] = (apart >= 0) & (apart <= _AT_ONCE_NS)
    return stood


def _queues(start: I64, end: I64, peer: NDArray[np.integer[Any]], is_send: Flags) -> I32:
    """Tell which messages of a rank stand behind each other: those that never overlap.

    All of them, else those to one peer or from it; -1 where even these do.
    """

    def in_turn(rows: I64) -> bool:
        """Rows are sorted by start; both sides of an exchange share their interval."""
        apart = (np.diff(start[rows]) != 0) | (np.diff(end[rows]) != 0)
        late = np.maximum.accumulate(end[rows])[:-1] - start[rows][1:]
        return bool((late[apart] <= 0).all())

    every = np.arange(len(start))
    if len(every) and in_turn(every):
        return np.zeros(len(start), dtype=np.int32)
    queue = np.full(len(start), -1, dtype=np.int32)
    for number in np.unique(2 * peer + is_send).tolist():
        rows = np.flatnonzero(2 * peer + is_send == number)
        if number >= 0 and in_turn(rows):
            queue[rows] = number
    return queue


def _fused(start: I64, end: I64) -> Flags:
    """Tell rows that share an interval: one exchange, written down as a send and a receive."""
    _, row, count = np.unique(
        np.stack((start, end)), axis=1, return_inverse=True, return_counts=True
    )
    return count[row.reshape(-1)] > 1


Rows = NDArray[np.intp]


def rounding_of(passes: Passes) -> int:
    """Return what all times of passes are whole numbers of, in ns."""
    begin = passes.start_ns.min(initial=np.iinfo(np.int64).max)
    times = np.concatenate((passes.start_ns - begin, passes.end_ns - passes.start_ns))
    return int(np.gcd.reduce(times)) if len(times) else 1


def doubt_times(passes: Passes, pipeline_of: I64, file: str) -> list[Gap]:
    """Say by how much passes contradict each other, whatever is added to the stamps of a rank."""
    behind: dict[tuple[int, int], int] = {}
    for needed, needing in _needs(passes, pipeline_of):
        late = passes.end_ns[needed] - passes.start_ns[needing]
        keys = np.stack((passes.rank[needed], passes.rank[needing]))
        hops, row = np.unique(keys, axis=1, return_inverse=True)
        most = np.full(hops.shape[1], _UNKNOWN_NS)
        np.maximum.at(most, row.reshape(-1), late)
        for first, second, least in np.vstack((hops, most)).T.tolist():
            behind[first, second] = max(behind.get((first, second), least), least)
    apart = {
        ends: least + behind[ends[::-1]]
        for ends, least in behind.items()
        if ends[0] < ends[1] and ends[::-1] in behind
    }
    ends = max(apart, key=lambda ends: apart[ends], default=None)
    if ends is None or apart[ends] <= 2 * rounding_of(passes):
        return []
    return [
        Gap(
            code=Code.CLOCK_OFF,
            message=f"passes of {numbered('rank', ends)} contradict each other by "
            f"{show_duration(apart[ends])} on whatever clocks: their times are not exact",
            hint="time passes by events of the device, and set the clocks of the hosts by NTP",
            file=file,
            moves_ns=apart[ends] // 2,
        )
    ]


def steps_out_of_order(passes: Passes, pipeline_of: I64) -> dict[int, dict[int, set[int]]]:
    """Return the steps of each pipeline in which a pass ends before one that it needs has begun.

    With the ranks of both.
    """
    found: dict[int, dict[int, set[int]]] = {}
    rounding_ns = rounding_of(passes)
    for needed, needing in _needs(passes, pipeline_of):
        early = passes.end_ns[needing] < passes.start_ns[needed] - 2 * rounding_ns
        for one, other in zip(needed[early].tolist(), needing[early].tolist(), strict=True):
            steps = found.setdefault(int(pipeline_of[passes.rank[one]]), {})
            ranks = {int(passes.rank[one]), int(passes.rank[other])}
            steps.setdefault(int(passes.step[one]), set()).update(ranks)
    return found


def _needs(passes: Passes, pipeline_of: I64) -> Iterator[tuple[Rows, Rows]]:
    """Yield passes that are needed, and those that need them: of the stage before, or after it."""
    backward = np.isin(passes.kind, (PassKind.B, PassKind.I))
    batch = (passes.microbatch, passes.step, pipeline_of[passes.rank])
    told = passes.microbatch >= 0
    for rows, keys in (
        (told & (passes.kind == PassKind.F), (passes.stage, *batch)),
        (told & backward, (-passes.stage, *batch)),
        (told & (backward | (passes.kind == PassKind.F)), (backward, passes.stage, *batch)),
    ):
        order = np.lexsort(keys)
        order = order[rows[order]]
        apart = [np.diff(np.asarray(key, dtype=np.int64)[order]) for key in keys]
        follows = (apart[0] == 1) & ~np.any(apart[1:], axis=0)
        yield order[:-1][follows], order[1:][follows]
