"""A verb's answer in → the same in two kilobytes: what `--json=brief` and `debubble mcp` give.

An agent pays for every byte it reads, a script wants the one figure. Headline figures, the first
causes and whom they are waited for, the first options, warnings, and the command to go on with;
floats have four digits, and what is not known is left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from debubble.answers.base import Answer, AnswerWarning, Part, json_text
from debubble.answers.change import ChangePart
from debubble.answers.compare import CompareAnswer, DifferencePart, PredictedPart
from debubble.answers.find import FindAnswer
from debubble.answers.inspect import InspectAnswer, NoPipelineAnswer
from debubble.answers.link_tests import LiveAnswer, LogsAnswer, TestedHop
from debubble.answers.links import HopPart, LinksAnswer
from debubble.answers.plan import EmitPart, OptionPart, PlanAnswer
from debubble.answers.server_plan import (
    ServedPart,
    ServerPlanAnswer,
    ServerSimulateAnswer,
    SettingPart,
)
from debubble.answers.simulate import SimulateAnswer
from debubble.units import show_members

# What fits two kilobytes, and what a reader acts upon: the first few of anything.
_CAUSES = 5
_SENTENCES = 3
_OPTIONS = 5
_FEW = 3
_LETTERS = 200
_DIGITS = 4


class BriefWarning(Part, frozen=True, kw_only=True, omit_defaults=True):
    """A warning, or several of one code."""

    code: str
    message: str
    n: int = 1


class BriefAnswer(Answer, frozen=True, kw_only=True, omit_defaults=True):
    """What every brief answer has."""

    schema: str = "debubble.brief/1"
    verdict: str
    basis: str | None = None
    """Of times: profiled or unprofiled."""
    findings: list[str] = msgspec.field(default_factory=list)
    next: list[str] = msgspec.field(default_factory=list)
    """Commands to go on with."""
    warnings: list[BriefWarning] = msgspec.field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain objects, floats in four digits."""
        short: dict[str, Any] = _rounded(super().to_dict())
        return {"schema": self.schema} | short

    def to_json(self) -> str:
        """Return what `--json=brief` prints: one line."""
        return json_text(self.to_dict(), compact=True)


class BriefRun(Part, frozen=True, kw_only=True, omit_defaults=True):
    """What ran."""

    kind: str
    capture: str
    ranks: int
    stages: int
    pipelines: int = 1
    chunks: int = 1
    microbatches: int | None = None
    schedule: str | None = None
    framework: str | None = None
    steps: int
    missing_ranks: str | None = None


class BriefNumbers(Part, frozen=True, kw_only=True, omit_defaults=True):
    """The headline figures."""

    bubble_fraction: float | None = None
    theory_bubble_fraction: float | None = None
    batch_latency_s: float | None = None
    step_time_s: float | None = None
    microbatches_per_s: float | None = None
    tokens_per_s: float | None = None
    peak_memory_bytes: int | None = None
    """Of the rank that has most."""
    apparent_fraction: float | None = None
    useful_fraction: float | None = None


class BriefCulprit(Part, frozen=True, kw_only=True, omit_defaults=True):
    """Whom ranks waited for longest."""

    rank: int
    stage: int | None = None
    pass_: str | None = msgspec.field(name="pass", default=None)
    hop: list[int] | None = None


class BriefCause(Part, frozen=True, kw_only=True, omit_defaults=True):
    """Where time goes besides compute, what putting it right would buy, and who it is."""

    cause: str
    share_fraction: float
    saved_fraction: float | None = None
    waited_for: BriefCulprit | None = None


class BriefFinding(Part, frozen=True, kw_only=True, omit_defaults=True):
    """A cause that matters; the first is the one to act upon. Its sentence is in `findings`."""

    cause: str
    rank: int | None = None
    stage: int | None = None
    hop: list[int] | None = None
    saved_s: float


