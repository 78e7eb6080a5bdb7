"""Timelines by hand: set pass by pass, or holding nothing but an order."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from debubble.timeline.model import (
    NEVER_WAITED_NS,
    Intervals,
    Passes,
    PassKind,
    RankTimeline,
    Timeline,
    Transfers,
)

MS = 1_000_000
NOTHING = Intervals(start_ns=np.zeros(0, np.int64), end_ns=np.zeros(0, np.int64))


def a_rank(rank, stages):
    return RankTimeline(
        rank=rank,
        pipeline=0,
        position=rank,
        stages=stages,
        busy=NOTHING,
        occupied=NOTHING,
        apparent=NOTHING,
        clock_offset_ns=0,
    )


def a_timeline(passes, transfers=(), stages=((0,), (1,))):
    """Passes as (rank, stage, kind, microbatch, step, start ms, end ms)."""
    rank, stage, kind, microbatch, step, start, end = zip(*passes, strict=True)
    source, destination, sent, posted, arrived = (
        zip(*transfers, strict=True) if transfers else [()] * 5
    )
    ns = [np.array(times, dtype=np.int64) * MS for times in (sent, posted, arrived)]
    return Timeline(
        ranks=tuple(a_rank(number, held) for number, held in enumerate(stages)),
        passes=Passes(
            rank=np.array(rank, np.int32),
            stage=np.array(stage, np.int32),
            kind=np.array([PassKind[k] for k in kind], np.uint8),
            microbatch=np.array(microbatch, np.int32),
            step=np.array(step, np.int32),
            issued_ns=np.array(start, np.int64) * MS,
            start_ns=np.array(start, np.int64) * MS,
            end_ns=np.array(end, np.int64) * MS,
            busy_ns=(np.array(end, np.int64) - np.array(start, np.int64)) * MS,
        ),
        transfers=Transfers(
            source=np.array(source, np.int32),
            destination=np.array(destination, np.int32),
            step=np.zeros(len(source), np.int32),
            message_bytes=np.ones(len(source), np.int64),
            send_start_ns=ns[0],
            send_end_ns=ns[2],
            receive_start_ns=ns[1],
            receive_end_ns=ns[2],
            fused=np.zeros(len(source), bool),
            send_issued_ns=ns[0],
            receive_issued_ns=ns[1],
            send_queue=np.zeros(len(source), np.int32),
            receive_queue=np.zeros(len(source), np.int32),
            send_waited_ns=np.full(len(source), NEVER_WAITED_NS),
            receive_waited_ns=np.full(len(source), NEVER_WAITED_NS),
        ),
        steps=tuple(sorted(set(step))),
        clock_uncertainty_ns=0,
    )


def timeline_of_order(order, *, steps=(3, 4), names=None, positions=None):
    """A run in which each rank starts one pass a millisecond, in order."""
    names = names or list(range(len(order)))
    positions = positions or list(range(len(order)))
    timeline = a_timeline(
        [
            (names[rank], action.stage, action.kind, action.microbatch, step, start, start + 1)
            for step in steps
            for rank, actions in enumerate(order)
            for start, action in enumerate(actions, start=10_000 * step)
        ]
    )
    ranks = tuple(
        replace(a_rank(name, tuple(sorted({action.stage for action in actions}))), position=place)
        for name, place, actions in zip(names, positions, order, strict=True)
    )
    return replace(timeline, ranks=ranks)
