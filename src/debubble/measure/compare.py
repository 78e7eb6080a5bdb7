"""Measurements before and after in → one verdict.

Only steps of the same context lengths are held against each other. Then: can the two be compared
at all, is the memory safe, and which way did the number go that decides? It is batch latency, or
throughput where the batches differ. Of a server under a load it is throughput, or what a request
took where requests came at a rate.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from statistics import fmean
from typing import TypeAlias, TypeVar

from debubble.ledger.causes import CAUSES, Cause
from debubble.measure.measurement import Measurement, ServerSamples
from debubble.measure.prediction import (
    SAME_BATCH,
    PredictionCheck,
    batches_of,
    check_prediction,
    find_prediction,
)
from debubble.measure.statistics import (
    ALPHA,
    RankTest,
    Spread,
    can_be_tested,
    detectable_change,
    difference_interval,
    few_differ,
    moved_ratio,
    rank_test,
    ratio_interval,
    samples_needed,
    spread_of,
)
from debubble.timeline.job import Basis
from debubble.timeline.model import FEWEST_STEPS
from debubble.units import counted


class Verdict(StrEnum):
    """What came of a change."""

    BETTER = "better"
    WORSE = "worse"
    NO_CLEAR_CHANGE = "no_clear_change"
    NOT_COMPARABLE = "not_comparable"
    UNSAFE_MEMORY = "unsafe_memory"


class Confidence(StrEnum):
    """What the verdict rests on."""

    TESTED = "tested"
    INDICATIVE = "indicative"


class Direction(StrEnum):
    """What one number did."""

    BETTER = "better"
    WORSE = "worse"
    UNCLEAR = "unclear"


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """What a number did: a share of itself; of the bubble, in points."""

    before: Spread | None
    after: Spread | None
    change: float | None
    """After over before, minus 1; of a bubble, after minus before."""
    ci: tuple[float, float] | None
    """Where the change lies, at 95 %."""
    p: float | None
    direction: Direction
    tested: bool
    """False: too few samples for any test; the direction is an indication."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryChange:
    """The peak of one rank before and after, and what is left."""

    rank: int
    before_bytes: int | None
    after_bytes: int | None
    limit_bytes: int | None
    headroom_bytes: int | None
    """What is left after the change."""
    unsafe: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Something besides the numbers that is not the same."""

    what: str
    before: str
    after: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CauseChange:
    """A cause of the ledger, as shares of the batch, or of the time of a stream."""

    cause: str
    before_fraction: float
    after_fraction: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two measurements, and what to make of them."""

    before: Measurement
    after: Measurement
    verdict: Verdict
    confidence: Confidence
    decided_by: str
    """The number that decides: batch_latency, or throughput where batches differ."""
    bases: tuple[Basis, Basis]
    """Of the times before and after: the same, unless a side has none on the other's."""
    deltas: dict[str, Delta]
    """What each number did, by its name."""
    memory: tuple[MemoryChange, ...]
    setting: tuple[Difference, ...]
    """What was changed: schedule, split, microbatches."""
    environment: tuple[Difference, ...]
    """What changed beside it: devices, versions, the profiler's own settings."""
    reasons: tuple[str, ...]
    """Why they cannot be compared, or why the verdict is not what one number says."""
    notes: tuple[str, ...]
    needed: int | None
    """Samples a side that would show such a change; None where that cannot be told."""
    detectable: float | None
    """The smallest change that these samples would show."""
    threshold: float
    predicted: PredictionCheck | None
    """What a plan had predicted of it; None where nothing is kept of this change."""
    throughput_unit: str
    """tokens, or microbatches (of the size they have before)."""

    @property
    def deciding(self) -> Delta:
        """What the number that decides did."""
        return self.deltas[self.decided_by]


_Sample = TypeVar("_Sample")
_Samples: TypeAlias = dict[str, tuple[float, ...]]
"""Samples by name."""

# Runs of the same job on another day differ by as much; smaller gains are not worth a change.
DEFAULT_THRESHOLD = 0.02
# Fragments and other processes take their part: closer to the limit, the next long batch fails.
SAFE_SHARE = 0.05
# Of a mix of lengths some tens of requests have another mean each time: by up to 15 %.
_SAME_LENGTHS = 0.2
# What is held against each other by its difference, for it may be zero.
_SHARES = frozenset({"bubble"})
_LARGER_IS_BETTER = frozenset({"throughput"})
_VERDICTS = {
    Direction.BETTER: Verdict.BETTER,
    Direction.WORSE: Verdict.WORSE,
    Direction.UNCLEAR: Verdict.NO_CLEAR_CHANGE,
}
_OF_WINDOWS = "throughput without the time between steps: too few consecutive steps"


