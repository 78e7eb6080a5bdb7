"""An `Analysis` and a change, or costs by hand, in → what `debubble simulate` answers."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from math import expm1
from typing import ClassVar

from debubble.analysis import Analysis
from debubble.errors import UsageError
from debubble.plan.ask import WhatIfAnswer, ask
from debubble.plan.baseline import Baseline
from debubble.plan.change import Change, Hold
from debubble.plan.hop import Hop, set_hops
from debubble.plan.levers.overlap import say_slowdown
from debubble.plan.option import Idea
from debubble.report.answers.base import Answer, AnswerWarning, Part, list_warnings, seconds
from debubble.report.answers.change import (
    ChangePart,
    IntervalPart,
    ProfilerPart,
    Tokens,
    answer_profiler,
    describe,
    headroom_bytes,
    peak_bytes,
    start_from,
    warnings_of,
)
from debubble.report.answers.find import TheoryPart
from debubble.simulate.communication import WAITED, Communication, usual_communication
from debubble.simulate.hand_set import UNIT_NS, GivenCosts, mean_of_stages
from debubble.simulate.theory import bubble_fraction, ideal_bubble
from debubble.timeline.figures import PipelineFigures
from debubble.timeline.schedules import SCHEDULES, Order, state_schedule
from debubble.units import (
    NS_PER_S,
    counted,
    parse_rate,
    show_between,
    show_duration,
    show_gain,
    show_gains,
    show_percent,
)

SCHEMA = "debubble.simulate/1"
_HOP = re.compile(r"([0-9]+):([0-9]+)=(.+)")


class GivenPart(Part, frozen=True, kw_only=True):
    """What was simulated; costs by stage and by hop."""

    schedule: str
    ranks: int
    stages: int
    chunks: int
    microbatches: int
    communication: str
    unit: str
    """`s`, or `1` where only ratios were given."""
    passes: dict[str, list[float]]
    transfer: list[float] | None
    """Null with traces: messages are drawn."""
    split: list[int] | None
    tokens: float | None
    change: ChangePart | None
    changes_nothing: bool | None
    """The run was simulated as it is."""
    microbatch_scale: float | None
    """How large a microbatch is against the measured one."""


class SimulatedNumbers(Part, frozen=True, kw_only=True):
    """What came out; null where nothing was given to tell it from."""

    bubble_fraction: float | None
    batch_latency_s: float | None
    batch_latency_units: float | None
    step_time_s: float | None
    peak_memory_bytes: list[int] | None
    microbatches_per_s: float | None
    """Counted in microbatches of the measured size."""
    tokens_per_s: float | None


class MeasuredPart(Part, frozen=True, kw_only=True):
    """The run as it was, which it is held against."""

    paths: ClassVar = {"peak_memory_bytes": "ranks.peak_memory_bytes"}

    bubble_fraction: float | None
    batch_latency_s: float
    step_time_s: float | None
    peak_memory_bytes: list[int | None]
    microbatches_per_s: float
    tokens_per_s: float | None
    theory: TheoryPart
    without_profiler: ProfilerPart | None


class SimulatedRank(Part, frozen=True, kw_only=True):
    """One rank."""

    rank: int
    bubble_fraction: float | None
    stages: list[int]
    measured_bubble_fraction: float | None


class SimulateAnswer(Answer, frozen=True, kw_only=True):
    """One what-if; of costs by hand, all that is about a measured run is null."""

    schema: str = SCHEMA
    basis: str | None
    """Of all times: profiled or unprofiled; null of costs by hand."""
    given: GivenPart
    numbers: SimulatedNumbers
    interval: IntervalPart | None
    measured: MeasuredPart | None
    latency_gain_fraction: float | None
    throughput_gain_fraction: float | None
    fits_memory: bool | None
    headroom_bytes: list[int | None] | None
    theory: TheoryPart
    longest_stage_bubble: float | None
    bubble_over_ideal: float | None
    ranks: list[SimulatedRank]
    correction_fraction: float | None
    misfit_fraction: float | None
    """By how much the run took longer than its own simulation; null where two runs tell it."""
    assumptions: list[str]
    findings: list[str]
    """What follows the verdict, a sentence each."""
    verdict: str
    warnings: list[AnswerWarning]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What to change in a measured run, and what its traces may not tell; None: as it is."""

    microbatches: int | None = None
    hold: Hold | None = None
    schedule: str | None = None
    """A name, or the path of an order as CSV."""
    chunks: int | None = None
    split: tuple[int, ...] | None = None
    overlap: bool | None = None
    recompute: bool | None = None
    hops: tuple[str, ...] = ()
    """`2:3=5GB/s`."""
    tokens: Tokens = field(default_factory=Tokens)
    layers: tuple[int, ...] | None = None
    schedule_measured: str | None = None
    communication: str | None = None
    """How messages of the run travel, where the way that is found does not fit."""
    memory_limit_bytes: float | None = None