class BriefHop(Part, frozen=True, kw_only=True, omit_defaults=True):
    """A slow hop."""

    hop: list[int]
    times: float | None = None
    """As long as it should take."""
    bytes_per_s: float | None = None
    cost_per_batch_s: float | None = None


class FindBrief(BriefAnswer, frozen=True, kw_only=True, omit_defaults=True):
    """`find` in brief."""

    schema: str = "debubble.find-brief/1"
    run: BriefRun
    numbers: BriefNumbers
    named: list[BriefFinding] = msgspec.field(default_factory=list)
    causes: list[BriefCause] = msgspec.field(default_factory=list)
    slow_hops: list[BriefHop] = msgspec.field(default_factory=list)


class NoPipelineBrief(BriefAnswer, frozen=True, kw_only=True, omit_defaults=True):
    """`find` in brief, where there is no pipeline."""

    schema: str = "debubble.find-no-pipeline-brief/1"
    capture: str
    ranks: int


class InspectBrief(BriefAnswer, frozen=True, kw_only=True, omit_defaults=True):
    """`inspect` in brief."""

    schema: str = "debubble.inspect-brief/1"
    capture: str
    captures: int
    other_captures: list[str] = msgspec.field(default_factory=list)
    """The first few names that `--capture` takes."""
    ranks: str
    world_size: int | None = None
    missing_ranks: str | None = None
    steps: int
    events: int
    kernels: int
    devices: list[str] = msgspec.field(default_factory=list)
    op_tables: int = 0


class LinksBrief(BriefAnswer, frozen=True, kw_only=True, omit_defaults=True):
    """`links` in brief, of traces, logs or a test of its own."""

    schema: str = "debubble.links-brief/1"
    source: str
    hops: int
    batch_latency_s: float | None = None
    slow_cost_per_batch_s: float | None = None
    slow_hops: list[BriefHop] = msgspec.field(default_factory=list)
    unknown_hops: int = 0
    commands: list[str] = msgspec.field(default_factory=list)


class BriefOption(Part, frozen=True, kw_only=True, omit_defaults=True):
    """One thing to do; `interval` is of the gain, four of five runs lie in it."""

    words: str
    change: ChangePart
    advice: str
    recommended: bool
    throughput_gain_fraction: float
    interval: list[float] | None = None
    batch_latency_s: float
    fits_memory: bool | None = None
    changes_training: bool = False


class PlanBrief(BriefAnswer, frozen=True, kw_only=True, omit_defaults=True):
    """`plan` in brief: the first options, those that leave training as it is before others."""

    schema: str = "debubble.plan-brief/1"
    schedule: str
    split: list[int] | None = None
    microbatches: int
    numbers: BriefNumbers
    lower_bound_s: float | None = None
    options: list[BriefOption] = msgspec.field(default_factory=list)
    options_in_all: int = 0
    refused: dict[str, str] = msgspec.field(default_factory=dict)
    """What cannot run or does not fit, and why."""
    emit_for: str | None = None
    """Whom the best option can be written for: `--emit`."""
    emitted: EmitPart | None = None


class BriefServerOption(Part, frozen=True, kw_only=True, omit_defaults=True):
    """One change of a server; its gain is of tokens out a second."""

    what: str
    verdict: str
    gain_fraction: float
    interval: list[float]
    tokens_out_per_s: float
    ttft_s: float | None = None
    tpot_s: float
    refused: str = ""


class ServerPlanBrief(BriefAnswer, frozen=True, kw_only=True, omit_defaults=True):
    """`plan` or `simulate` of a server in brief."""

    schema: str = "debubble.plan-server-brief/1"
    setting: SettingPart
    as_is: ServedPart
    misfit_fraction: float
    options: list[BriefServerOption] = msgspec.field(default_factory=list)
    options_in_all: int = 0
    recommended: int | None = None
    emitted: EmitPart | None = None


