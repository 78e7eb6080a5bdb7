"""An `Analysis` in → what `debubble plan` answers: every lever, ranked by what it would buy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Annotated

import msgspec

from debubble.analysis import Analysis
from debubble.errors import UsageError
from debubble.ledger.causes import Cause
from debubble.measure.prediction import Prediction
from debubble.measure.worth import Rates, Tariff, Worth
from debubble.plan.change import SEARCHED, Change
from debubble.plan.emit import EMITTERS, emit
from debubble.plan.emitted import Emitted, emit_best, framework_to_tell
from debubble.plan.levers.link import Repair, name_hops
from debubble.plan.levers.overlap import Overlap
from debubble.plan.option import Idea, Option, headroom_after
from debubble.plan.plan import Plan
from debubble.plan.split import ends_in_layers
from debubble.report.answers.base import Answer, AnswerWarning, Part, list_warnings
from debubble.report.answers.change import (
    ChangePart,
    IntervalPart,
    OrderPart,
    ProfilerPart,
    answer_order,
    answer_profiler,
    describe,
    describe_refused,
    headroom_bytes,
    peak_bytes,
    say_gain,
    say_order,
)
from debubble.report.answers.ledger import answer_bottleneck, say_cause
from debubble.report.answers.links import HopPart, hop_parts
from debubble.timeline.job import Basis
from debubble.units import (
    NS_PER_S,
    show_bytes,
    show_duration,
    show_gain,
    show_percent,
    show_times,
)

SCHEMA = "debubble.plan/1"


class PlanNumbers(Part, frozen=True, kw_only=True):
    """What a batch takes, of the run as it is or after a change."""

    bubble_fraction: float
    batch_latency_s: Annotated[float, "window_ns"]
    peak_memory_bytes: Annotated[list[int | None] | None, "headroom.peak_bytes"]
    microbatches_per_s: float
    """Counted in microbatches of the measured size."""


class BaselinePart(Part, frozen=True, kw_only=True):
    """The run as it is."""

    schedule: str
    split: Annotated[list[int] | None, "source.split"]
    numbers: PlanNumbers
    framework: str | None
    microbatches: Annotated[int, "source.microbatches"]
    limit_bytes: Annotated[list[int | None], "limits"]
    predicted_peak_bytes: list[int] | None
    """What the model of memory gives for the run as it is; null where there is none."""
    headroom_bytes: list[int | None] | None
    per_microbatch_bytes: Annotated[list[int | None], "ranks.memory.per_microbatch_bytes"]
    """Memory of a microbatch in flight, by rank."""
    embedding_layers: float | None
    """Work of the embedding, in layers; null where it is unknown."""
    head_layers: float | None
    """Work of the head and loss, in layers."""
    without_profiler: ProfilerPart | None


class LinkRepair(Part, frozen=True, kw_only=True):
    """What is known of a slow hop."""

    times_expected: float
    replay_saved_s: Annotated[float | None, "replayed_ns"]


class OptionPart(Part, frozen=True, kw_only=True):
    """One thing to do."""

    lever: str
    change: ChangePart
    words: str
    numbers: Annotated[PlanNumbers, "."]
    interval: Annotated[IntervalPart, "."]
    fits_memory: bool | None
    headroom_bytes: Annotated[list[int | None] | None, "headroom.bytes"]
    by_replay: bool
    """Predicted by replaying the measured steps; else simulated."""
    latency_gain_fraction: Annotated[float, "latency_gain"]
    throughput_gain_fraction: Annotated[float, "throughput_gain"]
    worth: Worth | None
    """What it saves per day, for the same work; null where no GPU is known."""
    changes_training: bool
    """It trains with a larger global batch, which was not asked for."""
    recommended: bool
    advice: str
    """yes; try: not measured in this run; maybe: its interval is wide; noise; no."""
    link: LinkRepair | None
    assumptions: list[str]
    apply: dict[str, str]


class RefusedPart(Part, frozen=True, kw_only=True):
    """Something that cannot run or does not fit, and why."""

    lever: str
    change: ChangePart
    words: str
    reason: str


class LeftOutPart(Part, frozen=True, kw_only=True):
    """Options left out because the framework that is planned for has no setting for them."""

    framework: str
    options: list[RefusedPart]
    sentence: str


class SplitPart(Part, frozen=True, kw_only=True):
    """The best split, and whether it is proven."""

    split: list[int]
    exact: bool


class OverlapPart(Part, frozen=True, kw_only=True):
    """What overlap does to compute, and from which slowdown on it gains nothing."""

    slowdown: float | None
    break_even: float | None


class PlanAnswer(Answer, frozen=True, kw_only=True):
    """What could be changed in a run, the most throughput first."""

    schema: str = SCHEMA
    basis: Annotated[str, "baseline.basis"]
    """Of all times: profiled or unprofiled."""
    baseline: BaselinePart
    rates: Rates | None
    """What the worth of options is counted by; null where no GPU is known."""
    hops: list[HopPart]
    options: list[OptionPart]
    refused: list[RefusedPart]
    planned_for: Annotated[str | None, "framework"]
    """The framework that has settings for all options; null where any framework may."""
    left_out: LeftOutPart | None
    lower_bound_s: Annotated[float | None, "partition.lower_bound_s"]
    quickest_split: Annotated[SplitPart | None, "partition"]
    overlap: OverlapPart | None
    order: OrderPart | None
    emitted: Emitted | None
    tellable_framework: str | None
    """The framework to write the best option for: that of the run, else the first that can."""
    bottleneck: str | None
    findings: list[str]
    """What follows the verdict, a sentence each."""
    verdict: str
    warnings: list[AnswerWarning]

    @property
    def recommended(self) -> list[OptionPart]:
        """The options that leave training as it is, gain beyond the noise, and fit."""
        return [
            option for option in self.options if option.recommended and not option.changes_training
        ]


def answer_plan(  # noqa: PLR0913 (a run, its plan, and what to write of it)
    analysis: Analysis,
    plan: Plan,
    *,
    frameworks: Sequence[str] = tuple(EMITTERS),
    emit_for: str | None = None,
    order_file: str | None = None,
    tariff: Tariff | None = None,
) -> PlanAnswer:
    """Put the plan of a run into words and data.

    Every option is written for each of `frameworks`, the best one alone for `emit_for`. Where what
    is written needs an order of passes as CSV, it calls it `order_file`.
    """
    bottleneck = answer_bottleneck(analysis.bottleneck)
    # What no setting cures comes before all that one could set.
    ill = [named for named in analysis.causes[:1] if named.cause in {Cause.WORKER, Cause.DATA}]
    uncured = say_cause(analysis.ledger, ill[0]) if analysis.ledger and ill else None
    answer = answer_of_plan(
        plan,
        bottleneck=bottleneck.sentence if bottleneck else uncured,
        without_profiler=answer_profiler(analysis),
        frameworks=frameworks,
        emit_for=emit_for,
        order_file=order_file,
        rates=analysis.rates(tariff),
    )
    return msgspec.structs.replace(
        answer,
        hops=hop_parts(analysis),
        warnings=list_warnings(analysis.warnings_with(plan.baseline)),
    )


def predictions_of(plan: PlanAnswer) -> tuple[Prediction, ...]:
    """Return what it predicts of each option, to be kept beside its run."""
    return tuple(
        Prediction.of(
            option.change,
            words=option.words,
            basis=Basis(plan.basis),
            before_s=plan.baseline.numbers.batch_latency_s,
            batch_latency_s=option.numbers.batch_latency_s,
            low_s=(option.interval.batch_latency_s or [0.0, 0.0])[0],
            high_s=(option.interval.batch_latency_s or [0.0, 0.0])[1],
            bubble_fraction=option.numbers.bubble_fraction,
        )
        for option in plan.options
    )


def answer_of_plan(  # noqa: PLR0913 (a plan, and what else was asked of it)
    plan: Plan,
    *,
    bottleneck: str | None = None,
    without_profiler: ProfilerPart | None = None,
    frameworks: Sequence[str] = tuple(EMITTERS),
    emit_for: str | None = None,
    order_file: str | None = None,
    rates: Rates | None = None,
) -> PlanAnswer:
    """Put a plan into words and data, without what its run tells besides."""
    base = plan.baseline
    now = headroom_after(base, Change())
    ends = ends_in_layers(base) if base.source.split else (None, None)
    findings = _findings(plan, first=None if bottleneck else plan.first, uncured=bool(bottleneck))
    rate = base.source.microbatches * NS_PER_S / (base.window_ns + base.outside_ns)
    return PlanAnswer.of(
        plan,
        baseline=BaselinePart.of(
            base,
            numbers=PlanNumbers(
                bubble_fraction=base.source.bubble_fraction,
                batch_latency_s=base.window_ns / NS_PER_S,
                peak_memory_bytes=[rank.peak_memory_bytes for rank in base.ranks],
                microbatches_per_s=rate,
            ),
            predicted_peak_bytes=peak_bytes(now),
            headroom_bytes=headroom_bytes(now),
            embedding_layers=ends[0],
            head_layers=ends[1],
            without_profiler=without_profiler,
        ),
        rates=rates,
        hops=[],
        options=[_option_part(plan, option, frameworks, rates) for option in plan.options],
        refused=[_refused_part(refused) for refused in plan.refused],
        left_out=_left_out(plan),
        order=answer_order(plan, plan.ordered) if plan.ordered else None,
        emitted=emit_best(plan, emit_for, order_file) if emit_for else None,
        tellable_framework=framework_to_tell(plan),
        bottleneck=bottleneck,
        findings=findings,
        verdict=f"{_begin(bottleneck)}." if bottleneck else _verdict(plan),
        warnings=[],
    )


def _option_part(
    plan: Plan, option: Option, frameworks: Sequence[str], rates: Rates | None
) -> OptionPart:
    repair = next((repair for repair in plan.repairs if repair.option is option), None)
    apply = {}
    for framework in () if option.by_replay else frameworks:
        try:
            apply[framework] = emit(framework, option.change, plan.baseline.setting)
        except UsageError:
            continue
    return OptionPart.of(
        option,
        words=describe(option.change),
        worth=rates.worth_of_gain(option.throughput_gain) if rates else None,
        changes_training=plan.changes_training(option),
        recommended=option in plan.recommended,
        advice=plan.advice(option),
        link=repair and LinkRepair.of(repair),
        apply=apply,
    )


def _refused_part(refused: Idea) -> RefusedPart:
    return RefusedPart.of(refused, words=describe_refused(refused))


def _left_out(plan: Plan) -> LeftOutPart | None:
    """Say once what the framework that is planned for cannot be told."""
    if plan.framework is None or not plan.left_out:
        return None
    named = [idea.change.schedule for idea in plan.left_out if idea.change.schedule != SEARCHED]
    schedules = [name for name in named if name]
    words = [f"schedules {', '.join(schedules)}"] if schedules else []
    if any(idea.lever == "microbatches" for idea in plan.left_out):
        words.append("other numbers of microbatches")
    parts = [_refused_part(idea) for idea in plan.left_out]
    words += [part.words for part in parts if part.lever not in {"schedule", "microbatches"}]
    sentence = f"{plan.framework} has no setting for: {'; '.join(words)}"
    reasons = {idea.reason for idea in plan.left_out}
    if len(reasons) == 1 and len(plan.left_out) > 1:
        sentence = f"{plan.framework}: {reasons.pop()}"
    return LeftOutPart(framework=plan.framework, options=parts, sentence=sentence)


def _verdict(plan: Plan) -> str:  # noqa: PLR0911 (one sentence each)
    """Say what to do first, or why there is nothing to do."""
    if plan.best is not None:
        return f"{_begin(describe(plan.best.change))}: {_say_batch(plan, plan.best)}."
    if plan.baseline.no_fit is not None and plan.first is None:
        return f"No predictions: {plan.baseline.no_fit}."
    over = plan.baseline.over_limit_bytes
    if over is not None and over > 0:
        sentences = f"a rank exceeds its memory limit by {show_bytes(over)}"
        if plan.remedy is None:
            return f"Out of memory: {sentences}."
        return (
            f"{_begin(sentences)}. This fits: {describe(plan.remedy.change)}, a batch in "
            f"{show_duration(plan.remedy.window_ns)} instead of "
            f"{show_duration(plan.baseline.window_ns)}."
        )
    if plan.first is not None:
        words, batch = describe(plan.first.change), _say_batch(plan, plan.first)
        return f"Try {words}: {batch}; not sure: {_why_unsure(plan, plan.first)}."
    if not plan.options and (plan.refused or plan.left_out):
        reasons = Counter(idea.reason for idea in (*plan.refused, *plan.left_out))
        (why, _), *_ = reasons.most_common(1)
        return f"No change is possible; most options are refused because {why}."
    unweighed = ""
    if plan.baseline.source.split is None:
        unweighed = " No split was tried: give the layers with --layers."
    if plan.recommended:
        larger = plan.recommended[0]
        return (
            "No option gains more than the noise at this global batch size. A larger batch "
            f"(changes training): {describe(larger.change)}: {say_gain(larger)} throughput."
            f"{unweighed}"
        )
    return f"No option gains more than the noise.{unweighed}"


def _say_batch(plan: Plan, option: Option) -> str:
    """Say what an option gains, and what a batch takes with it."""
    batch, before = "a batch", ""
    if option.change.microbatches is not None and option.change.hold != "batch":
        batch = f"a batch of {option.change.microbatches}"
        before = f"{plan.baseline.source.microbatches} in "
    by_replay = " by replay" if option.by_replay else ""
    return (
        f"{say_gain(option)} throughput{by_replay}, {batch} in {show_duration(option.window_ns)} "
        f"instead of {before}{show_duration(plan.baseline.window_ns)}"
    )


def _why_unsure(plan: Plan, option: Option) -> str:
    """Say why an option should gain and is not sure to."""
    noise = ", within the noise" if option.throughput_low > 0 else ""
    return plan.unseen(option) or (
        f"its 80 % interval starts at {show_gain(option.throughput_low)}{noise}"
    )


def _begin(words: str) -> str:
    """Begin a sentence."""
    return f"{words[:1].upper()}{words[1:]}"


def _findings(plan: Plan, first: Option | None, *, uncured: bool) -> list[str]:
    """Say what may gain more, the best of each lever, a larger batch, repairs, and overlap.

    `first` is said already. Beside what no setting cures, only what surely gains is worth a line.
    """
    best: dict[str, Option] = {}
    larger: Option | None = None
    for option in plan.recommended:
        if plan.changes_training(option):
            larger = larger or option
        elif option is not first:
            best.setdefault(option.lever, option)
    sentences = []
    if first is not None and plan.to_try and plan.to_try[0] is not first:
        maybe = plan.to_try[0]
        if maybe.throughput_gain > first.throughput_gain:
            why = _why_unsure(plan, maybe)
            sentences.append(f"Try {describe(maybe.change)}: {say_gain(maybe)}; not sure: {why}.")
    sentences += _say_misses(plan)
    sentences += [
        f"{_begin(describe(option.change))}: {say_gain(option)}." for option in best.values()
    ]
    sentences += [
        _say_repair(plan, repair)
        for repair in plan.repairs
        if not uncured
        and repair.option is not first
        and repair.option not in plan.recommended
        and not any(_holds(other, repair) for other in plan.repairs)
    ]
    if plan.ordered is not None:
        sentences.append(say_order(plan.ordered))
    if not uncured and plan.overlap is not None and plan.overlap.option.fits_memory is not False:
        sentences.append(_say_overlap(plan, plan.overlap))
    if larger is not None and plan.first is not None:
        words = describe(larger.change)
        sentences.append(f"A larger batch (changes training): {words}: {say_gain(larger)}.")
    return sentences


def _say_misses(plan: Plan) -> list[str]:
    """Say why no change is simulated, and what would help."""
    no_fit = plan.baseline.no_fit
    if no_fit is None:
        return []
    listed = "only options priced by replaying the measured steps are listed"
    # Where nothing is to be done, the error is the first line already.
    sentences = [f"{_begin(str(no_fit))}: {listed}." if plan.first else f"{_begin(listed)}."]
    return [*sentences, f"To fix: {no_fit.hint}."] if no_fit.hint else sentences


def _holds(repair: Repair, other: Repair) -> bool:
    """Tell whether a repair is of the other's hops and of more."""
    hops, others = (set(mended.option.change.repaired or ()) for mended in (repair, other))
    return hops > others


