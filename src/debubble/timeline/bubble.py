"""A `Timeline` in → the bubble as a number: per step and pipeline, over one window."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from debubble.timeline.model import Passes, RankTimeline, Timeline

# Steps of a closed loop follow each other, though a first rank may begin the next one while the
# last weight gradients of the others run. Batches in flight overlap by most of their length.
_OVERLAP_TOLERANCE = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """One step of one pipeline: from the first pass's start to the last pass's end."""

    step: int
    start_ns: int
    end_ns: int
    bubble_fraction: float
    useful_fraction: float
    apparent_fraction: float
    longest_stage_bubble: float
    """Against the longest single rank's span, as the zero-bubble papers have it."""
    bubble_over_ideal: float
    """Bubble time over ideal time, as Megatron has it."""

    @property
    def length_ns(self) -> int:
        """The batch latency."""
        return self.end_ns - self.start_ns


def measure_windows(timeline: Timeline, pipeline: int) -> tuple[Window, ...]:
    """Measure every step in which all captured ranks of the pipeline ran passes.

    None where they are of different runs.
    """
    if pipeline in timeline.mixed:
        return ()
    ranks = timeline.ranks_of(pipeline)
    names = [rank.rank for rank in ranks]
    windows = []
    for step in timeline.steps:
        here = timeline.passes.where(
            (timeline.passes.step == step) & np.isin(timeline.passes.rank, names)
        )
        if set(here.rank.tolist()) == set(names):
            windows.append(_measure(here, ranks, step))
    return tuple(windows)


def _measure(passes: Passes, ranks: tuple[RankTimeline, ...], step: int) -> Window:
    start, end = int(passes.start_ns.min()), int(passes.end_ns.max())
    whole = len(ranks) * (end - start)
    occupied = sum(rank.occupied.inside(start, end) for rank in ranks)
    spans = [_bubble_of_span(passes, rank) for rank in ranks]
    longest = max(spans, key=lambda span: span[0])
    return Window(
        step=step,
        start_ns=start,
        end_ns=end,
        bubble_fraction=1 - occupied / whole,
        useful_fraction=sum(rank.busy.inside(start, end) for rank in ranks) / whole,
        apparent_fraction=sum(rank.apparent.inside(start, end) for rank in ranks) / whole,
        longest_stage_bubble=1 - longest[1] / longest[0],
        bubble_over_ideal=(whole - occupied) / occupied,
    )


def _bubble_of_span(passes: Passes, rank: RankTimeline) -> tuple[int, int]:
    mine = passes.rank == rank.rank
    start, end = int(passes.start_ns[mine].min()), int(passes.end_ns[mine].max())
    return end - start, rank.occupied.inside(start, end)


def steps_overlap(windows: tuple[Window, ...]) -> bool:
    """Tell a stream from a closed loop: a step that begins well before the one before it ends."""
    return any(
        before.end_ns - after.start_ns > _OVERLAP_TOLERANCE * before.length_ns
        for before, after in pairwise(windows)
    )


def common_span(ranks: tuple[RankTimeline, ...]) -> tuple[int, int] | None:
    """Return the span in which every rank was captured; None where there is none."""
    starts = [int(rank.busy.start_ns[0]) for rank in ranks if len(rank.busy.start_ns)]
    ends = [int(rank.busy.end_ns[-1]) for rank in ranks if len(rank.busy.end_ns)]
    if len(starts) < len(ranks) or max(starts) >= min(ends):
        return None
    return max(starts), min(ends)
