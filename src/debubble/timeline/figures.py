"""A `Timeline` in → what is measured of one pipeline: schedule, bubble, what lies outside.

A step has a window, from its first pass to its last. Optimizer, clipping, reductions and data
loading lie outside of it: they are no bubble, and no schedule of the pipeline removes them. Where
batches overlap there is no window per step: it is then the span in which every rank was captured,
and all compute in it counts.

Waits have a shape. Even ones come from the schedule or a steady imbalance; jagged ones from jitter,
hosts or a link that comes and goes. Warm-up and drain, before a rank's first pass and after its
last, do not count there.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import fmean, median

import numpy as np

from debubble.errors import Code, Gap, UsageError
from debubble.timeline.model import (
    FEWEST_SAMPLES,
    I64,
    MOST_IN_FLIGHT,
    TAIL_PERCENT,
    UNKNOWN,
    Flags,
    Intervals,
    Passes,
    PassKind,
    RankTimeline,
    Timeline,
    union_of,
)
from debubble.timeline.schedules import Action, Order, Statement, candidate_orders
from debubble.timeline.steps import SkippedStep, choose_steps, numbered, only_steps
from debubble.timeline.transfers import HopFigures, measure_hops
from debubble.timeline.turns import Turns
from debubble.timeline.work import Work, host_ranges, names_like, spans_of
from debubble.trace.columns import RankTrace
from debubble.units import NS_PER_S, counted, show_count

PassName = tuple[int, str, int]
"""Stage, kind and microbatch of a pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deviation:
    """Where a rank first ran another pass than an order has for it."""

    rank: int
    step: int
    place: int
    """Of the pass among those of the rank in the step, from 0."""
    found: str | None
    """None where the rank ran nothing more."""
    expected: str | None
    """None where the order has nothing more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StatedSchedule:
    """What the user states, held against what was measured."""

    name: str
    order: Order | None
    """None where it has none for what was run."""
    deviation: Deviation | None
    gaps: tuple[Gap, ...]

    @property
    def chunks(self) -> int | None:
        """The most stages that a rank has by it."""
        if self.order is None:
            return None
        return max(len({action.stage for action in actions}) for actions in self.order)

    @property
    def agrees(self) -> bool | None:
        """Whether all ranks followed it; None where that was not looked at."""
        if any(gap.code is Code.SCHEDULE_UNCHECKED for gap in self.gaps):
            return None
        return not self.gaps


def count_microbatches(timeline: Timeline, pipeline: int) -> int | None:
    """Return how many microbatches a step has; None where steps or stages disagree."""
    passes = timeline.passes
    names = [rank.rank for rank in timeline.ranks_of(pipeline)]
    forward = passes.where(np.isin(passes.rank, names) & (passes.kind == PassKind.F))
    keys = np.stack((forward.step, forward.stage))
    _, counts = np.unique(keys, axis=1, return_counts=True)
    return int(counts[0]) if len(counts) and (counts == counts[0]).all() else None


def recognise_schedule(timeline: Timeline, pipeline: int, microbatches: int | None) -> str | None:
    """Name the schedule whose order every rank followed in every step that it ran.

    Passes are compared in the order of their starts. Two things are not: the first stage's input
    gradient, and which of two passes made to overlap began first.
    """
    ranks = as_schedules_count(timeline, pipeline)
    passes = _passes_of(timeline, ranks)
    if microbatches is None or not ranks or len(np.unique(passes.rank)) != len(ranks):
        return None
    kinds = frozenset(PassKind(kind).name for kind in np.unique(passes.kind).tolist())
    placement = tuple(rank.stages for rank in ranks)
    ran = list(_orders(passes, ranks))
    candidates = candidate_orders(placement, kinds, microbatches)
    return next((name for name, order in candidates if _deviation(ran, ranks, order) is None), None)


def _deviation(
    ran: Iterable[tuple[int, int, list[PassName]]], ranks: Sequence[RankTimeline], order: Order
) -> Deviation | None:
    expected = [[a for a in actions if (a.stage, a.kind) != (0, "I")] for actions in order]
    for position, step, passes in ran:
        row = _first_difference(passes, expected[position])
        if row is not None:
            more = expected[position][row : row + 1]
            return Deviation(
                rank=ranks[position].rank,
                step=step,
                place=row,
                found="{}{}{}".format(*passes[row]) if row < len(passes) else None,
                expected=str(more[0]) if more else None,
            )
    return None


def as_schedules_count(timeline: Timeline, pipeline: int) -> list[RankTimeline]:
    """Return the ranks by first stage: around a loop, messages alone show no first rank."""
    return sorted(timeline.ranks_of(pipeline), key=lambda rank: min(rank.stages))


def _passes_of(timeline: Timeline, ranks: list[RankTimeline]) -> Passes:
    """Return what ran in the steps of these ranks.

    Torch has no input gradient to compute on the first stage: there I is an empty call, and W does
    all. Other frameworks run it. So it is left out, here and in the orders compared with.
    """
    passes = timeline.passes
    empty = (passes.stage == 0) & (passes.kind == PassKind.I)
    mine = np.isin(passes.rank, [rank.rank for rank in ranks])
    return passes.where(mine & np.isin(passes.step, timeline.steps) & ~empty)


def _orders(passes: Passes, ranks: list[RankTimeline]) -> Iterator[tuple[int, int, list[PassName]]]:
    """Yield a rank's position, a step, and what it ran there in the order of starts."""
    positions = {rank.rank: position for position, rank in enumerate(ranks)}
    position = np.array([positions[rank] for rank in passes.rank.tolist()], dtype=np.int32)
    order = np.lexsort((passes.start_ns, passes.step, position))
    changes = (np.diff(position[order]) != 0) | (np.diff(passes.step[order]) != 0)
    for rows in np.split(order, np.flatnonzero(changes) + 1) if len(order) else ():
        columns = (passes.stage[rows], passes.kind[rows], passes.microbatch[rows])
        ran = [
            (stage, PassKind(kind).name, microbatch)
            for stage, kind, microbatch in zip(*(c.tolist() for c in columns), strict=True)
        ]
        yield int(position[rows[0]]), int(passes.step[rows[0]]), ran


