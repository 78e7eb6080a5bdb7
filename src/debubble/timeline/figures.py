"""A `Timeline` in → the figures of one pipeline out: medians over its steps, stages and hops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from debubble.errors import Code, Gap
from debubble.schedules import Statement
from debubble.timeline.bubble import Window, measure_windows
from debubble.timeline.hops import HopFigures, measure_hops
from debubble.timeline.model import UNKNOWN, Intervals, PassKind, RankTimeline, Timeline
from debubble.timeline.outside import measure_outside
from debubble.timeline.recognise import count_microbatches, recognise_schedule
from debubble.timeline.shape import Shape, measure_shape
from debubble.timeline.stated import StatedSchedule, hold_against
from debubble.timeline.stream import StreamFigures, is_stream, measure_stream


@dataclass(frozen=True, slots=True, kw_only=True)
class StageFigures:
    """What one kind of pass takes on one stage."""

    stage: int
    rank: int
    kind: PassKind
    median_ns: int
    mad_ns: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankShares:
    """What one rank did of the window, in the middle of all steps; None without a window."""

    rank: int
    useful_fraction: float | None
    apparent_fraction: float | None
    bubble_fraction: float | None
    busy_fraction: float | None
    """Of its own span, from its first to its last compute in the capture."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineFigures:
    """Everything measured of one pipeline; None is what cannot be said."""

    pipeline: int
    ranks: tuple[RankTimeline, ...]
    kind: str
    """training, forward, or stream."""
    microbatches: int | None
    schedule: str | None
    """As recognised."""
    stated: StatedSchedule | None
    """As the user states it, where he does."""
    windows: tuple[Window, ...]
    stream: StreamFigures | None
    """The one window of a stream, which has none per step."""
    bubble_fraction: float | None
    batch_latency_ns: int | None
    step_time_ns: int | None
    useful_fraction: float | None
    apparent_fraction: float | None
    shares: tuple[RankShares, ...]
    """The same, rank by rank."""
    longest_stage_bubble: float | None
    bubble_over_ideal: float | None
    stages: tuple[StageFigures, ...]
    hops: tuple[HopFigures, ...]
    shape: Shape | None
    outside_ns: dict[str, int]
    """What lies between two steps, by kind; empty where no two steps follow each other."""
    gaps: tuple[Gap, ...]

    @property
    def absent(self) -> tuple[int, ...]:
        """The ranks of the pipeline that have no trace: what is measured is a part of it."""
        captured = {rank.rank for rank in self.ranks}
        return tuple(rank for rank in self.ranks[0].members if rank not in captured | {UNKNOWN})


def measure_pipeline(
    timeline: Timeline, pipeline: int, step: int | None = None, statement: Statement | None = None
) -> PipelineFigures:
    """Measure a pipeline over all its steps, or over one; hold it against a stated schedule."""
    ranks = timeline.ranks_of(pipeline)
    all_windows = measure_windows(timeline, pipeline)
    microbatches = count_microbatches(timeline, pipeline)
    streams = is_stream(timeline, all_windows)
    stream = measure_stream(timeline, pipeline) if streams else None
    windows = tuple(w for w in all_windows if step is None or w.step == step)
    counted = () if streams else windows
    measured = (stream,) if stream else counted
    stated = None
    if statement is not None:
        stated = hold_against(statement, timeline, pipeline, microbatches, streams=streams)
    trains = bool((timeline.passes.kind != PassKind.F).any())
    return PipelineFigures(
        pipeline=pipeline,
        ranks=ranks,
        kind="stream" if streams else "training" if trains else "forward",
        microbatches=None if streams else microbatches,
        schedule=None if streams else recognise_schedule(timeline, pipeline, microbatches),
        stated=stated,
        windows=counted,
        stream=stream,
        bubble_fraction=_middle([w.bubble_fraction for w in measured]),
        batch_latency_ns=stream.batch_latency_ns
        if stream
        else _whole([w.length_ns for w in counted]),
        step_time_ns=_whole(np.diff([w.start_ns for w in all_windows]).tolist()),
        useful_fraction=_middle([w.useful_fraction for w in measured]),
        apparent_fraction=_middle([w.apparent_fraction for w in measured]),
        shares=tuple(_shares(rank, measured) for rank in ranks),
        longest_stage_bubble=_middle([w.longest_stage_bubble for w in counted]),
        bubble_over_ideal=_middle([w.bubble_over_ideal for w in counted]),
        stages=_stages(timeline, ranks),
        hops=measure_hops(timeline, ranks),
        shape=measure_shape(timeline, counted, pipeline) if counted else None,
        outside_ns=measure_outside(ranks, () if streams else all_windows),
        gaps=(
            *_gaps(streams=streams, measured=bool(measured)),
            *(stated.gaps if stated else ()),
        ),
    )


def _middle(values: list[float]) -> float | None:
    return float(median(values)) if values else None


def _whole(values: list[int]) -> int | None:
    return round(median(values)) if values else None


def _gaps(*, streams: bool, measured: bool) -> tuple[Gap, ...]:
    if measured:
        return ()
    if streams:
        return (
            Gap(
                code=Code.NO_COMMON_SPAN,
                message="the ranks were captured at different times; no span is common to all",
                hint="capture a closed loop, or more steps, so that the captures overlap",
            ),
        )
    return (
        Gap(
            code=Code.NO_STEPS,
            message="no step in which every rank ran passes",
            hint="call prof.step() once a batch, and capture the same steps on all ranks",
        ),
    )


def _stages(timeline: Timeline, ranks: tuple[RankTimeline, ...]) -> tuple[StageFigures, ...]:
    passes = timeline.passes
    figures = []
    for rank in ranks:
        for stage in rank.stages:
            for kind in PassKind:
                mine = (passes.rank == rank.rank) & (passes.stage == stage) & (passes.kind == kind)
                lengths = (passes.end_ns - passes.start_ns)[mine]
                if len(lengths):
                    middle = float(np.median(lengths))
                    figures.append(
                        StageFigures(
                            stage=stage,
                            rank=rank.rank,
                            kind=kind,
                            median_ns=round(middle),
                            mad_ns=round(float(np.median(np.abs(lengths - middle)))),
                            count=len(lengths),
                        )
                    )
    return tuple(sorted(figures, key=lambda one: (one.stage, one.kind)))


def _shares(rank: RankTimeline, windows: Sequence[Window | StreamFigures]) -> RankShares:
    spans = [(window.start_ns, window.end_ns) for window in windows]

    def share(intervals: Intervals) -> float | None:
        return _middle([intervals.inside(*span) / (span[1] - span[0]) for span in spans])

    occupied = share(rank.occupied)
    return RankShares(
        rank=rank.rank,
        useful_fraction=share(rank.busy),
        apparent_fraction=share(rank.apparent),
        bubble_fraction=None if occupied is None else 1 - occupied,
        busy_fraction=_own_share(rank.busy),
    )


def _own_share(busy: Intervals) -> float | None:
    if not len(busy.start_ns):
        return None
    begin, end = int(busy.start_ns[0]), int(busy.end_ns[-1])
    return busy.inside(begin, end) / (end - begin) if end > begin else None
