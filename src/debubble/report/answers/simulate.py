"""An `Analysis` and a change, or costs by hand, in → what `debubble simulate` answers."""

from __future__ import annotations

from math import expm1
from typing import Annotated

from debubble.analysis import Analysis
from debubble.plan.ask import WhatIfAnswer
from debubble.plan.change import Change
from debubble.plan.request import ChangeRequest
from debubble.report.answers.base import Answer, AnswerWarning, Part, list_warnings, seconds
from debubble.report.answers.change import (
    ChangePart,
    IntervalPart,
    ProfilerPart,
    answer_profiler,
    describe,
    headroom_bytes,
    latency_interval,
    peak_bytes,
)
from debubble.simulate.communication import Communication
from debubble.simulate.expected import Theory
from debubble.simulate.hand_set import UNIT_NS, GivenCosts, mean_of_stages
from debubble.simulate.theory import bubble_fraction, ideal_bubble
from debubble.timeline.figures import PipelineFigures
from debubble.timeline.schedules import SCHEDULES, Order
from debubble.units import (
    NS_PER_S,
    counted,
    show_between,
    show_duration,
    show_gain,
    show_gains,
    show_percent,
)

SCHEMA = "debubble.simulate/1"


class GivenPart(Part, frozen=True, kw_only=True):
    """What was simulated; costs by stage and by hop."""

    schedule: str
    ranks: int
    stages: int
    chunks: int
    microbatches: int
    communication: str
    unit: str = "s"
    """`s`, or `1` where only ratios were given."""
    passes: dict[str, list[float]]
    transfer: list[float] | None = None
    """Null with traces: messages are drawn."""
    split: list[int] | None = None
    tokens: float | None = None
    change: ChangePart | None = None
    changes_nothing: bool | None = None
    """The run was simulated as it is."""
    microbatch_scale: float | None = None
    """How large a microbatch is against the measured one."""


class SimulatedNumbers(Part, frozen=True, kw_only=True):
    """What came out; null where nothing was given to tell it from."""

    bubble_fraction: float | None
    batch_latency_s: float | None
    batch_latency_units: float | None = None
    step_time_s: float | None = None
    peak_memory_bytes: list[int] | None = None
    microbatches_per_s: float | None
    """Counted in microbatches of the measured size."""
    tokens_per_s: float | None = None


class MeasuredPart(Part, frozen=True, kw_only=True):
    """The run as it was, which it is held against."""

    bubble_fraction: float | None
    batch_latency_s: float
    step_time_s: float | None
    peak_memory_bytes: Annotated[list[int | None], "ranks.peak_memory_bytes"]
    microbatches_per_s: float
    tokens_per_s: float | None
    theory: Theory
    without_profiler: ProfilerPart | None


class SimulatedRank(Part, frozen=True, kw_only=True):
    """One rank."""

    rank: int
    bubble_fraction: float | None
    stages: list[int]
    measured_bubble_fraction: float | None = None


class SimulateAnswer(Answer, frozen=True, kw_only=True):
    """One what-if; of costs by hand, all that is about a measured run is null."""

    schema: str = SCHEMA
    basis: str | None = None
    """Of all times: profiled or unprofiled; null of costs by hand."""
    given: GivenPart
    numbers: SimulatedNumbers
    interval: IntervalPart | None = None
    measured: MeasuredPart | None = None
    latency_gain_fraction: float | None = None
    throughput_gain_fraction: float | None = None
    fits_memory: bool | None = None
    headroom_bytes: list[int | None] | None = None
    theory: Theory
    longest_stage_bubble: float | None
    bubble_over_ideal: float | None
    ranks: list[SimulatedRank]
    correction_fraction: float | None = None
    misfit_fraction: float | None = None
    """By how much the run took longer than its own simulation."""
    assumptions: list[str]
    findings: list[str]
    """What follows the verdict, a sentence each."""
    verdict: str
    warnings: list[AnswerWarning]