def ask_run(analysis: Analysis, request: Request, also: Analysis | None = None) -> WhatIfAnswer:
    """Fit the run, change it, and simulate it."""
    pipeline = analysis.pipeline
    schedule = request.schedule_measured or analysis.job.schedule_for(pipeline)
    if pipeline.windows and pipeline.schedule is None and schedule is None:
        raise UsageError(
            "the schedule that ran was not recognised",
            hint="say it with --schedule-measured, such as 1f1b",
        )
    tokens = request.tokens.told_by(analysis, also)
    baseline = start_from(
        analysis,
        also,
        tokens=tokens,
        layers=request.layers,
        limit_bytes=request.memory_limit_bytes,
        schedule=request.schedule_measured,
        communication=request.communication,
    )
    return ask(baseline, _idea(baseline, request, tokens))


def answer_simulate(
    analysis: Analysis,
    request: Request,
    also: Analysis | None = None,
    asked: WhatIfAnswer | None = None,
) -> SimulateAnswer:
    """Say what a batch would take; `asked` is what came out, where that is known already."""
    asked = ask_run(analysis, request, also) if asked is None else asked
    option, baseline, measured = asked.option, asked.baseline, analysis.pipeline
    scale = baseline.microbatch_scale(asked.change)
    tokens = request.tokens.told_by(analysis, also).of_run(baseline)
    outside_ns = baseline.outside_ns
    rate = baseline.source.microbatches * NS_PER_S / (baseline.window_ns + outside_ns)
    assumed = list(option.assumptions)
    if baseline.memory is not None and (asked.change.microbatches or asked.change.split):
        assumed += baseline.memory.assumptions
    if outside_ns > 0 and not asked.changes_nothing:
        assumed.append(f"between batches it takes {show_duration(outside_ns)}, as measured")
    stages = [sorted({action.stage for action in actions}) for actions in asked.order]
    return SimulateAnswer(
        basis=analysis.basis.name,
        given=GivenPart(
            schedule=asked.change.schedule or baseline.schedule,
            ranks=len(asked.order),
            stages=asked.stages,
            chunks=max(map(len, stages)),
            microbatches=asked.microbatches,
            communication=str(asked.communication),
            unit="s",
            passes={
                kind: (lengths / NS_PER_S).tolist()
                for kind, lengths in asked.pass_lengths_ns().items()
            },
            transfer=None,
            split=list(asked.split) if asked.split else None,
            tokens=None if tokens is None else tokens * scale,
            change=ChangePart.of(asked.change, hops=[*request.hops] or None),
            changes_nothing=asked.changes_nothing,
            microbatch_scale=scale,
        ),
        numbers=SimulatedNumbers(
            bubble_fraction=option.bubble_fraction,
            batch_latency_s=option.window_ns / NS_PER_S,
            batch_latency_units=None,
            step_time_s=None
            if analysis.basis.step_time_ns is None
            else (option.window_ns + outside_ns) / NS_PER_S,
            peak_memory_bytes=peak_bytes(option.headroom),
            microbatches_per_s=option.microbatches_per_s,
            tokens_per_s=None if tokens is None else option.microbatches_per_s * tokens,
        ),
        interval=IntervalPart(
            batch_latency_s=[option.low_ns / NS_PER_S, option.high_ns / NS_PER_S]
        ),
        measured=MeasuredPart.of(
            measured,
            batch_latency_s=baseline.window_ns / NS_PER_S,
            step_time_s=seconds(analysis.basis.step_time_ns),
            microbatches_per_s=rate,
            tokens_per_s=None if tokens is None else rate * tokens,
            theory=TheoryPart(
                bubble_fraction=analysis.theory,
                schedule_bubble_fraction=analysis.theory_of_schedule,
            ),
            without_profiler=answer_profiler(analysis, analysis.basis),
        ),
        latency_gain_fraction=option.latency_gain,
        throughput_gain_fraction=option.throughput_gain,
        fits_memory=option.fits_memory,
        headroom_bytes=headroom_bytes(option.headroom),
        theory=TheoryPart(
            bubble_fraction=asked.theory(), schedule_bubble_fraction=asked.theory_of_schedule()
        ),
        longest_stage_bubble=asked.longest_stage_bubble(),
        bubble_over_ideal=asked.bubble_over_ideal(),
        ranks=[
            SimulatedRank(
                rank=rank.rank,
                bubble_fraction=bubble,
                stages=own,
                measured_bubble_fraction=shares.bubble_fraction,
            )
            for rank, bubble, own, shares in zip(
                measured.ranks, asked.rank_bubbles(), stages, measured.shares, strict=True
            )
        ],
        correction_fraction=asked.correction - 1,
        misfit_fraction=expm1(baseline.misfit)
        if asked.correction in (1.0, baseline.correction)
        else None,
        assumptions=assumed,
        findings=_findings(asked, request.hops),
        verdict=_verdict(asked),
        warnings=list_warnings(warnings_of(analysis, also, baseline)),
    )