class SimulateBrief(BriefAnswer, frozen=True, kw_only=True, omit_defaults=True):
    """`simulate` in brief; without a measured run there is nothing that it is held against."""

    schema: str = "debubble.simulate-brief/1"
    schedule: str
    ranks: int
    microbatches: int
    change: ChangePart | None = None
    numbers: BriefNumbers
    measured: BriefNumbers | None = None
    throughput_gain_fraction: float | None = None
    batch_latency_interval_s: list[float] | None = None
    """Four of five runs should lie in it."""
    fits_memory: bool | None = None


class BriefDelta(Part, frozen=True, kw_only=True, omit_defaults=True):
    """What a number did: a share of itself; of the bubble, in points."""

    before: float | None = None
    after: float | None = None
    change: float | None = None
    interval: list[float | None] | None = None


class CompareBrief(BriefAnswer, frozen=True, kw_only=True, omit_defaults=True):
    """`compare` in brief. `verdict` is the word, as in the whole answer."""

    schema: str = "debubble.compare-brief/1"
    sentence: str
    confidence: str
    decided_by: str
    delta: dict[str, BriefDelta]
    setting: list[DifferencePart] = msgspec.field(default_factory=list)
    unsafe_ranks: list[int] = msgspec.field(default_factory=list)
    samples_needed: int | None = None
    predicted: PredictedPart | None = None


def brief_of(answer: Answer, following: Sequence[str] = ()) -> Answer:
    """Return the brief form of an answer; one that has none is returned as it is."""
    shorten = BRIEFS.get(type(answer))
    return answer if shorten is None else shorten(answer, list(following))


def _find(answer: FindAnswer, following: list[str]) -> FindBrief:
    run, numbers = answer.run, answer.numbers
    account, saved = answer.ledger, {row.cause: row.saved_fraction for row in answer.savings or ()}
    worst = {culprit.cause: culprit for culprit in account.culprits} if account else {}
    shares = {} if account is None else account.shares
    waits = sorted(
        ((cause, share) for cause, share in shares.items() if cause != "compute" and share > 0),
        key=lambda pair: -pair[1],
    )
    sentences = [named.sentence for named in answer.named]
    more = [
        part.sentence for part in (answer.bottleneck, answer.replicas) if part and part.sentence
    ]
    return FindBrief(
        **_frame(answer, following, [*more, *sentences]),
        run=BriefRun.of(
            run,
            pipelines=len(run.pipelines),
            framework=run.framework.name,
            steps=len(run.steps),
            missing_ranks=_ranks(run.missing_ranks),
        ),
        numbers=BriefNumbers.of(
            numbers,
            theory_bubble_fraction=answer.theory.bubble_fraction
            if answer.theory.bubble_fraction is not None
            else answer.theory.schedule_bubble_fraction,
            peak_memory_bytes=_most(numbers.peak_memory_bytes),
            apparent_fraction=answer.utilisation.apparent_fraction,
            useful_fraction=answer.utilisation.useful_fraction,
        ),
        named=[BriefFinding.of(named) for named in answer.named[:_SENTENCES]],
        causes=[
            BriefCause(
                cause=cause,
                share_fraction=share,
                saved_fraction=saved.get(cause),
                waited_for=BriefCulprit.of(worst[cause]) if cause in worst else None,
            )
            for cause, share in waits[:_CAUSES]
        ],
        slow_hops=_slow_hops(answer.hops),
    )


def _no_pipeline(answer: NoPipelineAnswer, following: list[str]) -> NoPipelineBrief:
    return NoPipelineBrief(
        **_frame(answer, following),
        capture=answer.run.capture,
        ranks=len(answer.utilisation.ranks),
    )


def _inspect(answer: InspectAnswer, following: list[str]) -> InspectBrief:
    others = [capture.name for capture in answer.captures if capture.name != answer.capture]
    return InspectBrief(
        **_frame(answer, following),
        capture=answer.capture,
        captures=len(answer.captures),
        other_captures=[_clip(name) for name in others[-_FEW:]],
        ranks=_ranks(rank.rank for rank in answer.ranks) or "",
        world_size=answer.world_size,
        missing_ranks=_ranks(answer.missing_ranks),
        steps=max((len(rank.steps) for rank in answer.ranks), default=0),
        events=sum(rank.events for rank in answer.ranks),
        kernels=sum(rank.kernels for rank in answer.ranks),
        devices=sorted({rank.device for rank in answer.ranks if rank.device})[:_FEW],
        op_tables=len(answer.op_tables),
    )