def compare(
    before: Measurement,
    after: Measurement,
    *,
    threshold: float = DEFAULT_THRESHOLD,
    limit_bytes: int | None = None,
    change: str | None = None,
) -> Comparison:
    """Hold two runs against each other: comparable at all, safe, and then by speed.

    And against what was predicted of the change: the one of these words, else the one that shows.
    """
    wanted, (before, after) = (before, after), match_contexts(before, after)
    bases, impossible = shared_basis(before, after), why_not(*wanted)
    served = before.served is not None and after.served is not None
    first, second = (
        _served_samples(side.served) if served and side.served else _samples_of(side, basis)
        for side, basis in zip((before, after), bases, strict=True)
    )
    if before.served is not None and after.served is not None:
        decided_by = "request_latency" if before.served.open_loop else "throughput"
        impossible = (*impossible, *_other_load(before.served, after.served))
        notes = tuple(_served_notes(before.served, after.served))
    else:
        sizes = batches_of(before, after)
        same_batch = sizes is None or abs(sizes[1] / sizes[0] - 1) <= SAME_BATCH
        by_latency = same_batch and before.kind != "stream"
        decided_by = "batch_latency" if by_latency else "throughput"
        first["throughput"], second["throughput"], rate_note = _rates(
            (before, after), (first, second)
        )
        notes = tuple(_notes(wanted, (before, after), same_batch=same_batch, rate_note=rate_note))
    sides = {name: (first[name], second[name]) for name in first if name in second}
    deltas = {name: _hold(name, *pair, threshold) for name, pair in sides.items()}
    decider, memory = deltas[decided_by], _memory(before, after, limit_bytes)
    if decider.change is None:
        impossible = (*impossible, f"{decided_by.replace('_', ' ')} is not known on both sides")
    verdict, because = _verdict(deltas, decider)
    if any(rank.unsafe for rank in memory):
        verdict = Verdict.UNSAFE_MEMORY
    if impossible:
        verdict = Verdict.NOT_COMPARABLE
    kept = find_prediction(before.predicted, before, after, change)
    counts_tokens = before.served is not None or (before.tokens and after.tokens)
    return Comparison(
        before=before,
        after=after,
        verdict=verdict,
        confidence=Confidence.TESTED if decider.tested else Confidence.INDICATIVE,
        decided_by=decided_by,
        bases=bases,
        deltas=deltas,
        memory=memory,
        setting=setting_changes(before, after),
        environment=environment_changes(before, after),
        reasons=impossible or because,
        notes=notes,
        needed=samples_needed(*sides[decided_by], max(threshold, abs(decider.change or 0.0))),
        detectable=detectable_change(*sides[decided_by]),
        threshold=threshold,
        predicted=check_prediction(kept.on(bases[1], before), before, after) if kept else None,
        throughput_unit="tokens" if counts_tokens else "microbatches",
    )


def _samples_of(side: Measurement, basis: Basis) -> _Samples:
    """Return the samples of each number of one side; throughput depends on the other, too."""
    samples: _Samples = {
        "bubble": side.bubble_fractions,
        "batch_latency": side.batch_latencies_s(basis),
        "step_time": side.step_times_s(basis),
        "throughput": (),
    }
    if basis != side.traced == Basis.PROFILED:
        samples["profiled_batch_latency"] = side.batch_latencies_s(side.traced)
        samples["profiled_step_time"] = side.step_times_s(side.traced)
    return samples


def _served_samples(served: ServerSamples) -> _Samples:
    """Return what users of one side saw."""
    return {
        "throughput": served.out_per_s,
        "ttft": served.ttft_s,
        "tpot": served.tpot_s,
        "request_latency": served.latency_s,
    }


def _other_load(first: ServerSamples, second: ServerSamples) -> Iterator[str]:
    """Say how the loads of two sides differ."""
    if first.load != second.load:
        yield f"{first.load} before, {second.load} after"
    for what, was, now in (
        ("prompts", first.prompt_tokens, second.prompt_tokens),
        ("answers", first.output_tokens, second.output_tokens),
    ):
        if was and now and max(was, now) > (1 + _SAME_LENGTHS) * min(was, now):
            yield f"{what} of {was:.0f} tokens before, of {now:.0f} after"