def _first_difference(passes: list[PassName], expected: list[Action]) -> int | None:
    """Return where a rank's passes leave those of an order; None if they are the same."""
    found = passes.copy()
    for position, action in enumerate(expected):
        if action.overlap and found[position : position + 1] != [action[:3]]:
            found[position : position + 2] = found[position : position + 2][::-1]
        if position >= len(found) or found[position] != action[:3]:
            return position
    return len(expected) if len(found) > len(expected) else None


def hold_against(
    statement: Statement,
    timeline: Timeline,
    pipeline: int,
    microbatches: int | None,
) -> StatedSchedule:
    """Make the stated order for this run and look where the run left it."""
    ranks = as_schedules_count(timeline, pipeline)
    name = statement.text

    def without_order(code: Code, message: str) -> StatedSchedule:
        gap = Gap(code=code, message=message, hint="leave --schedule out to see what is recognised")
        return StatedSchedule(name=name, order=None, deviation=None, gaps=(gap,))

    unchecked = f"not held against the stated schedule {name}: "
    if set(ranks[0].members) - {rank.rank for rank in ranks}:
        why = "a rank of the pipeline has no trace"
        return without_order(Code.SCHEDULE_UNCHECKED, unchecked + why)
    if microbatches is None:
        why = "steps or stages differ in their microbatches"
        return without_order(Code.SCHEDULE_UNCHECKED, unchecked + why)
    chunks = max(len(rank.stages) for rank in ranks)
    try:
        order = statement.order_for(len(ranks), microbatches, chunks)
    except UsageError as refused:
        return without_order(Code.SCHEDULE_DIFFERS, f"this cannot be {name}: {refused.message}")
    deviation = _deviation(_orders(_passes_of(timeline, ranks), ranks), ranks, order)
    if deviation is None:
        return StatedSchedule(name=name, order=order, deviation=None, gaps=())
    ran = f"ran {deviation.found}" if deviation.found else "ran nothing more"
    has = f"has {deviation.expected}" if deviation.expected else "has nothing more"
    left = Gap(
        code=Code.SCHEDULE_DIFFERS,
        message=f"left the stated schedule {name} in step {deviation.step}: "
        f"as pass {show_count(deviation.place + 1)} it {ran}, where {name} {has}",
        hint="theory uses the stated schedule (--schedule, or the sidecars)",
        rank=deviation.rank,
    )
    return StatedSchedule(name=name, order=order, deviation=deviation, gaps=(left,))


