"""A `Program` that was run in → the `Timeline` that a trace of it would give."""

from __future__ import annotations

import numpy as np

from debubble.simulate.events import NEVER_NS
from debubble.simulate.program import NONE, BatchTable, Program, Times, in_exchange
from debubble.timeline.model import (
    I32,
    I64,
    NEVER_WAITED_NS,
    UNKNOWN,
    Intervals,
    Passes,
    RankTimeline,
    Timeline,
    Transfers,
)
from debubble.trace.columns import merge


def as_timeline(
    program: Program, times: Times, *, message_bytes: I64 | None = None, step: int = 0
) -> Timeline:
    """Lay out one run of a program: passes are busy, message kernels only seem so.

    Hosts are taken to be ahead of their devices: all was issued before the step begins, passes one
    after the other, each batch between the pass it waits for and the next.
    """
    table, batches, messages = program.passes, program.batches, program.messages
    begin = int(times.pass_start.min())
    if message_bytes is None:
        message_bytes = np.full(len(messages), UNKNOWN)
    # What waits for nothing on its own rank begins with the step.
    batch_start = np.where(times.batch_start <= NEVER_NS // 2, begin, times.batch_start)
    names = np.array(program.ranks, dtype=np.int32)
    last_of_rank = np.searchsorted(table.place, table.place, side="right")
    pass_issued = 2 * (np.arange(len(table)) - last_of_rank) + begin
    passes = Passes(
        rank=names[table.place],
        stage=table.stage,
        kind=table.kind,
        microbatch=table.microbatch,
        step=np.full(len(table), step, dtype=np.int32),
        issued_ns=pass_issued,
        start_ns=times.pass_start,
        end_ns=times.pass_end,
        busy_ns=times.pass_end - times.pass_start,
    )
    issued = np.full(len(batches), begin - 2 * len(table) - 1)
    follows = batches.after >= 0
    issued[follows] = pass_issued[batches.after[follows]] + 1
    waited = np.full(len(batches), NEVER_WAITED_NS)
    waited[program.waits[:, 1]] = pass_issued[program.waits[:, 0]]
    queue = _queues(batches)
    sent, received = messages.sent, messages.received
    transfers = Transfers(
        source=names[batches.place[sent]],
        destination=names[batches.place[received]],
        step=np.full(len(messages), step, dtype=np.int32),
        message_bytes=message_bytes,
        send_start_ns=batch_start[sent],
        send_end_ns=times.batch_end[sent],
        receive_start_ns=batch_start[received],
        receive_end_ns=times.batch_end[received],
        fused=in_exchange(sent, received),
        send_issued_ns=issued[sent],
        receive_issued_ns=issued[received],
        send_queue=queue[sent],
        receive_queue=queue[received],
        send_waited_ns=waited[sent],
        receive_waited_ns=waited[received],
    )
    # A receive that is always there does not spin: its kernel begins with its message.
    ahead = (batches.after == NONE) & (queue == UNKNOWN)
    first_sent = np.full(len(batches), -NEVER_NS)
    np.minimum.at(first_sent, received, batch_start[sent])
    kernels = np.where(ahead, first_sent, batch_start), times.batch_end
    return Timeline(
        ranks=tuple(_rank(program, times, kernels, place) for place in range(len(program.ranks))),
        # Where passes take no time, the order of the rows is the order in which they ran.
        passes=passes.where(np.argsort(passes.start_ns, kind="stable")),
        transfers=transfers.where(np.argsort(transfers.receive_end_ns, kind="stable")),
        steps=(step,),
        clock_uncertainty_ns=0,
    )


def _queues(batches: BatchTable) -> I32:
    """Return the queue of each batch, named after its first; -1 for a batch alone."""
    queue = np.arange(len(batches), dtype=np.int32)
    followed = np.zeros(len(batches), dtype=bool)
    for row, before in enumerate(batches.before.tolist()):  # a queue's batches stand in order
        if before != NONE:
            queue[row], followed[before] = queue[before], True
    queue[(batches.before == NONE) & ~followed] = UNKNOWN
    return queue


def _rank(program: Program, times: Times, kernels: tuple[I64, I64], place: int) -> RankTimeline:
    passes, batches = program.passes.place == place, program.batches.place == place
    start, end = times.pass_start[passes], times.pass_end[passes]
    busy = _union(start, end)
    return RankTimeline(
        rank=program.ranks[place],
        pipeline=0,
        position=place,
        stages=tuple(np.unique(program.passes.stage[passes]).tolist()),
        busy=busy,
        occupied=busy,
        apparent=_union(
            np.concatenate((start, kernels[0][batches])),
            np.concatenate((end, kernels[1][batches])),
        ),
        clock_offset_ns=0,
        members=program.ranks,
    )


def _union(start: I64, end: I64) -> Intervals:
    lasts = np.flatnonzero(end > start)
    order = lasts[np.argsort(start[lasts], kind="stable")]
    merged = merge(start[order], end[order])
    return Intervals(start_ns=merged[0], end_ns=merged[1])
