"""Waits in → their shape: short and even, or jagged; at the ends of the pipeline, or in its middle.

Even waits come from the schedule or a steady imbalance; jagged ones from jitter, hosts or a link
that comes and goes. Warm-up and drain, before a rank's first pass and after its last, do not count.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from debubble.timeline.bubble import Window
from debubble.timeline.model import I64, Flags, RankTimeline, Timeline

# Gaps between kernels of one pass are no waits of a pipeline: the shortest pass seen is 1 ms.
_SHORTEST_WAIT_NS = 100_000
# A wait is even if it is within half of its rank's middle wait.
_EVEN_WITHIN = 0.5
# One place stands out if it waits this much more than the ranks do on average.
_STANDS_OUT = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How the waits between a rank's first and last pass look."""

    jagged_fraction: float
    """The share of waiting time that lies in waits unlike the others of their rank."""
    where: str
    """first, last, middle, or everywhere."""
    median_wait_ns: int
    waits: int


def measure_shape(timeline: Timeline, windows: tuple[Window, ...], pipeline: int) -> Shape | None:
    """Describe the waits of a pipeline's steps; None where nobody waits."""
    ranks = timeline.ranks_of(pipeline)
    waits = [_waits(timeline, rank, windows) for rank in ranks]
    total = sum(int(one.sum()) for one in waits)
    if not total:
        return None
    jagged = sum(int(one[_is_jagged(one)].sum()) for one in waits)
    every = np.concatenate(waits)
    return Shape(
        jagged_fraction=jagged / total,
        where=_where([int(one.sum()) for one in waits]),
        median_wait_ns=int(np.median(every)),
        waits=len(every),
    )


def _waits(timeline: Timeline, rank: RankTimeline, windows: tuple[Window, ...]) -> I64:
    found = [np.zeros(0, dtype=np.int64)]
    passes = timeline.passes
    for window in windows:
        mine = (passes.rank == rank.rank) & (passes.step == window.step)
        begin, end = int(passes.start_ns[mine].min()), int(passes.end_ns[mine].max())
        first = np.searchsorted(rank.occupied.end_ns, begin, side="right")
        last = np.searchsorted(rank.occupied.start_ns, end, side="left")
        gaps = rank.occupied.start_ns[first + 1 : last] - rank.occupied.end_ns[first : last - 1]
        found.append(gaps[gaps >= _SHORTEST_WAIT_NS])
    return np.concatenate(found)


def _is_jagged(waits: I64) -> Flags:
    middle = float(np.median(waits)) if len(waits) else 0.0
    unlike: Flags = np.abs(waits - middle) > _EVEN_WITHIN * middle
    return unlike


def _where(idle: list[int]) -> str:
    worst = int(np.argmax(idle))
    if idle[worst] <= _STANDS_OUT * (sum(idle) / len(idle)):
        return "everywhere"
    if worst == 0:
        return "first"
    return "last" if worst == len(idle) - 1 else "middle"