@dataclass(frozen=True, slots=True, kw_only=True)
class StageFigures:
    """What one kind of pass takes on one stage."""

    stage: int
    rank: int
    kind: PassKind
    median_ns: int
    mad_ns: int
    count: int
    busy_ns: int
    """Of the median, what was computed: neither collectives inside passes nor gaps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankShares:
    """What one rank did of the window, in the middle of all steps; None without a window."""

    rank: int
    apparent_fraction: float | None
    useful_fraction: float | None
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
    step_time_ns: int | None
    shares: tuple[RankShares, ...]
    """The same, rank by rank."""
    stages: tuple[StageFigures, ...]
    hops: tuple[HopFigures, ...]
    shape: Shape | None
    outside_ns: dict[str, int]
    """What lies between two steps, by kind; empty where no two steps follow each other."""
    gaps: tuple[Gap, ...]
    sees_all: bool = True
    """Timers without messages do not show what a device spins in while it waits for them."""
    side_fractions: dict[str, float] = field(default_factory=dict)
    """Of the window, what ran beside the passes: no part of the bubble, nor of what is busy."""
    left_out: tuple[SkippedStep, ...] = ()
    """Steps that no figure is made of."""
    cut: bool = False
    """No step was captured whole: the figures are of parts."""
    one_run: bool = True
    """False: the ranks are of different runs, and nothing between them can be measured."""

    @property
    def spans(self) -> Sequence[Span]:
        """What is measured: the windows of steps, or the one of a stream."""
        return self.windows if self.stream is None else (self.stream,)

    @property
    def bubble_fraction(self) -> float | None:
        """The median over all steps, as are the others."""
        return _median(span.bubble_fraction for span in self.spans)

    @property
    def useful_fraction(self) -> float | None:
        """Busy over the window."""
        return _median(span.useful_fraction for span in self.spans)

    @property
    def apparent_fraction(self) -> float | None:
        """All kernels over the window."""
        return _median(span.apparent_fraction for span in self.spans if self.sees_all)

    @property
    def longest_stage_bubble(self) -> float | None:
        """Against the longest single rank's span."""
        return _median(window.longest_stage_bubble for window in self.windows)

    @property
    def bubble_over_ideal(self) -> float | None:
        """Bubble time over ideal time."""
        return _median(window.bubble_over_ideal for window in self.windows)

    @property
    def batch_latency_ns(self) -> int | None:
        """The window; of a stream, one batch's way through it."""
        if self.stream is not None:
            return self.stream.batch_latency_ns
        return _whole(window.length_ns for window in self.windows)

    @property
    def absent(self) -> tuple[int, ...]:
        """The ranks of the pipeline that have no trace: what is measured is a part of it."""
        captured = {rank.rank for rank in self.ranks}
        return tuple(rank for rank in self.ranks[0].members if rank not in captured)


def measure_pipeline(
    timeline: Timeline,
    pipeline: int,
    step: int | None = None,
    statement: Statement | None = None,
) -> PipelineFigures:
    """Measure a pipeline over all its steps, or over one; hold it against a stated schedule."""
    ranks = timeline.ranks_of(pipeline)
    captured = timeline.steps
    scope = _choose_scope(timeline, pipeline, step)
    timeline = scope.timeline
    streams, one_run = scope.kind == "stream", scope.one_run
    whole = one_run and not scope.cut and not streams
    microbatches = count_microbatches(timeline, pipeline) if whole else None
    stream = measure_stream(timeline, pipeline) if streams else None
    in_steps = () if streams else scope.windows
    windows = tuple(w for w in in_steps if step is None or w.step == step)
    step_time_ns = _step_time(scope.windows, captured)
    spans = (stream,) if stream else windows
    named = not streams and one_run
    sees_all = not ranks[0].timers or len(timeline.transfers) > 0
    stated = None
    if statement is not None and named:
        stated = hold_against(statement, timeline, pipeline, microbatches)
    return PipelineFigures(
        pipeline=pipeline,
        ranks=ranks,
        kind=scope.kind,
        microbatches=microbatches,
        schedule=recognise_schedule(timeline, pipeline, microbatches) if named else None,
        stated=stated,
        windows=windows,
        stream=stream,
        step_time_ns=step_time_ns,
        shares=tuple(_shares(rank, spans, sees_all=sees_all) for rank in ranks),
        stages=measure_stages(timeline, ranks),
        hops=measure_hops(timeline, ranks) if one_run else (),
        shape=measure_shape(timeline, windows, pipeline) if windows else None,
        outside_ns=measure_outside(ranks, in_steps),
        side_fractions=measure_side_work(ranks, spans),
        gaps=(
            *scope.gaps,
            *(() if spans or not one_run else (_why_nothing(scope),)),
            *(stated.gaps if stated else ()),
        ),
        sees_all=sees_all,
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
        return _Scope(timeline=replace(timeline, steps=()), kind=kind)
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
            message=f"no step marks; {count} inferred from the order of the passes",
            hint="call prof.step() once per batch",
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
    found = [
        left_over
        for left_over in timeline.unmatched
        if not names.isdisjoint(left_over.ends)
        and (not timeline.steps or left_over.step in {UNKNOWN, *timeline.steps})
    ]
    count = sum(left_over.count for left_over in found)
    if not count:
        return ()
    senders, receivers = (
        numbered("rank", sorted({left_over.ends[side] for left_over in found})) for side in (0, 1)
    )
    return (
        Gap(
            code=Code.UNMATCHED_TRANSFERS,
            message=f"{counted(count, 'message')} of {senders} to {receivers} without a "
            "counterpart left out",
            hint="a rank is missing, was captured for another stretch of time, or sends from a "
            "thread that its profiler does not see",
        ),
    )


def _step_time(windows: Sequence[Window], captured: Sequence[int]) -> int | None:
    """Return the time from one step to the next: where one was left out between, none is known."""
    follows = dict(pairwise(captured))
    return _whole(
        after.start_ns - before.start_ns
        for before, after in pairwise(windows)
        if follows[before.step] == after.step
    )


def _median(values: Iterable[float]) -> float | None:
    known = list(values)
    return float(median(known)) if known else None


def _whole(values: Iterable[int]) -> int | None:
    middle = _median(values)
    return None if middle is None else round(middle)


def _why_nothing(scope: _Scope) -> Gap:
    """Say why no window could be measured."""
    if scope.kind == "stream":
        return Gap(
            code=Code.NO_COMMON_SPAN,
            message="the ranks were captured at different times: no time is common to all",
            hint="capture all ranks at once, and for longer, so that the captures overlap",
        )
    known = bool(scope.timeline.steps or scope.left_out)
    return Gap(
        code=Code.NO_STEPS,
        message="no step in which every rank ran passes"
        if known
        else "no step marks, and the order of the passes does not repeat",
        hint="call prof.step() once per batch, and capture the same steps on all ranks",
    )


def measure_stages(timeline: Timeline, ranks: tuple[RankTimeline, ...]) -> tuple[StageFigures, ...]:
    """Return what each kind of pass takes on each stage of a pipeline."""
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
                            busy_ns=round(float(np.median(passes.busy_ns[mine]))),
                        )
                    )
    return tuple(sorted(figures, key=lambda figure: (figure.stage, figure.kind)))


