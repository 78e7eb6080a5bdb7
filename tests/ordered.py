"""Timelines that hold nothing but an order."""

from __future__ import annotations

import numpy as np

from debubble.timeline.model import Intervals, Passes, PassKind, RankTimeline, Timeline, Transfers

NOTHING = np.zeros(0, dtype=np.int64)


def timeline_of(order, *, steps=(3, 4), names=None, positions=None):
    """A run in which each rank starts one pass a nanosecond, in order."""
    names = names or list(range(len(order)))
    positions = positions or list(range(len(order)))
    rows = [
        (names[rank], action.stage, PassKind[action.kind], action.microbatch, step, start)
        for step in steps
        for rank, actions in enumerate(order)
        for start, action in enumerate(actions, start=10_000 * step)
    ]
    rank, stage, kind, microbatch, step, start = np.array(rows).T
    none = Intervals(start_ns=NOTHING, end_ns=NOTHING)
    lines = [
        RankTimeline(
            rank=names[rank],
            pipeline=0,
            position=positions[rank],
            stages=tuple(sorted({action.stage for action in actions})),
            busy=none,
            occupied=none,
            apparent=none,
            clock_offset_ns=0,
        )
        for rank, actions in enumerate(order)
    ]
    return Timeline(
        ranks=tuple(lines),
        passes=Passes(
            rank=rank.astype(np.int32),
            stage=stage.astype(np.int32),
            kind=kind.astype(np.uint8),
            microbatch=microbatch.astype(np.int32),
            step=step.astype(np.int32),
            issued_ns=start,
            start_ns=start,
            end_ns=start + 1,
            busy_ns=np.ones_like(start),
        ),
        transfers=Transfers(**dict.fromkeys(Transfers.__dataclass_fields__, NOTHING)),
        steps=steps,
        clock_uncertainty_ns=0,
    )