def answer_by_hand(  # noqa: PLR0913 (what was asked, and what came out)
    *,
    schedule: str,
    order: Order,
    communication: Communication,
    costs: GivenCosts,
    in_units: bool,
    figures: PipelineFigures,
) -> SimulateAnswer:
    """Say what a schedule does with costs of one's own, plain numbers where `in_units`."""
    every = [action for actions in order for action in actions]
    microbatches = 1 + max(action.microbatch for action in every)
    stages = 1 + max(action.stage for action in every)
    window_ns, scale = figures.windows[0].length_ns, UNIT_NS if in_units else NS_PER_S
    passes = {kind.name: of_stage / scale for kind, of_stage in costs.passes.items()}
    latency_s = None if in_units else window_ns / NS_PER_S
    theory = TheoryPart(
        # The formula is for one stage a rank.
        bubble_fraction=bubble_fraction(len(order), microbatches) if stages == len(order) else None,
        schedule_bubble_fraction=ideal_bubble(order, mean_of_stages(costs.passes)),
    )
    if theory.bubble_fraction is not None:
        sizes = (
            f"{counted(len(order), 'rank')}, {counted(microbatches, 'microbatch', 'microbatches')}"
        )
        ideal = f"theory for {sizes}: {show_percent(theory.bubble_fraction)}"
    else:
        name = schedule if schedule in SCHEDULES else "this order"
        alike = show_percent(theory.schedule_bubble_fraction)
        ideal = f"{name} with equal stages and free transfers: {alike}"
    return SimulateAnswer(
        basis=None,
        given=GivenPart(
            schedule=schedule,
            ranks=len(order),
            stages=stages,
            chunks=max(len(rank.stages) for rank in figures.ranks),
            microbatches=microbatches,
            communication=str(communication),
            unit="1" if in_units else "s",
            passes={kind: passes[kind].tolist() for kind in sorted({each.kind for each in every})},
            transfer=[] if isinstance(costs.one_way, int) else (costs.one_way / scale).tolist(),
            split=None,
            tokens=None,
            change=None,
            changes_nothing=None,
            microbatch_scale=None,
        ),
        numbers=SimulatedNumbers(
            bubble_fraction=figures.bubble_fraction,
            batch_latency_s=latency_s,
            batch_latency_units=window_ns / UNIT_NS if in_units else None,
            step_time_s=None,
            peak_memory_bytes=None,
            microbatches_per_s=microbatches / latency_s if latency_s else None,
            tokens_per_s=None,
        ),
        interval=None,
        measured=None,
        latency_gain_fraction=None,
        throughput_gain_fraction=None,
        fits_memory=None,
        headroom_bytes=None,
        theory=theory,
        longest_stage_bubble=figures.longest_stage_bubble,
        bubble_over_ideal=figures.bubble_over_ideal,
        ranks=[
            SimulatedRank(
                rank=rank.rank,
                bubble_fraction=shares.bubble_fraction,
                stages=list(rank.stages),
                measured_bubble_fraction=None,
            )
            for rank, shares in zip(figures.ranks, figures.shares, strict=True)
        ],
        correction_fraction=None,
        misfit_fraction=None,
        assumptions=[],
        findings=[],
        verdict=f"Ranks wait {show_percent(figures.bubble_fraction)} of the batch ({ideal}).",
        warnings=[],
    )