def _served_notes(first: ServerSamples, second: ServerSamples) -> Iterator[str]:
    for name, side in (("before", first), ("after", second)):
        if side.failed:
            yield f"{counted(side.failed, 'request')} failed {name}"
    if 1 in (first.runs, second.runs):
        yield "one run per side does not show run-to-run variation: join several with commas"


def _verdict(deltas: Mapping[str, Delta], decider: Delta) -> tuple[Verdict, tuple[str, ...]]:
    """Take the number that decides; a batch that is quicker while less gets done is no win."""
    went = {name: delta.direction for name, delta in deltas.items()}
    better, worse = Direction.BETTER, Direction.WORSE
    direction, because = decider.direction, []
    if direction is better and "bubble" in went and went["throughput"] is worse:
        direction = worse
        because.append("a batch is faster, but throughput fell: more time passes between steps")
    if direction is worse and went.get("bubble") is better:
        because.append("the bubble is smaller, but throughput fell: passes take longer")
    if direction is better and went.get("bubble") is worse:
        because.append("the bubble is larger, but throughput rose: passes take less time")
    for name, what in (("ttft", "the first token"), ("tpot", "each further token")):
        if direction is better and went.get(name) is worse:
            because.append(f"throughput rose, but users wait longer for {what}")
    return _VERDICTS[direction], tuple(because)


def shared_basis(before: Measurement, after: Measurement) -> tuple[Basis, Basis]:
    """Return the basis on which each of two runs is held against the other: the same, if it can be.

    Unprofiled where both have such times, else as their traces are.
    """
    if before.basis == after.basis:
        return before.basis, after.basis
    if Basis.UNPROFILED in {before.traced, after.traced}:
        return before.basis, after.basis
    return before.traced, after.traced


def _rates(
    sides: tuple[Measurement, Measurement], samples: tuple[_Samples, _Samples]
) -> tuple[tuple[float, ...], tuple[float, ...], str]:
    """Return work per second, in the same unit of work on both sides, and what it leaves out.

    By steps, from one to the next, where both sides have two; else by the windows.
    """
    before, after = sides
    by_steps = all(len(side["step_time"]) >= FEWEST_STEPS for side in samples)
    units = (1.0, 1.0)
    if before.tokens and after.tokens:
        units = (float(before.tokens), float(after.tokens))
    elif before.message_bytes and after.message_bytes:
        units = (1.0, after.message_bytes / before.message_bytes)
    first, second = (
        tuple(
            unit * rate
            for rate in side.rates_per_s(known["step_time" if by_steps else "batch_latency"])
        )
        for unit, side, known in zip(units, sides, samples, strict=True)
    )
    return first, second, "" if by_steps or before.kind == "stream" else _OF_WINDOWS


def _hold(name: str, before: Sequence[float], after: Sequence[float], threshold: float) -> Delta:
    """Hold two sides against each other by the ratio of their medians.

    A share, which may be nothing, by the difference.
    """
    first, second = spread_of(before), spread_of(after)
    change = interval = None
    if name in _SHARES:
        change = second.median - first.median if first and second else None
        interval = difference_interval(before, after)
    elif first and second and first.median:
        change = second.median / first.median - 1
        ratios = ratio_interval(before, after)
        interval = (ratios[0] - 1, ratios[1] - 1) if ratios else None
    test = rank_test(before, after)
    moves = test is not None and test.p <= ALPHA and name not in _SHARES
    if moves and interval is not None and interval[0] < 0 < interval[1]:
        # Of two kinds of samples, quick and slow, either may hold the middle: the interval of
        # medians then says nothing, and what the test found is how far all have moved.
        moved = moved_ratio(before, after)
        if moved is not None:
            change, interval = moved[0] - 1, (moved[1] - 1, moved[2] - 1)
    direction = Direction.UNCLEAR
    if change is not None and abs(change) >= threshold and _is_clear(before, after, change, test):
        better = (change > 0) is (name in _LARGER_IS_BETTER)
        direction = Direction.BETTER if better else Direction.WORSE
    return Delta(
        before=first,
        after=second,
        change=change,
        ci=interval,
        p=test.p if test else None,
        direction=direction,
        tested=can_be_tested(len(before), len(after)),
    )


