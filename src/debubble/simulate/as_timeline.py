"""A `Program` that was run in → the `Timeline` that a trace of it would give."""

from __future__ import annotations

import numpy as np

from debubble.simulate.events import NEVER_NS
from debubble.simulate.program import NONE, BatchTable, PassTable, Program, Times, in_exchange
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
from debubble.trace.summary import merge


def as_timeline(
    program: Program, times: Times, *, message_bytes: I64 | None = None, step: int = 0
) -> Timeline:
    """Lay out one run of a program: passes are busy, message kernels only seem so.

    Hosts are taken to be ahead of their devices: all was issued before the step begins.
    """
    begin = int(times.pass_start.min())
    times = _posted_at_once(times, begin)
    kernels = _kernels(program, times)
    if message_bytes is None:
        message_bytes = np.full(len(program.messages), UNKNOWN)
    return Timeline(
        ranks=tuple(_rank(program, times, kernels, place) for place in range(len(program.ranks))),
        passes=_passes(program, times, step, begin),
        transfers=_transfers(program, times, step, begin, message_bytes),
        steps=(step,),
        clock_uncertainty_ns=0,
    )


def _posted_at_once(times: Times, begin: int) -> Times:
    """Let what waits for nothing on its own rank begin with the step."""
    start = times.batch_start
    return Times(
        pass_start=times.pass_start,
        pass_end=times.pass_end,
        batch_start=np.where(start <= NEVER_NS // 2, begin, start),
        batch_end=times.batch_end,
    )


def _kernels(program: Program, times: Times) -> tuple[I64, I64]:
    """Return when batches run as kernels: a receive that is always there does not spin."""
    messages, start = program.messages, times.batch_start.copy()
    ahead = (program.batches.after == NONE) & (_queues(program.batches) == UNKNOWN)
    sent = np.full(len(start), -NEVER_NS)
    np.minimum.at(sent, messages.received, start[messages.sent])
    start[ahead] = sent[ahead]
    return start, times.batch_end


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


def _passes(program: Program, times: Times, step: int, begin: int) -> Passes:
    table = program.passes
    # Where passes take no time, the order of the rows is the order in which they ran.
    order = np.lexsort((np.arange(len(table)), times.pass_start))
    columns = Passes(
        rank=np.array(program.ranks, dtype=np.int32)[table.place],
        stage=table.stage,
        kind=table.kind,
        microbatch=table.microbatch,
        step=np.full(len(table), step, dtype=np.int32),
        issued_ns=_issued(table) + begin,
        start_ns=times.pass_start,
        end_ns=times.pass_end,
        busy_ns=times.pass_end - times.pass_start,
    )
    return columns.where(order)


def _issued(table: PassTable) -> I64:
    """Return when each pass was issued: one after the other, all before the step begins."""
    row = np.arange(len(table))
    last_of_place = np.searchsorted(table.place, table.place, side="right")
    issued: I64 = 2 * (row - last_of_place)
    return issued


def _issued_batches(program: Program) -> I64:
    """Return the same of batches: each between the pass it waits for and the next."""
    after = program.batches.after
    earliest = -2 * len(program.passes) - 1
    return np.where(after >= 0, _issued(program.passes)[np.maximum(after, 0)] + 1, earliest)


def _transfers(
    program: Program, times: Times, step: int, begin: int, message_bytes: I64
) -> Transfers:
    messages, batches = program.messages, program.batches
    rank = np.array(program.ranks, dtype=np.int32)[batches.place]
    issued, queue = _issued_batches(program) + begin, _queues(batches)
    waited = np.full(len(batches), NEVER_WAITED_NS)
    waited[program.waits[:, 1]] = _issued(program.passes)[program.waits[:, 0]] + begin
    columns = Transfers(
        source=rank[messages.sent],
        destination=rank[messages.received],
        step=np.full(len(messages), step, dtype=np.int32),
        message_bytes=message_bytes,
        send_start_ns=times.batch_start[messages.sent],
        send_end_ns=times.batch_end[messages.sent],
        receive_start_ns=times.batch_start[messages.received],
        receive_end_ns=times.batch_end[messages.received],
        fused=in_exchange(messages.sent, messages.received),
        send_issued_ns=issued[messages.sent],
        receive_issued_ns=issued[messages.received],
        send_queue=queue[messages.sent],
        receive_queue=queue[messages.received],
        send_waited_ns=waited[messages.sent],
        receive_waited_ns=waited[messages.received],
    )
    arrival = np.argsort(columns.receive_end_ns, kind="stable")
    return columns.where(arrival)


def _queues(batches: BatchTable) -> I32:
    """Return the queue of each batch, named after its first; -1 for a batch alone."""
    queue = np.arange(len(batches), dtype=np.int32)
    followed = np.zeros(len(batches), dtype=bool)
    for row, before in enumerate(batches.before.tolist()):  # a queue's batches stand in order
        if before != NONE:
            queue[row], followed[before] = queue[before], True
    queue[(batches.before == NONE) & ~followed] = UNKNOWN
    return queue