def _verdict(asked: WhatIfAnswer) -> str:
    option, measured = asked.option, show_duration(asked.baseline.window_ns)
    middle = show_duration(option.window_ns)
    if asked.changes_nothing:
        off = show_gain(option.window_ns / asked.baseline.window_ns - 1)
        return f"Simulated as it is, a batch takes {middle}; it took {measured}: {off} off."
    of, before = "", ""
    if asked.change.microbatches:
        of = f" of {counted(asked.microbatches, 'microbatch', 'microbatches')}"
        before = f" for {asked.baseline.source.microbatches}"
    between = show_between(show_duration(option.low_ns), show_duration(option.high_ns))
    return (
        f"A batch{of} would take {middle} ({between}) instead of {measured}{before}: "
        f"{show_gain(option.throughput_gain)} throughput."
    )


def _findings(asked: WhatIfAnswer, hops: tuple[str, ...]) -> list[str]:
    """Say what was asked for, whether it is within the noise, and who does not fit."""
    said = []
    words = [f"hop {hop}" for hop in hops]
    if not asked.changes_nothing and (asked.change != Change() or not hops):
        words.insert(0, describe(asked.change))
    if words:
        said.append(f"Asked: {', '.join(words)}.")
    low, high = asked.option.throughput_low, asked.option.throughput_high
    if not asked.changes_nothing and low <= 0 <= high:
        said.append(f"That is within the noise of a run: {show_gains(low, high)}.")
    for rank, room in zip(asked.baseline.ranks, asked.option.headroom or (), strict=False):
        if room.fits is False:
            said.append(f"Rank {rank.rank} does not fit: {room}.")
    return said