def _links(answer: LinksAnswer | LogsAnswer | LiveAnswer, following: list[str]) -> LinksBrief:
    of_traces = answer if isinstance(answer, LinksAnswer) else None
    return LinksBrief(
        **_frame(answer, following, of_traces.findings if of_traces else []),
        source=answer.source,
        hops=len(answer.hops),
        batch_latency_s=answer.batch_latency_s,
        slow_cost_per_batch_s=of_traces.slow_cost_per_batch_s if of_traces else None,
        slow_hops=_slow_hops(answer.hops),
        unknown_hops=sum(hop.verdict == "unknown" for hop in answer.hops),
        commands=answer.commands[:_FEW],
    )


def _plan(answer: PlanAnswer, following: list[str]) -> PlanBrief:
    base = answer.baseline
    first = sorted(answer.options, key=lambda option: (option.changes_training, _place(option)))
    kept = first[:_OPTIONS]
    larger = next((option for option in first if option.changes_training), None)
    if larger is not None and larger not in kept:
        kept[-1] = larger
    return PlanBrief(
        **_frame(answer, following, answer.findings),
        schedule=base.schedule,
        split=base.split,
        microbatches=base.microbatches,
        numbers=BriefNumbers(
            bubble_fraction=base.numbers.bubble_fraction,
            batch_latency_s=base.numbers.batch_latency_s,
            microbatches_per_s=base.numbers.microbatches_per_s,
            peak_memory_bytes=_most(base.numbers.peak_memory_bytes or []),
        ),
        lower_bound_s=answer.lower_bound_s,
        options=[
            BriefOption.of(
                option,
                interval=option.interval.throughput_gain_fraction,
                batch_latency_s=option.numbers.batch_latency_s,
            )
            for option in kept
        ],
        options_in_all=len(answer.options),
        refused={_clip(option.words): _clip(option.reason) for option in answer.refused[:_FEW]},
        emit_for=answer.tellable_framework,
        emitted=answer.emitted,
    )


def _server_plan(answer: ServerPlanAnswer, following: list[str]) -> ServerPlanBrief:
    return ServerPlanBrief(
        **_frame(answer, following),
        setting=answer.setting,
        as_is=answer.as_is,
        misfit_fraction=answer.misfit_fraction,
        options=[
            BriefServerOption(
                what=option.what,
                verdict=option.verdict,
                gain_fraction=option.gain_fraction,
                interval=[option.low_fraction, option.high_fraction],
                tokens_out_per_s=option.served.tokens_out_per_s,
                ttft_s=option.served.ttft_s,
                tpot_s=option.served.tpot_s,
                refused=_clip(option.refused),
            )
            for option in answer.options[:_OPTIONS]
        ],
        options_in_all=len(answer.options),
        recommended=answer.recommended,
        emitted=answer.emitted,
    )


def _simulate(answer: SimulateAnswer, following: list[str]) -> SimulateBrief:
    given, numbers, measured = answer.given, answer.numbers, answer.measured
    return SimulateBrief(
        **_frame(answer, following, answer.findings),
        schedule=given.schedule,
        ranks=given.ranks,
        microbatches=given.microbatches,
        change=given.change,
        numbers=BriefNumbers(
            bubble_fraction=numbers.bubble_fraction,
            theory_bubble_fraction=answer.theory.bubble_fraction,
            batch_latency_s=numbers.batch_latency_s,
            step_time_s=numbers.step_time_s,
            microbatches_per_s=numbers.microbatches_per_s,
            tokens_per_s=numbers.tokens_per_s,
            peak_memory_bytes=_most(numbers.peak_memory_bytes or []),
        ),
        measured=None
        if measured is None
        else BriefNumbers(
            bubble_fraction=measured.bubble_fraction,
            batch_latency_s=measured.batch_latency_s,
            microbatches_per_s=measured.microbatches_per_s,
            peak_memory_bytes=_most(measured.peak_memory_bytes),
        ),
        throughput_gain_fraction=answer.throughput_gain_fraction,
        batch_latency_interval_s=answer.interval.batch_latency_s if answer.interval else None,
        fits_memory=answer.fits_memory,
    )


