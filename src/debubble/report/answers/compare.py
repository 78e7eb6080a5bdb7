"""Measurements in → what `debubble compare` and `debubble history` answer of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec

from debubble.errors import Gap
from debubble.measure.compare import (
    CauseChange,
    Comparison,
    Confidence,
    Delta,
    Difference,
    MemoryChange,
    Verdict,
)
from debubble.measure.measurement import Measurement, Record, middle
from debubble.measure.prediction import PredictionCheck
from debubble.measure.statistics import least_samples
from debubble.report.answers.base import Answer, AnswerWarning, Part, list_warnings
from debubble.timeline.job import Basis
from debubble.units import (
    show_between,
    show_bytes,
    show_change,
    show_number,
    show_seconds,
    show_share,
)

SCHEMA = "debubble.compare/1"
LABELS = {
    "bubble": "bubble",
    "batch_latency": "batch latency",
    "step_time": "step time",
    "throughput": "throughput",
    "profiled_batch_latency": "batch latency, profiled",
    "profiled_step_time": "step time, profiled",
    "ttft": "time to first token",
    "tpot": "time per token",
    "request_latency": "request latency",
}


class SideNumbers(Part, frozen=True, kw_only=True):
    """The numbers of one side: medians."""

    bubble_fraction: float | None
    batch_latency_s: float | None
    step_time_s: float | None
    profiled_batch_latency_s: float | None
    """Beside one that is unprofiled."""
    peak_memory_bytes: list[int | None]
    microbatches_per_s: float | None
    tokens_per_s: float | None
    ttft_s: float | None = None
    tpot_s: float | None = None
    request_latency_s: float | None = None


class SidePart(Part, frozen=True, kw_only=True):
    """One side: its numbers, their count, the setting."""

    basis: str
    """Of its batch latency, step time and throughput: profiled or unprofiled."""
    numbers: SideNumbers
    n: int
    captures: int
    kind: str
    ranks: list[int]
    microbatches: int | None
    schedule: str | None
    split: list[int] | None
    context_lengths_up_to: list[int] | None
    devices: Annotated[list[str], "environment.devices"]
    versions: dict[str, str]


class CompareAnswer(Answer, frozen=True, kw_only=True):
    """The run after a change against the one before."""

    schema: str = SCHEMA
    basis: str
    """Of all times but those that are called otherwise: profiled, unprofiled, or mixed."""
    before: SidePart
    after: SidePart
    delta: Annotated[dict[str, Delta], "deltas"]
    causes: list[CauseChange]
    """Where the time went before and after; empty where a side has no account."""
    memory: tuple[MemoryChange, ...]
    setting: tuple[Difference, ...]
    environment: tuple[Difference, ...]
    verdict: str
    confidence: str
    decided_by: str
    threshold_fraction: Annotated[float, "threshold"]
    samples_needed: Annotated[int | None, "needed"]
    detectable_fraction: Annotated[float | None, "detectable"]
    throughput_unit: str
    predicted: PredictionCheck | None
    reasons: list[str]
    notes: list[str]
    sentence: str
    warnings: list[AnswerWarning]


def answer_compare(
    comparison: Comparison, gaps: Sequence[Gap] = (), causes: Sequence[CauseChange] = ()
) -> CompareAnswer:
    """Say what changed, and how sure that is; `causes` where the accounts are at hand."""
    return CompareAnswer.of(
        comparison,
        basis=comparison.bases[0] if comparison.bases[0] == comparison.bases[1] else "mixed",
        before=answer_side(comparison.before, comparison.bases[0]),
        after=answer_side(comparison.after, comparison.bases[1]),
        causes=list(causes),
        sentence=say_comparison(comparison),
        warnings=list_warnings(gaps),
    )


def answer_side(measurement: Measurement, basis: Basis | None = None) -> SidePart:
    """Return a measurement: medians, their count, the setting; on its own basis or another's."""
    basis, served = basis or measurement.basis, measurement.served
    batches, steps = measurement.batch_latencies_s(basis), measurement.step_times_s(basis)
    rate = middle(measurement.rates_per_s(steps or batches))
    profiled = () if basis == measurement.traced else measurement.batch_latencies_s(Basis.PROFILED)
    tokens_rate = rate * measurement.tokens if rate and measurement.tokens else None
    versions: dict[str, list[str]] = {}
    for name, value in measurement.environment.versions:
        versions.setdefault(name, []).append(value)
    return SidePart.of(
        measurement,
        basis=basis,
        numbers=SideNumbers(
            bubble_fraction=middle(measurement.bubble_fractions),
            batch_latency_s=middle(batches),
            step_time_s=middle(steps),
            profiled_batch_latency_s=middle(profiled),
            peak_memory_bytes=[rank.peak_bytes for rank in measurement.memory],
            microbatches_per_s=None if served else rate,
            tokens_per_s=rate if served else tokens_rate,
            ttft_s=middle(served.ttft_s) if served else None,
            tpot_s=middle(served.tpot_s) if served else None,
            request_latency_s=middle(served.latency_s) if served else None,
        ),
        n=len(served.latency_s) if served else len(measurement.samples),
        captures=served.runs if served else len(measurement.captures),
        context_lengths_up_to=sorted(measurement.contexts) or None,
        # What differs from rank to rank with all its values.
        versions={name: ", ".join(values) for name, values in versions.items()},
    )