def _shares(rank: RankTimeline, windows: Sequence[Span], *, sees_all: bool) -> RankShares:
    spans = [(window.start_ns, window.end_ns) for window in windows]
    busy = rank.busy
    own = [(int(busy.start_ns[0]), int(busy.end_ns[-1]))] if len(busy.start_ns) else []

    def share(intervals: Intervals, spans: Sequence[tuple[int, int]] = spans) -> float | None:
        return _median(intervals.inside(*span) / (span[1] - span[0]) for span in spans)

    occupied = share(rank.occupied)
    return RankShares(
        rank=rank.rank,
        useful_fraction=share(busy),
        apparent_fraction=share(rank.apparent) if sees_all else None,
        bubble_fraction=None if occupied is None else 1 - occupied,
        busy_fraction=share(busy, [span for span in own if span[1] > span[0]]),
    )


def worst_of(figures: Sequence[PipelineFigures]) -> PipelineFigures:
    """Return the pipeline that waits most: the one that is shown in full."""
    return max(figures, key=lambda pipeline: pipeline.bubble_fraction or 0.0)


# Steps of a closed loop follow each other, though a first rank may begin the next one while the
# last weight gradients of the others run. Batches in flight overlap by most of their length.
_OVERLAP_TOLERANCE = 0.2
# Gaps between kernels of one pass are no waits of a pipeline: the shortest pass seen is 1 ms.
_SHORTEST_WAIT_NS = 100_000
# A wait is even if it is within half of its rank's middle wait.
_EVEN_WITHIN = 0.5
# One place stands out if it waits this much more than the ranks do on average.
_STANDS_OUT = 1.5
# Fewer that are seen from end to end tell no turn.
FEWEST_BATCHES = 4
# An instant that is two things at once counts as the first of them.
OPTIMIZER, REDUCTION, CLIPPING, DATA_LOADING = "optimizer", "reduction", "clipping", "data_loading"
OTHER = "other"
_OPTIMIZER = re.compile(r"^Optimizer\.(?:step|zero_grad)#")
_DATA_LOADING = re.compile(r"^enumerate\(DataLoader\)#")
# The operators and kernels of `clip_grad_norm_` and of `GradScaler`, on a CPU and on a GPU. Where a
# step has an optimizer, whatever else comes after its passes is of the kind, too.
_CLIPPING = re.compile(
    r"foreach_norm|vector_norm|LpNorm|foreach_mul_|ScalarTensorFunctor|clamp|clip_grad"
    r"|non_finite|unscale|amp_update_scale",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A stretch of time of one pipeline: a window of a step, or a stream's; what its ranks did."""

    start_ns: int
    end_ns: int
    bubble_fraction: float
    useful_fraction: float
    apparent_fraction: float

    @property
    def length_ns(self) -> int:
        """Of a step: the batch latency."""
        return self.end_ns - self.start_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class Window(Span):
    """One step of one pipeline: from the first pass's start to the last pass's end."""

    step: int
    longest_stage_bubble: float
    """Against the longest single rank's span, as the zero-bubble papers have it."""

    @property
    def bubble_over_ideal(self) -> float:
        """Bubble time over ideal time, as Megatron has it."""
        return self.bubble_fraction / (1 - self.bubble_fraction)


def _fractions(ranks: Sequence[RankTimeline], start_ns: int, end_ns: int) -> dict[str, float]:
    """Return what each definition makes of a stretch of time, over all ranks."""
    whole = len(ranks) * (end_ns - start_ns)

    def share(intervals: Iterable[Intervals]) -> float:
        return sum(ran.inside(start_ns, end_ns) for ran in intervals) / whole

    return {
        "bubble_fraction": 1 - share(rank.occupied for rank in ranks),
        "useful_fraction": share(rank.busy for rank in ranks),
        "apparent_fraction": share(rank.apparent for rank in ranks),
    }


def measure_windows(timeline: Timeline, pipeline: int) -> tuple[Window, ...]:
    """Measure every step in which all captured ranks of the pipeline ran passes.

    None where they are of different runs.
    """
    if pipeline in timeline.mixed:
        return ()
    ranks = timeline.ranks_of(pipeline)
    names = [rank.rank for rank in ranks]
    passes = timeline.passes.where(np.isin(timeline.passes.rank, names))
    windows = []
    for step in timeline.steps:
        here = passes.where(passes.step == step)
        if set(here.rank.tolist()) == set(names):
            windows += _measure(here, ranks, step)
    return tuple(windows)


def _measure(passes: Passes, ranks: Sequence[RankTimeline], step: int) -> list[Window]:
    """Measure one step; nothing where its passes last no time, or hold no work."""
    start, end = int(passes.start_ns.min()), int(passes.end_ns.max())
    spans = []  # of each rank, with what it was occupied of it
    for rank in ranks:
        ran = passes.where(passes.rank == rank.rank)
        first, last = int(ran.start_ns.min()), int(ran.end_ns.max())
        spans.append((last - first, rank.occupied.inside(first, last)))
    longest, occupied = max(spans, key=lambda span: span[0])
    if not any(rank.occupied.inside(start, end) for rank in ranks):
        return []
    return [
        Window(
            step=step,
            start_ns=start,
            end_ns=end,
            longest_stage_bubble=1 - occupied / longest,
            **_fractions(ranks, start, end),
        )
    ]


def steps_overlap(windows: tuple[Window, ...]) -> bool:
    """Tell a stream from a closed loop: a step that begins well before the one before it ends."""
    return any(
        before.end_ns - after.start_ns > _OVERLAP_TOLERANCE * before.length_ns
        for before, after in pairwise(windows)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamFigures(Span):
    """One pipeline over the span in which all its ranks were captured."""

    batches_in_flight: float
    """The mean over the span of those that entered the first stage and have no answer yet; where
    no answer is captured, of those that have not left the last stage."""
    most_in_flight: int
    usual_in_flight: int
    """When one has just entered, in the middle: what its driver allows."""
    steady: bool
    """Most batches entered with so many in flight."""
    may_be: tuple[int, int | None]
    """How many may be usual, from and to (None: any number): captures may not show which batch of
    one rank is which of the next."""
    hosts_hide_more: bool
    """A broadcast of sampled tokens holds batches up, and no label tells how many wait for it."""
    on_device: int
    """How many are on the devices when the first stage begins one: the others wait in its host."""
    empty_turns: float
    """The share of its scheduler's turns that had no request; 0 where no label tells."""
    turns_out: int | None
    """Turns that the scheduler has out at once, empty ones too; None where no label tells."""
    first_sets_pace: bool
    """Batches enter when the first stage is free, not when one has left: its driver may allow more
    than are ever seen."""
    batch_latency_ns: int | None
    """From the first stage's start to the last stage's end, in the middle."""
    batch_latency_p95_ns: int | None
    batches: int
    """How many were seen from the first stage to the last."""
    batches_per_s: float

    @property
    def in_flight(self) -> float:
        """How many batches the driver keeps in flight: a whole number where it keeps to one."""
        return self.batches_in_flight if self.kept is None else self.kept

    @property
    def kept(self) -> int | None:
        """The number that the driver keeps to; None of none."""
        return self.usual_in_flight if self.steady else None

    @property
    def sure(self) -> bool:
        """Whether the number in flight can be no other."""
        return self.may_be[0] == self.may_be[1]


def is_stream(timeline: Timeline, windows: tuple[Window, ...]) -> bool:
    """Tell whether batches overlap: steps do, or forward passes run on without any step marked."""
    if timeline.steps:
        return steps_overlap(windows)
    return len(timeline.passes) > 0 and bool((timeline.passes.kind == PassKind.F).all())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Batches:
    """The batches of a stream by their numbers, in the order that they are counted in."""

    number: dict[int, int]
    """By microbatch."""
    entered: dict[int, int]
    freed: dict[int, int]
    """When each left the first stage."""
    left: dict[int, int]
    gone: dict[int, int]
    """When the first rank had its answer; where nothing answers it, when it left."""
    everywhere: list[int]
    """Those that were seen on every rank."""


def measure_stream(timeline: Timeline, pipeline: int) -> StreamFigures | None:
    """Measure the span that all ranks of a pipeline share; None where there is none."""
    ranks = timeline.ranks_of(pipeline)
    span = common_span(ranks)
    if span is None:
        return None
    batches, turns = _batches_of(timeline, ranks), ranks[0].turns
    both = sorted(batches.entered.keys() & batches.left.keys())
    latency = np.array([batches.left[at] - batches.entered[at] for at in both], dtype=np.int64)
    in_flight, lasts, at_entry = _count_in_flight(batches.entered, batches.gone, span)
    usual = on_device = round(float(np.median(list(at_entry.values()) or in_flight[-1:])))
    paced = _first_sets_pace(at_entry, batches)
    turns_out, empty_turns = None, 0.0
    if turns is not None:  # the scheduler sends out what the first host then holds
        taken = zip(turns.number.tolist(), turns.begin_ns.tolist(), strict=True)
        sent_out = {batches.number[at]: begin for at, begin in taken if at in batches.number}
        in_flight, lasts, at_entry = _count_in_flight(sent_out, batches.gone, span)
        usual, paced = round(float(np.median(list(at_entry.values()) or in_flight[-1:]))), False
        turns_out, empty_turns = _turns_out(ranks, batches, span), float(turns.empty.mean())
    if paced:  # how many it would let in does not show: so many at the least
        usual = max(at_entry.values())
    # An asynchronous scheduler is a batch ahead now and then.
    near = [abs(count - usual) <= (turns is not None) for count in at_entry.values()]
    kept = len(near) >= FEWEST_SAMPLES and (paced or sum(near) > len(near) / 2)
    captured = (ranks[0].rank, ranks[-1].rank)
    steady = kept and captured == (ranks[0].members[0], ranks[0].members[-1])
    fewer, more = timeline.unsure.get(pipeline, (0, 0))
    # What waits in hosts for the broadcast of sampled tokens, labels tell alone.
    hidden = turns is None and any(len(rank.meetings) for rank in ranks)
    more = None if hidden else more
    may_be = (max(usual - fewer, 1), None if more is None else usual + more)
    return StreamFigures(
        start_ns=span[0],
        end_ns=span[1],
        **_fractions(ranks, *span),
        batches_in_flight=float((in_flight * lasts).sum() / (span[1] - span[0])),
        most_in_flight=int(in_flight.max(initial=0)),
        usual_in_flight=usual,
        on_device=on_device,
        empty_turns=empty_turns,
        turns_out=turns_out,
        steady=steady,
        may_be=may_be,
        hosts_hide_more=hidden,
        first_sets_pace=steady and paced,
        batch_latency_ns=round(float(np.median(latency))) if len(latency) else None,
        batch_latency_p95_ns=(
            round(float(np.percentile(latency, TAIL_PERCENT))) if len(latency) else None
        ),
        batches=len(latency),
        batches_per_s=_batches_per_s(
            batches, span, max(usual, len(ranks)) if paced else usual if steady else 1
        ),
    )


def _batches_of(timeline: Timeline, ranks: Sequence[RankTimeline]) -> _Batches:
    names = [rank.rank for rank in ranks]
    passes = timeline.passes
    passes = passes.where(np.isin(passes.rank, names) & (passes.kind == PassKind.F))
    (_, microbatch), row = np.unique(
        np.stack((passes.step, passes.microbatch)), axis=1, return_inverse=True
    )
    row = row.reshape(-1)
    first, last = passes.stage == passes.stage.min(), passes.stage == passes.stage.max()

    def by_batch(rows: Flags, column: I64) -> dict[int, int]:
        return dict(zip(row[rows].tolist(), column[rows].tolist(), strict=True))

    left = by_batch(last, passes.end_ns)
    # The answer to a batch is the last rank's send after it.
    transfers = timeline.transfers
    answers = transfers.where((transfers.source == names[-1]) & (transfers.destination == names[0]))
    sender = np.searchsorted(passes.start_ns[last], answers.send_start_ns, side="right") - 1
    known = sender >= 0
    answered = row[last][sender[known]].tolist()
    gone = dict(zip(answered, answers.receive_end_ns[known].tolist(), strict=True))
    of_rank = np.unique(np.stack((row, passes.rank)), axis=1)[0]
    return _Batches(
        number={batch: at for at, batch in enumerate(microbatch.tolist())},
        entered=by_batch(first, passes.start_ns),
        freed=by_batch(first, passes.end_ns),
        left=left,
        gone=gone or left,
        everywhere=np.flatnonzero(np.bincount(of_rank) == len(ranks)).tolist(),
    )


def _turns_out(
    ranks: Sequence[RankTimeline], batches: _Batches, span: tuple[int, int]
) -> int | None:
    """Return how many turns a scheduler mostly has out when it begins another, empty ones too.

    An empty turn is over when the last rank's host has taken it.
    """
    first, last = ranks[0].turns, ranks[-1].turns
    if first is None or last is None:
        return None

    def keys(turns: Turns) -> list[tuple[int, int]]:
        """Name each turn by the last batch up to it, and how many empty ones followed that."""
        reached = np.maximum.accumulate(turns.number)
        rows = np.arange(len(reached))
        since = rows - np.maximum.accumulate(np.where(turns.empty, 0, rows))
        return list(zip(reached.tolist(), since.tolist(), strict=True))

    gone = {at: batches.gone.get(row) for at, row in batches.number.items()}
    over = {
        key: gone.get(key[0]) if not key[1] else begin
        for key, begin in zip(keys(last), last.begin_ns.tolist(), strict=True)
    }
    begins, out = first.begin_ns.tolist(), []
    for row, moment in enumerate(begins):
        if span[0] <= moment <= span[1]:
            before = [over.get(key) for key in keys(first)[max(row - MOST_IN_FLIGHT, 0) : row]]
            out.append(1 + sum(end is not None and end > moment for end in before))
    return round(float(np.median(out))) if out else None


def _batches_per_s(batches: _Batches, span: tuple[int, int], filling: int) -> float:
    """Return how many batches leave in a second, of those seen from their entry to their end.

    Where too few are, it is those that leave in the span.
    """
    whole = [batches.left[at] for at in batches.everywhere if batches.entered[at] >= span[0]]
    if len(whole) < FEWEST_BATCHES:
        inside = sum(span[0] <= end <= span[1] for end in batches.left.values())
        return inside * NS_PER_S / (span[1] - span[0])
    return NS_PER_S / turn_of(np.array(whole), min(filling, len(whole) - 1))


def turn_of(ends: I64, filling: int) -> float:
    """Return the time between two batches that leave; those that fill the pipeline do not count."""
    first = max(min(filling, len(ends) // 2), 1)
    return max(float(ends[-1] - ends[first - 1]) / max(len(ends) - first, 1), 1.0)


def common_span(ranks: tuple[RankTimeline, ...]) -> tuple[int, int] | None:
    """Return the span in which every rank was captured; None where there is none."""
    starts = [int(rank.busy.start_ns[0]) for rank in ranks if len(rank.busy.start_ns)]
    ends = [int(rank.busy.end_ns[-1]) for rank in ranks if len(rank.busy.end_ns)]
    if len(starts) < len(ranks) or max(starts) >= min(ends):
        return None
    return max(starts), min(ends)


def _first_sets_pace(at_entry: Mapping[int, int], batches: _Batches) -> bool:
    """Tell whether batches enter as soon as the first stage is free, not when one has left.

    first stage   0000 1111 2222 3333       each as soon as the one before is done:
    last stage         0000 1111 2222       two are in flight, and more may be allowed

    first stage   0000 1111      2222 3333  batch 2 waits until batch 0 has left: two may be
    last stage              0000 1111       in flight, and no more
    """
    waited = []  # for another to leave: it entered sooner after that than after the stage was free
    for batch, count in at_entry.items():
        left, freed = batches.gone.get(batch - count), batches.freed.get(batch - 1)
        if left is not None and freed is not None:
            waited.append(left > freed)
    # With more and more in flight, the first stage runs ahead of the others.
    counts = at_entry.values()
    if len(waited) < FEWEST_SAMPLES or max(counts) - min(counts) >= FEWEST_SAMPLES:
        return False
    return sum(waited) < max(FEWEST_SAMPLES, len(waited) / 4)


def _count_in_flight(
    entered: Mapping[int, int], gone: Mapping[int, int], span: tuple[int, int]
) -> tuple[I64, I64, dict[int, int]]:
    """Count what is in flight through a span: how many, for how long; and when each batch entered.

    While none is gone yet, a driver may still be filling up: no such entry counts.

    Batches keep their order. So those before the first that is seen to enter have entered, those
    before the first that is seen to be gone are gone, and it does not matter where a capture began:

        first rank   7  8  9  ...       nine had entered when batch 8 does,
        last rank          5  6  ...    five were gone: four are in flight
    """
    begins = sorted((moment, 1, batch) for batch, moment in entered.items())
    ends = sorted((moment, 0, batch) for batch, moment in gone.items())
    inside, outside = min(entered, default=0), min(gone, default=0)
    at, counts, lengths = span[0], [], []
    at_entry: dict[int, int] = {}
    any_gone = False
    for moment, kind, batch in sorted([*begins, *ends]):
        if moment > span[1]:
            break
        if moment > span[0]:
            counts.append(inside - outside)
            lengths.append(moment - at)
            at = moment
        inside = batch + 1 if kind else inside
        outside = outside if kind else batch + 1
        any_gone |= not kind
        if kind and moment >= span[0] and any_gone:
            at_entry[batch] = max(inside - outside, 0)
    counts.append(inside - outside)
    lengths.append(span[1] - at)
    return (
        np.maximum(np.array(counts, dtype=np.int64), 0),
        np.array(lengths, dtype=np.int64),
        at_entry,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How the waits between a rank's first and last pass look."""

    jagged_fraction: float
    """The share of waiting time that lies in waits unlike the others of their rank."""
    where: str
    """first, last, middle, or everywhere."""
    median_wait_s: float
    waits: int


def measure_shape(timeline: Timeline, windows: tuple[Window, ...], pipeline: int) -> Shape | None:
    """Describe the waits of a pipeline's steps; None where nobody waits."""
    waits = [_waits(timeline, rank, windows) for rank in timeline.ranks_of(pipeline)]
    idle = [int(mine.sum()) for mine in waits]
    if not sum(idle):
        return None
    jagged = 0
    for mine in waits:
        middle = float(np.median(mine)) if len(mine) else 0.0
        jagged += int(mine[np.abs(mine - middle) > _EVEN_WITHIN * middle].sum())
    worst = int(np.argmax(idle))
    where = "middle"
    if idle[worst] <= _STANDS_OUT * (sum(idle) / len(idle)):
        where = "everywhere"
    elif worst in {0, len(idle) - 1}:
        where = "last" if worst else "first"
    every = np.concatenate(waits)
    return Shape(
        jagged_fraction=jagged / sum(idle),
        where=where,
        median_wait_s=int(np.median(every)) / NS_PER_S,
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


def find_outside(trace: RankTrace, work: Work) -> tuple[Flags, tuple[tuple[str, Intervals], ...]]:
    """Tell which work is known to be none of the pipeline's, and name what a rank does besides.

    It may run in the window. Not among it are collectives issued while a rank runs its passes,
    gathers of sharded parameters and reductions of gradients, and what follows the passes of a step
    that has no optimizer: torch scales gradients so. Of two names the first wins.
    """
    called, in_pass = _annotated(trace, _OPTIMIZER), work.in_pass
    optimizes = np.zeros(len(work), dtype=bool)
    if len(called.start_ns):
        row = np.searchsorted(called.start_ns, work.issued_ns, side="right") - 1
        optimizes = ~in_pass & (row >= 0) & (work.issued_ns < called.end_ns[row])
    among, after = np.zeros(len(work), dtype=bool), np.zeros(len(work), dtype=bool)
    rows = np.arange(len(work))
    for number in np.unique(work.step[in_pass & (work.step >= 0)]).tolist():
        here = work.step == number
        mine = np.flatnonzero(in_pass & here)
        among |= (rows >= mine[0]) & (rows <= mine[-1])
        if optimizes[here].any():
            after |= here & (rows > mine[-1])
    reduces = work.collective & ~in_pass & ~among & ~optimizes
    clips = ~in_pass & (names_like(trace, _CLIPPING)[work.name] | after) & ~optimizes & ~reduces
    kinds = ((OPTIMIZER, optimizes), (REDUCTION, reduces), (CLIPPING, clips))
    found = {name: work.union(flags) for name, flags in kinds}
    if not len(trace.kernels):  # where there are kernels, the host's call is no measure of theirs
        ran = found[OPTIMIZER]
        found[OPTIMIZER] = union_of(
            np.concatenate((ran.start_ns, called.start_ns)),
            np.concatenate((ran.end_ns, called.end_ns)),
        )
    found[DATA_LOADING] = _annotated(trace, _DATA_LOADING)
    named = tuple((name, intervals) for name, intervals in found.items() if len(intervals.start_ns))
    return optimizes | reduces | clips, named


def measure_outside(ranks: Sequence[RankTimeline], windows: Sequence[Window]) -> dict[str, int]:
    """Return the mean of each kind over the ranks, the middle of all steps, and the rest; in ns.

    Only between two captured steps: what follows the last one is not captured whole. A rank that
    ends its passes early runs its optimizer inside the window; a mean keeps the sum right.
    """
    lengths: dict[str, list[float]] = {}
    for before, after in pairwise(windows):
        if after.step != before.step + 1 or after.start_ns <= before.end_ns:
            continue
        cuts = [_cut(rank, before.end_ns, after.start_ns) for rank in ranks]
        for name in dict.fromkeys(name for cut in cuts for name in cut):
            lengths.setdefault(name, []).append(fmean(cut.get(name, 0) for cut in cuts))
    return {name: round(median(all_of)) for name, all_of in lengths.items() if any(all_of)}


def measure_side_work(ranks: Sequence[RankTimeline], windows: Sequence[Span]) -> dict[str, float]:
    """Return the share of the windows, on the mean of all ranks, in which each kind ran."""
    whole = len(ranks) * sum(window.end_ns - window.start_ns for window in windows)
    ran: dict[str, int] = {}
    for rank in ranks:
        for name, intervals in rank.side_work:
            inside = sum(intervals.inside(window.start_ns, window.end_ns) for window in windows)
            ran[name] = ran.get(name, 0) + inside
    return {name: length / whole for name, length in sorted(ran.items()) if length}


def _cut(rank: RankTimeline, begin: int, end: int) -> dict[str, int]:
    """Divide one stretch of one rank; the parts add up to it."""
    covered = 0
    parts = {}
    starts, ends = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    known = (OPTIMIZER, REDUCTION, CLIPPING, DATA_LOADING)
    for name in dict.fromkeys((*known, *(kind for kind, _ in rank.outside))):
        for kind, intervals in rank.outside:
            if kind == name:
                starts = np.concatenate((starts, intervals.start_ns))
                ends = np.concatenate((ends, intervals.end_ns))
        reach = union_of(starts, ends).inside(begin, end)
        parts[name] = reach - covered
        covered = reach
    return {**parts, OTHER: end - begin - covered}


def _annotated(trace: RankTrace, pattern: re.Pattern[str]) -> Intervals:
    return spans_of(trace.annotations, host_ranges(trace, names_like(trace, pattern)))