def _is_clear(
    before: Sequence[float], after: Sequence[float], change: float, test: RankTest | None
) -> bool:
    """Tell a change from noise: by the rank test, or, of a few samples, by their distance."""
    if not can_be_tested(len(before), len(after)):
        return bool(few_differ(before, after))
    if test is None or test.p > ALPHA:
        return False
    falls = test.u > len(before) * len(after) / 2
    return falls is (change < 0)


def _memory(
    before: Measurement, after: Measurement, limit_bytes: int | None
) -> tuple[MemoryChange, ...]:
    """Hold each rank's peak against its device: over the limit, or grown to where little is left.

    Ranks are matched by their place in the pipeline.
    """
    changes = []
    for number, mine in enumerate(after.memory):
        was = before.memory[number].peak_bytes if number < len(before.memory) else None
        limit = limit_bytes if limit_bytes is not None else mine.limit_bytes
        left, unsafe = None, False
        if mine.peak_bytes is not None and limit is not None:
            left = limit - mine.peak_bytes
            grew = was is None or mine.peak_bytes > was
            unsafe = left < 0 or (left < SAFE_SHARE * limit and grew)
        changes.append(
            MemoryChange(
                rank=mine.rank,
                before_bytes=was,
                after_bytes=mine.peak_bytes,
                limit_bytes=limit,
                headroom_bytes=left,
                unsafe=unsafe,
            )
        )
    return tuple(changes)


def _notes(
    wanted: tuple[Measurement, Measurement],
    used: tuple[Measurement, Measurement],
    *,
    same_batch: bool,
    rate_note: str,
) -> Iterator[str]:
    """Say what was left out, and what the numbers rest on."""
    before, after = used
    counts = {"before": before.repeated, "after": after.repeated}
    twice = " and ".join(f"{count} {side}" for side, count in counts.items() if count)
    if twice:
        yield f"the same capture was given more than once: {twice} left out"
    first, second = (len(w.samples) - len(u.samples) for w, u in zip(wanted, used, strict=True))
    if first or second:
        steps = f"{counted(first, 'step')} before and {counted(second, 'step')} after"
        yield f"context lengths matched: {steps} without a counterpart left out"
    if not same_batch:
        yield "batch sizes differ: throughput decides"
    if rate_note:
        yield rate_note
    if before.basis != after.basis:
        first_basis, second_basis = shared_basis(before, after)
        one_of = "before" if before.basis is Basis.UNPROFILED else "after"
        yield (
            f"only {one_of} has unprofiled times: profiled times are compared"
            if first_basis == second_basis
            else f"{first_basis} before, {second_basis} after: profiling overhead counts as a "
            "change"
        )
    if before.message_bytes is None or after.message_bytes is None:
        yield "microbatch size unknown: assumed equal on both sides"
    elif before.message_bytes != after.message_bytes and not (before.tokens and after.tokens):
        yield (
            "microbatch sizes differ: work is counted by bytes sent between stages, which needs "
            "the same model in the same precision"
        )
    if any(rank.peak_bytes is None for rank in (*before.memory, *after.memory)):
        yield "memory was not recorded on every rank: whether it is safe is unknown"
    if 1 in (len(before.captures), len(after.captures)):
        yield "one capture per side does not show run-to-run variation: join several with commas"


def match_contexts(before: Measurement, after: Measurement) -> tuple[Measurement, Measurement]:
    """Keep what both sides have of each bucket: a longer context is more work, not a worse run.

    Where a side does not tell its context lengths, or they have none in common, all is kept: the
    one is not known to differ, the other is not compared at all.
    """
    common = before.contexts & after.contexts
    if not common or (before.contexts == after.contexts == common and len(common) == 1):
        return before, after
    sides = (before, after)
    # An intersection of counters holds the lesser count of each bucket.
    steps, more = (Counter(sample.context for sample in side.samples) for side in sides)
    timed, most = (Counter(bucket for bucket, _ in side.unprofiled_s) for side in sides)
    first, second = (
        replace(
            side,
            samples=_first(side.samples, steps & more, lambda sample: sample.context),
            unprofiled_s=_first(side.unprofiled_s, timed & most, lambda pair: pair[0]),
            unprofiled_batches_s=_first(
                side.unprofiled_batches_s, timed & most, lambda pair: pair[0]
            ),
        )
        for side in sides
    )
    return first, second


