"""A `Timeline` without steps of its own in → its figures: batches overlap, as a server's do.

There is no window per step. The window is the span in which every rank was captured; all compute
in it counts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from debubble.timeline.bubble import Window, common_span, steps_overlap
from debubble.timeline.model import I64, Passes, PassKind, Timeline

# What a server's users feel: one batch in twenty takes longer.
_TAIL_PERCENT = 95


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamFigures:
    """One pipeline over the span in which all its ranks were captured."""

    start_ns: int
    end_ns: int
    bubble_fraction: float
    useful_fraction: float
    apparent_fraction: float
    batches_in_flight: float
    """The mean over the span of those that entered the first stage and have not left the last."""
    most_in_flight: int
    batch_latency_ns: int | None
    """From the first stage's start to the last stage's end, in the middle."""
    batch_latency_p95_ns: int | None
    batches: int
    """How many were seen from the first stage to the last."""
    batches_per_s: float

    @property
    def in_flight(self) -> float:
        """How many batches the driver keeps in flight: a whole number where it keeps to one.

        A batch whose answer is on its way back, or that waits to enter, is in no stage: so the mean
        stays below the driver's number, by less than one where that is constant.
        """
        steady = self.most_in_flight - self.batches_in_flight < 1
        return self.most_in_flight if steady else self.batches_in_flight


def is_stream(timeline: Timeline, windows: tuple[Window, ...]) -> bool:
    """Tell whether batches overlap: steps do, or forward passes run on without any step marked."""
    if timeline.steps:
        return steps_overlap(windows)
    return len(timeline.passes) > 0 and bool((timeline.passes.kind == PassKind.F).all())


def measure_stream(timeline: Timeline, pipeline: int) -> StreamFigures | None:
    """Measure the span that all ranks of a pipeline share; None where there is none."""
    ranks = timeline.ranks_of(pipeline)
    span = common_span(ranks)
    if span is None:
        return None
    length = span[1] - span[0]
    whole = len(ranks) * length
    start, end = _ways(timeline, pipeline, span)
    complete = (start >= 0) & (end >= 0)
    latency = (end - start)[complete]
    entered = np.where(start >= 0, start, 0).clip(*span)
    gone = np.where(end >= 0, end, span[1]).clip(*span)
    left = int(((end >= span[0]) & (end <= span[1])).sum())
    return StreamFigures(
        start_ns=span[0],
        end_ns=span[1],
        bubble_fraction=1 - sum(rank.occupied.inside(*span) for rank in ranks) / whole,
        useful_fraction=sum(rank.busy.inside(*span) for rank in ranks) / whole,
        apparent_fraction=sum(rank.apparent.inside(*span) for rank in ranks) / whole,
        batches_in_flight=float((gone - entered).sum() / length),
        most_in_flight=_most_at_once(entered, gone),
        batch_latency_ns=round(float(np.median(latency))) if len(latency) else None,
        batch_latency_p95_ns=(
            round(float(np.percentile(latency, _TAIL_PERCENT))) if len(latency) else None
        ),
        batches=len(latency),
        batches_per_s=left * 1e9 / length,
    )


def _most_at_once(entered: I64, gone: I64) -> int:
    """Count up with each batch that enters and down with each that leaves, leaving first."""
    moments = np.concatenate((entered, gone))
    change = np.concatenate((np.ones(len(entered)), -np.ones(len(gone)))).astype(np.int64)
    return int(np.cumsum(change[np.lexsort((change, moments))]).max(initial=0))


def _ways(timeline: Timeline, pipeline: int, span: tuple[int, int]) -> tuple[I64, I64]:
    """Return when each batch entered the first stage and left the last; -1 where not captured."""
    names = [rank.rank for rank in timeline.ranks_of(pipeline)]
    passes = timeline.passes
    passes = passes.where(np.isin(passes.rank, names) & (passes.kind == PassKind.F))
    entered = _by_batch(passes, int(passes.stage.min()), passes.start_ns)
    left = _by_batch(passes, int(passes.stage.max()), passes.end_ns)
    # One that neither entered nor left was in flight all the span, or is no batch of this pipeline.
    batches = sorted({*entered, *left})
    start = np.array([entered.get(batch, -1) for batch in batches], dtype=np.int64)
    end = np.array([left.get(batch, -1) for batch in batches], dtype=np.int64)
    seen = np.where(end >= 0, end, span[1]) > np.where(start >= 0, start, span[0])
    return start[seen], end[seen]


def _by_batch(passes: Passes, stage: int, moment: I64) -> dict[tuple[int, int], int]:
    rows = passes.stage == stage
    keys = zip(passes.step[rows].tolist(), passes.microbatch[rows].tolist(), strict=True)
    return dict(zip(keys, moment[rows].tolist(), strict=True))