def say_comparison(comparison: Comparison) -> str:
    """Say the verdict in a sentence."""
    if comparison.verdict is Verdict.NOT_COMPARABLE:
        return f"Not comparable: {'; '.join(comparison.reasons)}."
    if comparison.verdict is Verdict.UNSAFE_MEMORY:
        return f"Unsafe: {_say_memory(comparison.memory)}; {_say_speed(comparison)}."
    word = {
        Verdict.BETTER: "Better",
        Verdict.WORSE: "Worse",
        Verdict.NO_CLEAR_CHANGE: "No clear change",
    }[comparison.verdict]
    because = f"; {comparison.reasons[0]}" if comparison.reasons else ""
    if comparison.confidence is Confidence.TESTED:
        return f"{word}: {_say_speed(comparison)}{because}."
    first, second = comparison.deciding.before, comparison.deciding.after
    counts = f"{first.n if first else 0} and {second.n if second else 0}"
    needed = comparison.needed or least_samples()
    few = f"{word} (indicative, {counts} steps)"
    if comparison.verdict is Verdict.NO_CLEAR_CHANGE:
        few = f"Too few steps to tell ({counts})"
    return f"{few}: {_say_speed(comparison)}{because}; a test needs about {needed} steps a side."


def _say_speed(comparison: Comparison) -> str:
    name, delta = comparison.decided_by, comparison.deciding
    if delta.change is None or delta.before is None or delta.after is None:
        return f"{LABELS[name]} is unknown"
    sentence = f"{LABELS[name]} {show_delta(name, delta.change)}"
    if delta.ci is not None:
        sentence += f" ({show_interval(name, delta.ci)})"
    first, second = (show_figure(name, side.median) for side in (delta.before, delta.after))
    if name == "throughput":
        return f"{sentence}, {first} to {second} {comparison.throughput_unit} per second"
    return f"{sentence}, {first} to {second}"


def _say_memory(changes: Sequence[MemoryChange]) -> str:
    """Say which rank has least memory left."""
    tight = [change for change in changes if change.unsafe]
    worst = min(tight, key=lambda change: change.headroom_bytes or 0)
    limit, left = show_bytes(worst.limit_bytes or 0), worst.headroom_bytes or 0
    if left < 0:
        return f"rank {worst.rank} is {show_bytes(-left)} over its {limit}"
    return f"rank {worst.rank} has {show_bytes(left)} left of {limit}"


def label_of(comparison: CompareAnswer, name: str) -> str:
    """Return what a number is called beside its figures: throughput is named by its unit."""
    return f"{comparison.throughput_unit}/s" if name == "throughput" else LABELS[name]


def show_figure(name: str, value: float | None) -> str:
    """Write one of the numbers in its unit."""
    if value is None:
        return "–"
    if name == "bubble":
        return show_share(value)
    return show_number(value) if name == "throughput" else show_seconds(value)


def show_delta(name: str, change: float | None) -> str:
    """Write what a number did."""
    if change is None:
        return "–"
    shown = show_change(change)
    return shown.replace("%", "points") if name == "bubble" else shown


def show_interval(name: str, interval: tuple[float, float] | None) -> str:
    """Write where the change lies."""
    return "" if interval is None else show_between(*(show_delta(name, end) for end in interval))


class RecordPart(SidePart, frozen=True, kw_only=True):
    """One measurement, and what it is kept as."""

    number: int
    name: str
    created: str
    tags: dict[str, str]
    measurement: Measurement | msgspec.UnsetType = msgspec.UNSET
    """Every sample; left out of a list."""


class HistoryAnswer(Answer, frozen=True, kw_only=True):
    """What `debubble history` says."""

    schema: str = "debubble.history/1"
    records: list[RecordPart]
    warnings: list[AnswerWarning]


def answer_history(
    records: Sequence[Record], gaps: Sequence[Gap] = (), *, whole: bool = False
) -> HistoryAnswer:
    """List records, the oldest first; whole: with every sample."""
    parts = []
    for record in records:
        side = answer_side(record.measurement)
        parts.append(
            RecordPart(
                **msgspec.structs.asdict(side),
                number=record.number,
                name=record.name,
                created=record.created,
                tags=dict(record.tags),
                measurement=record.measurement if whole else msgspec.UNSET,
            )
        )
    return HistoryAnswer(records=parts, warnings=list_warnings(gaps))