def _first(
    samples: Iterable[_Sample],
    most: Counter[int | None],
    bucket_of: Callable[[_Sample], int | None],
) -> tuple[_Sample, ...]:
    """Return the first samples of each bucket, up to its number."""
    taken: Counter[int | None] = Counter()
    kept = []
    for sample in samples:
        bucket = bucket_of(sample)
        if taken[bucket] < most[bucket]:
            taken[bucket] += 1
            kept.append(sample)
    return tuple(kept)


def why_not(before: Measurement, after: Measurement) -> tuple[str, ...]:
    """Say why a difference between the two would mean nothing; empty where it does."""
    reasons = []
    for name, side in (("before", before), ("after", after)):
        if not side.samples and side.served is None:
            reasons.append(f"{name} has no step that could be measured")
        elif side.partial:
            reasons.append(f"{name} is a part of a run: a rank or the whole of a step is missing")
    if before.kind != after.kind:
        reasons.append(f"{before.kind} before, {after.kind} after")
    if len(before.ranks) != len(after.ranks):
        reasons.append(f"{len(before.ranks)} ranks before, {len(after.ranks)} after")
    devices = (before.environment.devices, after.environment.devices)
    if all(devices) and devices[0] != devices[1]:
        reasons.append(f"{_listed(devices[0])} before, {_listed(devices[1])} after")
    if before.split and after.split and sum(before.split) != sum(after.split):
        reasons.append(f"{sum(before.split)} layers before, {sum(after.split)} after")
    contexts = (before.contexts, after.contexts)
    if all(contexts) and not contexts[0] & contexts[1]:
        reasons.append(
            f"context lengths up to {_numbers(contexts[0])} before, {_numbers(contexts[1])} after"
        )
    return tuple(reasons)


def setting_changes(before: Measurement, after: Measurement) -> tuple[Difference, ...]:
    """List what was changed of the pipeline itself."""
    pairs: dict[str, tuple[object, object]] = {
        "schedule": (before.schedule, after.schedule),
        "split": (_split(before), _split(after)),
        "microbatches": (before.microbatches, after.microbatches),
        "stages": (before.stages, after.stages),
        "message bytes": (before.message_bytes, after.message_bytes),
        "tokens a microbatch": (before.tokens, after.tokens),
        "context lengths up to": (_numbers(before.contexts), _numbers(after.contexts)),
    }
    return _changed(pairs)


def environment_changes(before: Measurement, after: Measurement) -> tuple[Difference, ...]:
    """List what changed beside it, and may be the true cause."""
    first, second = before.environment, after.environment
    pairs: dict[str, tuple[object, object]] = {
        "devices": (_listed(first.devices), _listed(second.devices)),
        "ranks of the job": (first.world_size, second.world_size),
        "record_shapes": (first.record_shapes, second.record_shapes),
        "profile_memory": (first.profile_memory, second.profile_memory),
        "with_stack": (first.with_stack, second.with_stack),
    }
    for name in sorted({name for name, _ in (*first.versions, *second.versions)}):
        was, came = (
            _listed(v for known, v in side.versions if known == name) for side in (first, second)
        )
        pairs[name] = (was, came)
    return _changed(pairs)


def compare_causes(
    before: Sequence[Mapping[Cause, float] | None], after: Sequence[Mapping[Cause, float] | None]
) -> tuple[CauseChange, ...]:
    """Hold the shares of causes of two sides against each other: means over captures.

    Nothing where all captures of a side lack an account.
    """
    known = [[shares for shares in side if shares is not None] for side in (before, after)]
    if not all(known):
        return ()
    means = [
        {cause: fmean(shares.get(cause, 0.0) for shares in side) for cause in CAUSES}
        for side in known
    ]
    return tuple(
        CauseChange(
            cause=str(cause), before_fraction=means[0][cause], after_fraction=means[1][cause]
        )
        for cause in CAUSES
        if means[0][cause] or means[1][cause]
    )


def _changed(pairs: Mapping[str, tuple[object, object]]) -> tuple[Difference, ...]:
    def show(value: object) -> str:
        return "not known" if value is None or not str(value) else str(value)

    return tuple(
        Difference(what=name, before=show(first), after=show(second))
        for name, (first, second) in pairs.items()
        if first != second
    )


def _split(side: Measurement) -> str | None:
    return ",".join(map(str, side.split)) if side.split else None


def _numbers(values: frozenset[int]) -> str:
    return ", ".join(map(str, sorted(values)))


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)
