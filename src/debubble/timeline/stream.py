"""A `Timeline` without steps of its own in → its figures: batches overlap, as a server's do.

There is no window per step. The window is the span in which every rank was captured; all compute
in it counts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from debubble.timeline.bubble import Window, common_span, steps_overlap
from debubble.timeline.model import I64, Passes, PassKind, RankTimeline, Timeline
from debubble.units import NS_PER_S

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
    """The mean over the span of those that entered the first stage and have no answer yet; where
    no answer is captured, of those that have not left the last stage."""
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

        There are never more in flight than it allows, and between an answer and the next batch
        there is one less: so the mean is below a constant number, by less than one.
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
    ways = _ways(timeline, ranks)
    latency = (ways.left_ns - ways.entered_ns)[(ways.entered_ns >= 0) & (ways.left_ns >= 0)]
    entered = np.where(ways.entered_ns >= 0, ways.entered_ns, 0).clip(*span)
    gone = np.where(ways.gone_ns >= 0, ways.gone_ns, span[1]).clip(*span)
    through = int(((ways.left_ns >= span[0]) & (ways.left_ns <= span[1])).sum())
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
        batches_per_s=through * NS_PER_S / length,
    )


def _most_at_once(entered: I64, gone: I64) -> int:
    """Count up with each batch that enters and down with each that leaves, leaving first."""
    moments = np.concatenate((entered, gone))
    change = np.concatenate((np.ones(len(entered)), -np.ones(len(gone)))).astype(np.int64)
    return int(np.cumsum(change[np.lexsort((change, moments))]).max(initial=0))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ways:
    """The way of each batch through the pipeline; -1 where it was not captured."""

    entered_ns: I64
    left_ns: I64
    """When the last stage was through with it."""
    gone_ns: I64
    """When the first rank had its answer; the same where nothing answers it."""


def _ways(timeline: Timeline, ranks: tuple[RankTimeline, ...]) -> _Ways:
    passes = timeline.passes
    passes = passes.where(
        np.isin(passes.rank, [rank.rank for rank in ranks]) & (passes.kind == PassKind.F)
    )
    last_stage = int(passes.stage.max())
    entered = _by_batch(passes, int(passes.stage.min()), passes.start_ns)
    left = _by_batch(passes, last_stage, passes.end_ns)
    gone = _answered(timeline, ranks, passes.where(passes.stage == last_stage))
    # What has no answer is still in flight, unless a later batch has one: then the rank that would
    # know was not captured yet.
    gone |= {batch: left[batch] for batch in left if not gone or batch < min(gone)}
    gone |= {batch: entered[batch] for batch in entered if gone and batch < min(gone)}
    batches = sorted({*entered, *left})

    def column(moments: dict[tuple[int, int], int]) -> I64:
        return np.array([moments.get(batch, -1) for batch in batches], dtype=np.int64)

    return _Ways(entered_ns=column(entered), left_ns=column(left), gone_ns=column(gone))


def _answered(
    timeline: Timeline, ranks: tuple[RankTimeline, ...], last: Passes
) -> dict[tuple[int, int], int]:
    """Return when the first rank had the answer to each batch: the last rank's send after it."""
    transfers = timeline.transfers
    answers = transfers.where(
        (transfers.source == ranks[-1].rank) & (transfers.destination == ranks[0].rank)
    )
    row = np.searchsorted(last.start_ns, answers.send_start_ns, side="right") - 1
    known = row >= 0
    batches = zip(last.step[row[known]].tolist(), last.microbatch[row[known]].tolist(), strict=True)
    return dict(zip(batches, answers.receive_end_ns[known].tolist(), strict=True))


def _by_batch(passes: Passes, stage: int, moment: I64) -> dict[tuple[int, int], int]:
    rows = passes.stage == stage
    keys = zip(passes.step[rows].tolist(), passes.microbatch[rows].tolist(), strict=True)
    return dict(zip(keys, moment[rows].tolist(), strict=True))
