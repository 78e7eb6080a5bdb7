"""A `Timeline` in → all that is measured of one pipeline, and the schedule it has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, pairwise
from statistics import median

import numpy as np

from debubble.errors import Code, Gap, UsageError
from debubble.timeline.bubble import (
    Shape,
    Span,
    StreamFigures,
    Window,
    is_stream,
    measure_outside,
    measure_shape,
    measure_side_work,
    measure_stream,
    measure_windows,
)
from debubble.timeline.model import (
    UNKNOWN,
    Intervals,
    Passes,
    PassKind,
    RankTimeline,
    Timeline,
    UnmatchedMessages,
)
from debubble.timeline.schedules import Action, Order, Statement, candidate_orders
from debubble.timeline.steps import SkippedStep, choose_steps, numbered, only_steps
from debubble.timeline.transfers import HopFigures, measure_hops
from debubble.units import counted, show_count, show_duration, show_ranks

PassName = tuple[int, str, int]
"""Stage, kind and microbatch of a pass."""

# A step may begin while the one before it ends, by a fifth of it (`bubble.py`); the median of few
# steps is not the median of their distances.
MAX_BATCHES_PER_STEP = 2.0


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


def find_deviation(timeline: Timeline, pipeline: int, order: Order) -> Deviation | None:
    """Return where a pipeline first left an order, by rank, then by step; None if nowhere."""
    ranks = as_schedules_count(timeline, pipeline)
    return _deviation(_orders(_passes_of(timeline, ranks), ranks), ranks, order)


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
    if set(ranks[0].members) - {rank.rank for rank in ranks}:
        return _unchecked(name, "a rank of the pipeline has no trace")
    if microbatches is None:
        return _unchecked(name, "steps or stages differ in their microbatches")
    chunks = max(len(rank.stages) for rank in ranks)
    try:
        order = statement.order_for(len(ranks), microbatches, chunks)
    except UsageError as why:
        return _without_order(name, Code.SCHEDULE_DIFFERS, f"this cannot be {name}: {why.message}")
    deviation = find_deviation(timeline, pipeline, order)
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


def _unchecked(name: str, why: str) -> StatedSchedule:
    message = f"not held against the stated schedule {name}: {why}"
    return _without_order(name, Code.SCHEDULE_UNCHECKED, message)


def _without_order(name: str, code: Code, message: str) -> StatedSchedule:
    gap = Gap(code=code, message=message, hint="leave --schedule out to see what is recognised")
    return StatedSchedule(name=name, order=None, deviation=None, gaps=(gap,))


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
    in_flight: int | None = None,
) -> PipelineFigures:
    """Measure a pipeline over all its steps, or over one; hold it against a stated schedule.

    `in_flight`: how many batches are said to be, of a stream.
    """
    ranks = timeline.ranks_of(pipeline)
    captured = timeline.steps
    scope = _choose_scope(timeline, pipeline, step)
    timeline = scope.timeline
    streams, one_run = scope.kind == "stream", scope.one_run
    whole = one_run and not scope.cut and not streams
    microbatches = count_microbatches(timeline, pipeline) if whole else None
    stream = measure_stream(timeline, pipeline, in_flight) if streams else None
    in_steps = () if streams else scope.windows
    windows = tuple(w for w in in_steps if step is None or w.step == step)
    step_time_ns = _step_time(scope.windows, captured)
    contradictions = _longer_than_its_step(windows, step_time_ns, ranks)
    if contradictions:
        windows, in_steps, step_time_ns = (), (), None
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
            *contradictions,
            *(() if spans or contradictions or not one_run else (_why_nothing(scope),)),
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
            f"counterpart left out{_say_lacking(found)}",
            hint="a rank is missing, was captured for another stretch of time, or sends from a "
            "thread that its profiler does not see",
        ),
    )


# Of traces that lack messages, so many are named.
_RANKS_NAMED = 3


def _say_lacking(found: Sequence[UnmatchedMessages]) -> str:
    """Say whose trace lacks messages that others have."""
    lacks: Counter[tuple[int, str]] = Counter()
    for left_over in found:
        if left_over.lacking is not None:
            sends = left_over.lacking == left_over.ends[0]
            lacks[left_over.lacking, "send" if sends else "receive"] += left_over.count
    said = (
        f"the trace of rank {rank} lacks {counted(n, what)}" for (rank, what), n in lacks.items()
    )
    named = ", ".join(islice(said, _RANKS_NAMED))
    more = len(lacks) - _RANKS_NAMED
    return f": {named}{f', and {more} more' if more > 0 else ''}" if named else ""


def _step_time(windows: Sequence[Window], captured: Sequence[int]) -> int | None:
    """Return the time from one step to the next: where one was left out between, none is known."""
    follows = dict(pairwise(captured))
    return _whole(
        after.start_ns - before.start_ns
        for before, after in pairwise(windows)
        if follows[before.step] == after.step
    )


def _longer_than_its_step(
    windows: Sequence[Window], step_time_ns: int | None, ranks: Sequence[RankTimeline]
) -> tuple[Gap, ...]:
    """Name a pipeline whose batch takes longer than a step: its steps would run into each other."""
    latency_ns = _median(window.length_ns for window in windows)
    if not latency_ns or not step_time_ns or latency_ns <= MAX_BATCHES_PER_STEP * step_time_ns:
        return ()
    shown = show_ranks([rank.rank for rank in ranks])
    return (
        Gap(
            code=Code.IMPOSSIBLE,
            message=f"nothing can be measured of ranks {shown}: a batch would take longer than its "
            f"step ({show_duration(latency_ns)} for {show_duration(step_time_ns)})",
            hint="a trace is damaged, or of another run; record them again",
        ),
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
    known = scope.rhythm and bool(scope.timeline.steps or scope.left_out)
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
