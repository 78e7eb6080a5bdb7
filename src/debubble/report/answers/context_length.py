"""Another context length, or KV caches, in → what becomes of a plan with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from debubble.plan.context_length import OtherLength, Survivor
from debubble.plan.kv_cache import CacheCapacity, CachePlan
from debubble.plan.option import Option
from debubble.plan.plan import Plan
from debubble.report.answers.base import Part
from debubble.report.answers.change import (
    ChangePart,
    IntervalPart,
    describe,
    headroom_bytes,
    latency_interval,
)
from debubble.units import (
    show_bytes,
    show_count,
    show_duration,
    show_gain,
    show_percent,
)


class PlanNumbers(Part, frozen=True, kw_only=True):
    """What a batch takes, of the run as it is or after a change."""

    paths: ClassVar = {"batch_latency_s": "window_ns", "peak_memory_bytes": "headroom.peak_bytes"}

    bubble_fraction: float
    batch_latency_s: float
    peak_memory_bytes: list[int | None] | None
    microbatches_per_s: float
    """Counted in microbatches of the measured size."""


class UnchangedPart(Part, frozen=True, kw_only=True):
    """The run as it is, at another length."""

    paths: ClassVar = {"numbers": ".", "headroom_bytes": "headroom.bytes"}

    numbers: PlanNumbers
    interval: IntervalPart
    fits_memory: bool | None
    headroom_bytes: list[int | None] | None


class OptionThere(Part, frozen=True, kw_only=True):
    """An option at another length, against the unchanged run there."""

    paths: ClassVar = {
        "change": "option.change",
        "numbers": "there",
        "throughput_gain_fraction": "gain",
        "fits_memory": "there.fits_memory",
        "headroom_bytes": "there.headroom.bytes",
        "recommended": "sure",
    }

    option: int
    """Its place among all options."""
    change: ChangePart
    rank: int | None
    numbers: PlanNumbers
    throughput_gain_fraction: float
    interval: IntervalPart
    fits_memory: bool | None
    headroom_bytes: list[int | None] | None
    recommended: bool
    fate: str


class LengthPart(Part, frozen=True, kw_only=True):
    """What another number of tokens does to the run and to its options."""

    token_scale: float
    tokens: float | None
    unchanged: UnchangedPart
    options: list[OptionThere]
    assumptions: list[str]


def answer_length(plan: Plan, other: OtherLength, tokens: float | None) -> LengthPart:
    """Write what becomes of the run and of each option at another length."""
    then = other.unchanged
    return LengthPart.of(
        other,
        tokens=None if tokens is None else tokens * other.token_scale,
        unchanged=UnchangedPart.of(
            then,
            interval=latency_interval(then),
        ),
        options=[
            OptionThere.of(
                survivor,
                option=plan.options.index(survivor.option),
                interval=IntervalPart(throughput_gain_fraction=[survivor.low, survivor.high]),
                fate=say_fate(other, survivor),
            )
            for survivor in other.survivors
        ],
        assumptions=list(then.assumptions),
    )


def least_left(headroom: Sequence[int | None] | None) -> str | None:
    """Say what the fullest rank has left of its memory; None where that is not known."""
    left = [rank for rank in headroom or () if rank is not None]
    return show_bytes(min(left)) if left else None


def _lacks(option: Option) -> str:
    """Say what the fullest rank lacks."""
    left = [rank.bytes for rank in option.headroom or () if rank.bytes is not None]
    return show_bytes(max(0.0, -min(left, default=0.0)))


def name_length(token_scale: float, tokens: float | None) -> str:
    """Name another length: in tokens where it is known how many."""
    times = f"{token_scale:.3g} times as many"
    if tokens is None:
        return f"{times} tokens a microbatch"
    return f"{show_count(round(tokens))} tokens a microbatch ({times})"


def say_length(plan: Plan, other: OtherLength, tokens: float | None) -> list[str]:
    """Say what the length does to the run, and what to do then."""
    then, source, best = other.unchanged, plan.baseline.source, other.best
    left = least_left(headroom_bytes(then.headroom))
    room = "memory is unknown" if left is None else f"{left} of memory is left"
    if then.fits_memory is False:
        room = f"it does not fit: a rank would need {_lacks(then)} more memory"
    length = name_length(other.token_scale, tokens and tokens * other.token_scale)
    sentence = (
        f"With {length} a batch takes {show_duration(then.window_ns)} "
        f"({show_duration(then.low_ns)} to {show_duration(then.high_ns)}) instead of "
        f"{show_duration(plan.baseline.window_ns)}, ranks wait "
        f"{show_percent(then.bubble_fraction)} instead of "
        f"{show_percent(source.bubble_fraction)}; {room}."
    )
    if best is None:
        return [sentence, "At that length no option gains more than the noise."]
    which = "still" if best.option is other.best_here else "another"
    words, gain = describe(best.option.change), show_gain(best.gain, best.low, best.high)
    return [sentence, f"At that length the best is {which}: {words}, {gain}."]


def say_fate(other: OtherLength, survivor: Survivor) -> str:
    """Say in a few words what becomes of an option."""
    if survivor.there.fits_memory is False:
        return f"no longer fits: {_lacks(survivor.there)} short"
    if survivor is other.best:
        return "still best" if survivor.option is other.best_here else "best there"
    if survivor.high < 0:
        return f"loses {show_percent(-survivor.gain)}"
    if survivor.guess and survivor.gain > 0:
        return "try"
    return "gains" if survivor.sure else "noise"


class CacheOptionPart(Part, frozen=True, kw_only=True):
    """A split, by the tokens that its KV cache holds."""

    paths: ClassVar = {
        "change": "option.change",
        "tokens": "capacity.tokens",
        "tokens_by_rank": "capacity.by_stage",
        "tokens_gain_fraction": "gain",
        "batch_latency_s": "option.window_ns",
        "throughput_gain_fraction": "option.throughput_gain",
    }

    change: ChangePart
    tokens: int
    tokens_by_rank: list[int | None]
    limited_by_rank: int
    tokens_gain_fraction: float | None
    batch_latency_s: float
    interval: IntervalPart
    throughput_gain_fraction: float


class CachePart(Part, frozen=True, kw_only=True):
    """What a KV cache holds with the split in use, and with others."""

    paths: ClassVar = {
        "bytes_per_token_layer": "cache.token_layer_bytes",
        "utilisation_fraction": "cache.utilisation",
        "measured_tokens": "cache.measured_tokens",
        "tokens": "now.tokens",
        "tokens_by_rank": "now.by_stage",
    }

    bytes_per_token_layer: float
    utilisation_fraction: float
    measured_tokens: int
    tokens: int
    tokens_by_rank: list[int | None]
    limited_by_rank: int
    options: list[CacheOptionPart]
    assumptions: list[str]


def answer_cache(plan: Plan, cache: CachePlan) -> CachePart:
    """Return what the cache holds with the split in use, and with others."""
    return CachePart.of(
        cache,
        limited_by_rank=_limited_by(plan, cache.now),
        options=[
            CacheOptionPart.of(
                other,
                limited_by_rank=_limited_by(plan, other.capacity),
                interval=latency_interval(other.option),
            )
            for other in cache.options
        ],
    )


def _limited_by(plan: Plan, capacity: CacheCapacity) -> int:
    return plan.baseline.ranks[capacity.limited_by].rank


def say_cache(plan: Plan, cache: CachePlan) -> str:
    """Say what the cache holds, who limits it, and the split that holds most."""
    limit = f"rank {_limited_by(plan, cache.now)} is full"
    now = f"The KV cache holds {show_count(cache.now.tokens)} tokens: {limit}."
    best = next(iter(cache.options), None)
    if best is None or best.capacity.tokens <= cache.now.tokens:
        return f"{now} No split holds more."
    gain = "" if best.gain is None else f" ({show_gain(best.gain)})"
    cost = f"throughput changes by {show_gain(best.option.throughput_gain)}"
    if best.option.throughput_low <= 0 <= best.option.throughput_high:
        cost = "batch latency stays the same, within the noise"
    words = describe(best.option.change)
    return f"{now} With {words} it holds {show_count(best.capacity.tokens)}{gain}, and {cost}."