def answer_simulate(
    analysis: Analysis, asked: WhatIfAnswer, request: ChangeRequest
) -> SimulateAnswer:
    """Say what a batch would take."""
    option, baseline, measured = asked.option, asked.baseline, analysis.pipeline
    scale = baseline.microbatch_scale(asked.change)
    tokens = analysis.tokens
    outside_ns, step_ns = baseline.outside_ns, analysis.basis.step_time_ns
    rate = baseline.source.microbatches * NS_PER_S / (baseline.window_ns + outside_ns)
    assumed = list(option.assumptions)
    if baseline.memory is not None and (asked.change.microbatches or asked.change.split):
        assumed += baseline.memory.assumptions
    if outside_ns > 0 and not asked.changes_nothing:
        assumed.append(f"{show_duration(outside_ns)} between batches, as measured")
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
            passes={
                kind: (lengths / NS_PER_S).tolist()
                for kind, lengths in asked.pass_lengths_ns().items()
            },
            split=list(asked.split) if asked.split else None,
            tokens=None if tokens is None else tokens * scale,
            change=ChangePart.of(asked.change, hops=[*request.hops] or None),
            changes_nothing=asked.changes_nothing,
            microbatch_scale=scale,
        ),
        numbers=SimulatedNumbers(
            bubble_fraction=option.bubble_fraction,
            batch_latency_s=option.window_ns / NS_PER_S,
            step_time_s=None if step_ns is None else (option.window_ns + outside_ns) / NS_PER_S,
            peak_memory_bytes=peak_bytes(option.headroom),
            microbatches_per_s=option.microbatches_per_s,
            tokens_per_s=None if tokens is None else option.microbatches_per_s * tokens,
        ),
        interval=latency_interval(option),
        measured=MeasuredPart.of(
            measured,
            batch_latency_s=baseline.window_ns / NS_PER_S,
            step_time_s=seconds(step_ns),
            microbatches_per_s=rate,
            tokens_per_s=None if tokens is None else rate * tokens,
            theory=analysis.theory,
            without_profiler=answer_profiler(analysis),
        ),
        latency_gain_fraction=option.latency_gain,
        throughput_gain_fraction=option.throughput_gain,
        fits_memory=option.fits_memory,
        headroom_bytes=headroom_bytes(option.headroom),
        theory=Theory(
            bubble_fraction=asked.theory(), schedule_bubble_fraction=asked.theory_of_schedule()
        ),
        longest_stage_bubble=asked.longest_stage_bubble(),
        bubble_over_ideal=asked.bubble_over_ideal(),
        ranks=[
            SimulatedRank(
                rank=shares.rank,
                bubble_fraction=bubble,
                stages=held,
                measured_bubble_fraction=shares.bubble_fraction,
            )
            for shares, bubble, held in zip(
                measured.shares, asked.rank_bubbles(), stages, strict=True
            )
        ],
        correction_fraction=asked.correction - 1,
        misfit_fraction=expm1(baseline.misfit),
        assumptions=assumed,
        findings=_findings(asked, request.hops),
        verdict=_verdict(asked),
        warnings=list_warnings(analysis.warnings_with(baseline)),
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
    actions = [action for of_rank in order for action in of_rank]
    microbatches = 1 + max(action.microbatch for action in actions)
    stages = 1 + max(action.stage for action in actions)
    window_ns, scale = figures.windows[0].length_ns, UNIT_NS if in_units else NS_PER_S
    passes = {kind.name: of_stage / scale for kind, of_stage in costs.passes.items()}
    latency_s = None if in_units else window_ns / NS_PER_S
    theory = Theory(
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
        ideal = f"{name} with balanced stages and zero-cost transfers: {alike}"
    return SimulateAnswer(
        given=GivenPart(
            schedule=schedule,
            ranks=len(order),
            stages=stages,
            chunks=max(len(rank.stages) for rank in figures.ranks),
            microbatches=microbatches,
            communication=str(communication),
            unit="1" if in_units else "s",
            passes={kind: passes[kind].tolist() for kind in sorted({a.kind for a in actions})},
            transfer=[] if isinstance(costs.one_way, int) else (costs.one_way / scale).tolist(),
        ),
        numbers=SimulatedNumbers(
            bubble_fraction=figures.bubble_fraction,
            batch_latency_s=latency_s,
            batch_latency_units=window_ns / UNIT_NS if in_units else None,
            microbatches_per_s=microbatches / latency_s if latency_s else None,
        ),
        theory=theory,
        longest_stage_bubble=figures.longest_stage_bubble,
        bubble_over_ideal=figures.bubble_over_ideal,
        ranks=[
            SimulatedRank.of(shares, stages=list(rank.stages))
            for rank, shares in zip(figures.ranks, figures.shares, strict=True)
        ],
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
        return f"Simulated unchanged, a batch takes {middle}; measured {measured}: error {off}."
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
    sentences = []
    words = [f"hop {hop}" for hop in hops]
    if not asked.changes_nothing and (asked.change != Change() or not hops):
        words.insert(0, describe(asked.change))
    if words:
        sentences.append(f"Change: {', '.join(words)}.")
    low, high = asked.option.throughput_low, asked.option.throughput_high
    if not asked.changes_nothing and low <= 0 <= high:
        sentences.append(f"Within the noise: 80 % interval {show_gains(low, high)}.")
    for rank, room in zip(asked.baseline.ranks, asked.option.headroom or (), strict=False):
        if room.fits is False:
            sentences.append(f"Rank {rank.rank} does not fit: {room}.")
    return sentences
