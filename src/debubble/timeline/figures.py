"""A `Timeline` in → the figures of one pipeline out: medians over its steps, stages and hops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median

import numpy as np

from debubble.errors import Code, Gap
from debubble.schedules import Statement
from debubble.timeline.bubble import (
    Shape,
    StreamFigures,
    Window,
    is_stream,
    measure_outside,
    measure_shape,
    measure_stream,
    measure_windows,
)
from debubble.timeline.model import Intervals, PassKind, RankTimeline, Timeline
from debubble.timeline.recognise import (
    StatedSchedule,
    count_microbatches,
    hold_against,
    recognise_schedule,
)
from debubble.timeline.steps import SkippedStep, choose_steps, only_steps
from debubble.timeline.transfers import HopFigures, measure_hops
from debubble.units import counted


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
    left_out: tuple[SkippedStep, ...] = ()
    """Steps that no figure is made of."""
    cut: bool = False
    """No step was captured whole: the figures are of parts."""
    one_run: bool = True
    """False: the ranks are of different runs, and nothing between them can be measured."""

    @property
    def absent(self) -> tuple[int, ...]:
        """The ranks of the pipeline that have no trace: what is measured is a part of it."""
        captured = {rank.rank for rank in self.ranks}
        return tuple(rank for rank in self.ranks[0].members if rank not in captured)


def measure_pipeline(
    timeline: Timeline, pipeline: int, step: int | None = None, statement: Statement | None = None
) -> PipelineFigures:
    """Measure a pipeline over all its steps, or over one; hold it against a stated schedule."""
    ranks = timeline.ranks_of(pipeline)
    captured = timeline.steps
    scope = _choose_scope(timeline, pipeline, step)
    timeline, all_windows = scope.timeline, scope.windows
    streams = scope.kind == "stream"
    one_run = scope.one_run
    microbatches = count_microbatches(timeline, pipeline) if one_run and not scope.cut else None
    stream = measure_stream(timeline, pipeline) if streams else None
    asked = tuple(w for w in all_windows if step is None or w.step == step)
    inside = () if streams else asked
    measured = (stream,) if stream else inside
    named = not streams and one_run
    stated = None
    if statement is not None and named:
        stated = hold_against(statement, timeline, pipeline, microbatches, streams=streams)
    return PipelineFigures(
        pipeline=pipeline,
        ranks=ranks,
        kind=scope.kind,
        microbatches=None if streams else microbatches,
        schedule=recognise_schedule(timeline, pipeline, microbatches) if named else None,
        stated=stated,
        windows=inside,
        stream=stream,
        bubble_fraction=_middle([w.bubble_fraction for w in measured]),
        batch_latency_ns=stream.batch_latency_ns
        if stream
        else _whole([w.length_ns for w in inside]),
        step_time_ns=_step_time(all_windows, captured),
        useful_fraction=_middle([w.useful_fraction for w in measured]),
        apparent_fraction=_middle([w.apparent_fraction for w in measured]),
        shares=tuple(_shares(rank, measured) for rank in ranks),
        longest_stage_bubble=_middle([w.longest_stage_bubble for w in inside]),
        bubble_over_ideal=_middle([w.bubble_over_ideal for w in inside]),
        stages=_stages(timeline, ranks),
        hops=measure_hops(timeline, ranks) if one_run else (),
        shape=measure_shape(timeline, inside, pipeline) if inside else None,
        outside_ns=measure_outside(ranks, () if streams else all_windows),
        gaps=(
            *scope.gaps,
            *(() if measured or not one_run else (_why_nothing(scope),)),
            *(stated.gaps if stated else ()),
        ),
        left_out=scope.left_out,
        cut=scope.cut,
        one_run=one_run,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Scope:
    """What kind of run a pipeline is, and what of it is measured."""

    timeline: Timeline
    """Without the passes and transfers of steps that are left out."""
    kind: str
    one_run: bool = True
    rhythm: bool = True
    """False: no step is marked, and those inferred run into each other."""
    cut: bool = False
    left_out: tuple[SkippedStep, ...] = ()
    gaps: tuple[Gap, ...] = ()
    windows: tuple[Window, ...] = ()
    """Of the steps that are kept."""


def _choose_scope(timeline: Timeline, pipeline: int, step: int | None) -> _Scope:
    trains = bool((timeline.passes.kind != PassKind.F).any())
    kind = "training" if trains else "forward"
    if pipeline in timeline.mixed:
        return _Scope(timeline=timeline, kind=kind, one_run=False)
    windows = measure_windows(timeline, pipeline)
    streams = is_stream(timeline, windows)
    if streams and trains and timeline.inferred:
        return _Scope(timeline=replace(timeline, steps=()), kind=kind, rhythm=False)
    if streams or not timeline.steps:
        gaps = _unmatched(timeline, pipeline)
        kind = "stream" if streams else kind
        return _Scope(timeline=timeline, kind=kind, gaps=gaps, windows=windows)
    chosen = choose_steps(timeline, pipeline, step)
    kept = only_steps(timeline, chosen.kept)
    gaps = chosen.gaps if chosen.partial else (*chosen.gaps, *_unmatched(kept, pipeline))
    if timeline.inferred:
        count = counted(len(timeline.steps), "step")
        inferred = Gap(
            code=Code.STEPS_INFERRED,
            message=f"no step is marked; {count} told by the order of the passes",
            hint="call prof.step() once a batch to have them marked",
        )
        gaps = (inferred, *gaps)
    return _Scope(
        timeline=kept,
        kind=kind,
        cut=chosen.partial,
        left_out=chosen.left_out,
        gaps=gaps,
        windows=tuple(window for window in windows if window.step in kept.steps),
    )


def _unmatched(timeline: Timeline, pipeline: int) -> tuple[Gap, ...]:
    """Name what is left over in the steps that are measured; all of it where there are none."""
    names = {rank.rank for rank in timeline.ranks_of(pipeline)}
    count = sum(
        left_over.count
        for left_over in timeline.unmatched
        if left_over.source in names and (not timeline.steps or left_over.step in timeline.steps)
    )
    if not count:
        return ()
    return (
        Gap(
            code=Code.UNMATCHED_TRANSFERS,
            message=f"{counted(count, 'message')} without a counterpart left out",
            hint="a rank is missing, or was captured for another stretch of time",
        ),
    )


def _step_time(windows: Sequence[Window], captured: Sequence[int]) -> int | None:
    """Return the time from one step to the next: where one was left out between, none is known."""
    follows = dict(pairwise(captured))
    return _whole(
        [
            after.start_ns - before.start_ns
            for before, after in pairwise(windows)
            if follows[before.step] == after.step
        ]
    )


def _middle(values: list[float]) -> float | None:
    return float(median(values)) if values else None


def _whole(values: list[int]) -> int | None:
    return round(median(values)) if values else None


def _why_nothing(scope: _Scope) -> Gap:
    """Say why no window could be measured."""
    if scope.kind == "stream":
        return Gap(
            code=Code.NO_COMMON_SPAN,
            message="the ranks were captured at different times; no span is common to all",
            hint="capture a closed loop, or more steps, so that the captures overlap",
        )
    known = scope.rhythm and bool(scope.timeline.steps or scope.left_out)
    return Gap(
        code=Code.NO_STEPS,
        message="no step in which every rank ran passes"
        if known
        else "no step is marked, and the order of the passes shows no rhythm",
        hint="call prof.step() once a batch, and capture the same steps on all ranks",
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
    return tuple(sorted(figures, key=lambda figure: (figure.stage, figure.kind)))


def _shares(rank: RankTimeline, windows: Sequence[Window | StreamFigures]) -> RankShares:
    spans = [(window.start_ns, window.end_ns) for window in windows]
    busy = rank.busy
    own = [(int(busy.start_ns[0]), int(busy.end_ns[-1]))] if len(busy.start_ns) else []

    def share(intervals: Intervals, spans: Sequence[tuple[int, int]] = spans) -> float | None:
        return _middle([intervals.inside(*span) / (span[1] - span[0]) for span in spans])

    occupied = share(rank.occupied)
    return RankShares(
        rank=rank.rank,
        useful_fraction=share(busy),
        apparent_fraction=share(rank.apparent),
        bubble_fraction=None if occupied is None else 1 - occupied,
        busy_fraction=share(busy, [span for span in own if span[1] > span[0]]),
    )


def worst_of(figures: Sequence[PipelineFigures]) -> PipelineFigures:
    """Return the pipeline that waits most: the one that is shown in full."""
    return max(figures, key=lambda pipeline: pipeline.bubble_fraction or 0.0)
