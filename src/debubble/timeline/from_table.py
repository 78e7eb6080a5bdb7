"""An op table in → a `Timeline` out: passes and transfers are given, nothing has to be inferred."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from debubble.errors import NoPipeline
from debubble.timeline.model import (
    I32,
    I64,
    NEVER_WAITED_NS,
    UNKNOWN,
    Flags,
    Passes,
    PassKind,
    RankTimeline,
    Timeline,
    union_of,
)
from debubble.timeline.transfers import RankMessages, match_transfers
from debubble.timeline.work import Messages
from debubble.trace.optable import Op, OpTable

_KINDS = {
    Op.FORWARD: PassKind.F,
    Op.BACKWARD: PassKind.B,
    Op.INPUT_GRAD: PassKind.I,
    Op.WEIGHT_GRAD: PassKind.W,
}
# Which way a message goes, counted in stages.
_SENDS = {Op.FORWARD_SEND: 1, Op.BACKWARD_SEND: -1}
_RECEIVES = {Op.FORWARD_RECEIVE: -1, Op.BACKWARD_RECEIVE: 1}
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
    rank = table.rank
    if (rank < 0).any():  # not given: counted through pipelines and stages
        stages = int(table.stage.max()) + 1
        rank = (table.pipeline * stages + table.stage).astype(np.int32)
    start = table.start_ns + _lift(table)
    end = start + table.duration_ns
    transfers, _ = match_transfers(_posts(table, rank, start, end))
    return Timeline(
        ranks=_lines(table, rank, start, end, is_pass),
        passes=_passes(table, rank, start, end, is_pass),
        transfers=transfers,
        steps=tuple(np.unique(table.step[is_pass]).tolist()),
        clock_uncertainty_ns=0,
    )


def _set_up(table: OpTable, start: I64, end: I64, kept: Flags) -> tuple[tuple[int, str], ...]:
    """Tell whether the table holds the first step of its job, and it took as long as set-up does.

    Timers show no set-up. But jobs count their steps, and the first of all never is without.
    """
    if table.step[kept].min() != 0:
        return ()
    begin, reach, _ = _spans_of_steps(table.step[kept], start[kept], end[kept])
    lengths = reach - begin
    slow = lengths[0] > _FIRST_STEP * np.median(lengths)
    return ((0, "it is the job's first and took much longer"),) if slow else ()


def _lift(table: OpTable) -> I64:
    """Return what to add to each row so that no two steps overlap.

    Tables often count each step from its own start. Then the time between steps is not known.
    """
    end = table.start_ns + table.duration_ns
    begin, reach, row = _spans_of_steps(table.step, table.start_ns, end)
    if (begin[1:] >= reach[:-1]).all():
        return np.zeros(len(table), dtype=np.int64)
    lengths = reach - begin
    return (np.concatenate(([0], np.cumsum(lengths + 1)[:-1])) - begin)[row]


def _spans_of_steps(step: NDArray[np.integer[Any]], start: I64, end: I64) -> tuple[I64, I64, I64]:
    """Return when each step begins and ends, and which of them each row is of."""
    steps, row = np.unique(step, return_inverse=True)
    begin = np.full(len(steps), np.iinfo(np.int64).max, dtype=np.int64)
    reach = np.full(len(steps), np.iinfo(np.int64).min, dtype=np.int64)
    np.minimum.at(begin, row, start)
    np.maximum.at(reach, row, end)
    return begin, reach, row


def _passes(table: OpTable, rank: I32, start: I64, end: I64, kept: Flags) -> Passes:
    order = np.flatnonzero(kept)[np.argsort(start[kept], kind="stable")]
    kind = np.zeros(max(_KINDS) + 1, dtype=np.uint8)
    for op, meant in _KINDS.items():
        kind[op] = meant
    return Passes(
        rank=rank[order],
        stage=table.stage[order],
        kind=kind[table.op[order]],
        microbatch=table.microbatch[order],
        step=table.step[order].astype(np.int32),
        issued_ns=start[order],
        start_ns=start[order],
        end_ns=end[order],
        busy_ns=end[order] - start[order],
    )


def _lines(
    table: OpTable, rank: I32, start: I64, end: I64, is_pass: Flags
) -> tuple[RankTimeline, ...]:
    lines = []
    set_up = _set_up(table, start, end, is_pass)
    for name in np.unique(rank[is_pass]).tolist():
        mine = rank == name
        first = int(np.flatnonzero(mine)[0])
        stages = tuple(np.unique(table.stage[mine & is_pass]).tolist())
        busy = union_of(start[mine & is_pass], end[mine & is_pass])
        moves = mine & np.isin(table.op, (*_SENDS, *_RECEIVES))
        lines.append(
            RankTimeline(
                rank=name,
                pipeline=int(table.pipeline[first]),
                position=stages[0],
                stages=stages,
                busy=busy,
                occupied=busy,
                apparent=union_of(start[moves | (mine & is_pass)], end[moves | (mine & is_pass)]),
                clock_offset_ns=0,
                set_up=set_up,
            )
        )
    return tuple(sorted(lines, key=lambda line: (line.pipeline, line.position)))


def _posts(table: OpTable, rank: I32, start: I64, end: I64) -> dict[int, RankMessages]:
    """Return each rank's messages; a peer is the rank of the neighbouring stage."""
    stages = zip(table.pipeline.tolist(), table.stage.tolist(), strict=True)
    home = dict(zip(stages, rank.tolist(), strict=True))
    ways = {**_SENDS, **_RECEIVES}
    posts = {}
    for name in np.unique(rank).tolist():
        rows = np.flatnonzero((rank == name) & np.isin(table.op, tuple(ways)))
        rows = rows[np.argsort(start[rows], kind="stable")]
        peers = [
            home.get(
                (int(table.pipeline[row]), int(table.stage[row]) + ways[Op(table.op[row])]), -1
            )
            for row in rows.tolist()
        ]
        messages = Messages(
            issued_ns=start[rows],
            peer=np.array(peers, dtype=np.int32),
            is_send=np.isin(table.op[rows], tuple(_SENDS)),
            start_ns=start[rows],
            end_ns=end[rows],
            message_bytes=table.message_bytes[rows],
            fused=_fused(start[rows], end[rows]),
            queue=np.full(len(rows), -1, dtype=np.int32),
            tag=np.full(len(rows), UNKNOWN, dtype=np.int32),
            timed=np.ones(len(rows), dtype=bool),
            waited_ns=np.full(len(rows), NEVER_WAITED_NS),
        )
        posts[name] = RankMessages(messages=messages, step=table.step[rows].astype(np.int32))
    return posts


def _fused(start: I64, end: I64) -> Flags:
    """Tell rows that share an interval: one exchange, written down as a send and a receive."""
    _, row, count = np.unique(
        np.stack((start, end)), axis=1, return_inverse=True, return_counts=True
    )
    return count[row.reshape(-1)] > 1