def _compare(answer: CompareAnswer, following: list[str]) -> CompareBrief:
    return CompareBrief(
        **_frame(answer, following, answer.reasons),
        sentence=_clip(answer.sentence),
        confidence=answer.confidence,
        decided_by=answer.decided_by,
        delta={
            name: BriefDelta(
                before=delta.before.median if delta.before else None,
                after=delta.after.median if delta.after else None,
                change=delta.change,
                interval=delta.ci,
            )
            for name, delta in answer.delta.items()
            if delta.before or delta.after
        },
        setting=answer.setting[:_OPTIONS],
        unsafe_ranks=[row.rank for row in answer.memory if row.unsafe][:_OPTIONS],
        samples_needed=answer.samples_needed,
        predicted=answer.predicted,
    )


BRIEFS: Mapping[type[Answer], Callable[[Any, list[str]], BriefAnswer]] = {
    FindAnswer: _find,
    NoPipelineAnswer: _no_pipeline,
    InspectAnswer: _inspect,
    LinksAnswer: _links,
    LogsAnswer: _links,
    LiveAnswer: _links,
    PlanAnswer: _plan,
    ServerPlanAnswer: _server_plan,
    ServerSimulateAnswer: _server_plan,
    SimulateAnswer: _simulate,
    CompareAnswer: _compare,
}


def _frame(answer: Any, following: list[str], findings: Sequence[str] = ()) -> dict[str, Any]:
    """Return what every brief answer begins with."""
    return {
        "basis": getattr(answer, "basis", None),
        "verdict": _clip(answer.verdict),
        "findings": [_clip(text) for text in findings[:_SENTENCES]],
        "next": following,
        "warnings": _warnings(answer.warnings),
    }


def _slow_hops(hops: Sequence[HopPart | TestedHop]) -> list[BriefHop]:
    slow = [
        BriefHop(
            hop=[hop.from_rank, hop.to_rank],
            times=hop.times,
            bytes_per_s=hop.bytes_per_s,
            cost_per_batch_s=hop.cost_per_batch_s,
        )
        for hop in hops
        if hop.verdict == "slow"
    ]
    return sorted(slow, key=lambda hop: -(hop.cost_per_batch_s or 0.0))[:_FEW]


def _place(option: OptionPart) -> float:
    """Put what is recommended before what is not, each by its gain."""
    return -option.throughput_gain_fraction - (10.0 if option.recommended else 0.0)


def _warnings(warnings: Sequence[AnswerWarning]) -> list[BriefWarning]:
    """Return one warning a code, the first of it; all codes are named."""
    first: dict[str, AnswerWarning] = {}
    for warning in warnings:
        first.setdefault(str(warning.code), warning)
    counts = Counter(str(warning.code) for warning in warnings)
    return [
        BriefWarning(
            code=code,
            message=_clip(str(warning)) if place < _FEW else "",
            n=counts[code],
        )
        for place, (code, warning) in enumerate(first.items())
    ]


def _ranks(ranks: Any) -> str | None:
    found = list(ranks)
    return show_members(found) if found else None


def _most(values: Sequence[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)


def _clip(text: str) -> str:
    return text if len(text) <= _LETTERS else text[: _LETTERS - 1] + "…"


def _rounded(data: Any) -> Any:
    if isinstance(data, float):
        return float(f"{data:.{_DIGITS}g}")
    if isinstance(data, dict):
        return {name: _rounded(value) for name, value in data.items()}
    return [_rounded(value) for value in data] if isinstance(data, list) else data