def _say_repair(plan: Plan, repair: Repair) -> str:
    """Say of a slow hop that repairing it buys nothing sure."""
    hops = repair.option.change.repaired or ()
    takes = "take" if len(hops) > 1 else "takes"
    saved_ns = plan.baseline.window_ns - repair.option.window_ns
    times, peers = show_times(repair.times_expected), "their" if len(hops) > 1 else "its"
    slow = f"{_begin(name_hops(hops))} {takes} {times} as long as {peers} peers"
    if saved_ns <= 0:
        return f"{slow}; repairing it gains nothing."
    saved = show_duration(saved_ns)
    if repair.option in plan.to_try:
        why = _why_unsure(plan, repair.option)
        return f"{slow}; repairing it may gain {say_gain(repair.option)}, not sure: {why}."
    return (
        f"{slow}; repairing it saves little: {saved} of {show_duration(plan.baseline.window_ns)}, "
        f"{say_gain(repair.option)}, within the noise."
    )


def _say_overlap(plan: Plan, overlap: Overlap) -> str:
    even = overlap.break_even
    if even is None:
        pays = "worth it even if overlap makes compute take four times as long"
    elif even <= 1.0:
        pays = "no gain even if overlap does not slow compute"
    else:
        pays = f"worth it only if overlap slows compute by less than {show_percent(even - 1)}"
    if overlap.slowdown is None:
        hope = "try it" if overlap.option in plan.to_try else "unlikely to gain"
        return f"Transfers overlapped with compute: not measured, {hope}; {pays}."
    seen = show_percent(overlap.slowdown - 1)
    return f"Transfers overlapped with compute slow it by {seen} in this run; {pays}."