def _idea(baseline: Baseline, request: Request, tokens: Tokens) -> Idea:
    """Make a change of what is asked for; what is as it was already is no change."""
    order = None if request.schedule is None else _order_of_file(baseline, request)
    schedule = request.schedule or baseline.schedule
    chunks, microbatches = request.chunks, request.microbatches
    if order is None and schedule == baseline.schedule:
        chunks = chunks or baseline.source.chunks
    same_order = (schedule, chunks) == (baseline.schedule, baseline.source.chunks)
    if order is not None:
        microbatches = 1 + max(action.microbatch for actions in order for action in actions)
    if request.hold is not None and microbatches is None:
        raise UsageError(
            "--hold says something of --microbatches only", hint="add --microbatches N"
        )
    if microbatches == baseline.source.microbatches:
        microbatches = None
    if microbatches is not None and microbatches < 1:
        raise UsageError(f"{microbatches} microbatches make no step", hint="give 1 or more")
    samples = (baseline.setting.microbatch_size or 0) * baseline.source.microbatches
    if request.hold == "batch" and samples and (microbatches or 0) > samples:
        raise UsageError(
            f"{counted(samples, 'sample')} of a batch do not cut into {microbatches} microbatches",
            hint="a microbatch has one sample or more",
        )
    change = Change(
        split=None if request.split is None else _split(baseline, request.split),
        microbatches=microbatches,
        hold="batch" if request.hold == "batch" and microbatches else "microbatch",
        schedule=None if same_order else schedule,
        order=order,
        chunks=None if same_order else chunks,
        overlap=True if _overlaps(request.overlap, schedule, baseline.framework) else None,
        token_scale=tokens.scale(baseline),
        recompute=_recompute(request.recompute, baseline),
    )
    trains, would = _trains(baseline.order), _trains(baseline.what_if(change).order)
    if trains != would:
        kinds = "trains", "has forward passes alone"
        raise UsageError(
            f"the run {kinds[not trains]}, and this schedule {kinds[not would]}",
            hint="ask for a schedule of the same kind",
        )
    idea = Idea(lever="asked", change=change)
    if change.overlap:
        said = say_slowdown(baseline)
        idea = Idea(lever="asked", change=change, assumptions=(said,))
    rates = dict(_hop(text) for text in request.hops)
    return set_hops(baseline, idea, rates) if rates else idea


def _split(baseline: Baseline, split: tuple[int, ...]) -> tuple[int, ...] | None:
    known = baseline.source.split
    if known is not None and sum(split) != sum(known):
        asked, now = (",".join(map(str, layers)) for layers in (split, known))
        raise UsageError(
            f"the split {asked} has {sum(split)} layers, the model has {sum(known)}",
            hint=f"now it is {now}",
        )
    return None if split == known else split


def _order_of_file(baseline: Baseline, request: Request) -> Order | None:
    statement = state_schedule(request.schedule or "", request.chunks)
    if statement.order is None:
        return None
    written = 1 + max(action.microbatch for actions in statement.order for action in actions)
    microbatches = written if request.microbatches is None else request.microbatches
    return statement.order_for(len(baseline.ranks), microbatches, 1)


def _recompute(asked: bool | None, baseline: Baseline) -> bool | None:
    """Read what is asked of recomputing; as it is already, it is no change."""
    if asked is None or asked == baseline.ranks[0].recomputes:
        return None
    if not _trains(baseline.order):
        raise UsageError("nothing is recomputed without backward passes", hint="leave it out")
    return asked


def _trains(order: Order) -> bool:
    return any(action.kind != "F" for actions in order for action in actions)


def _overlaps(asked: bool | None, schedule: str, framework: str | None) -> bool:
    """Tell whether overlap is asked for, of a schedule that has none."""
    if asked is not None and usual_communication(schedule, framework) not in WAITED:
        whose = {"megatron": "Megatron"}.get(framework or "", "torch's runtime")
        raise UsageError(
            f"{whose} always lets transfers of {schedule} run beside compute",
            hint="--overlap is for 1f1b, gpipe and forward-only",
        )
    if asked and framework == "megatron":
        raise UsageError(
            "Megatron overlaps transfers of interleaved schedules alone",
            hint="ask for --schedule interleaved-1f1b: there it does",
        )
    return bool(asked)


def _hop(text: str) -> tuple[Hop, float]:
    read = _HOP.fullmatch(text.strip())
    if read is None:
        raise UsageError(f"{text!r} is no hop", hint="write it as 2:3=5GB/s, ranks and rate")
    return (int(read[1]), int(read[2])), parse_rate(read[3])
