"""What KV caches hold in → a plan's part about them, and its sentence."""

from __future__ import annotations

from debubble.answers.base import Part
from debubble.answers.change import ChangePart, IntervalPart, change_part, describe
from debubble.plan.kv_cache import CacheCapacity, CachePlan
from debubble.plan.plan import Plan
from debubble.units import NS_PER_S, show_count, show_gain


class CacheOptionPart(Part, frozen=True, kw_only=True):
    """A split, by the tokens that its KV cache holds."""

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
    return CachePart(
        bytes_per_token_layer=cache.cache.token_layer_bytes,
        utilisation_fraction=cache.cache.utilisation,
        measured_tokens=cache.cache.measured_tokens,
        tokens=cache.now.tokens,
        tokens_by_rank=list(cache.now.by_stage),
        limited_by_rank=_limited_by(plan, cache.now),
        options=[
            CacheOptionPart(
                change=change_part(found.option.change),
                tokens=found.capacity.tokens,
                tokens_by_rank=list(found.capacity.by_stage),
                limited_by_rank=_limited_by(plan, found.capacity),
                tokens_gain_fraction=found.gain,
                batch_latency_s=found.option.window_ns / NS_PER_S,
                interval=IntervalPart(
                    batch_latency_s=[
                        found.option.low_ns / NS_PER_S,
                        found.option.high_ns / NS_PER_S,
                    ]
                ),
                throughput_gain_fraction=found.option.throughput_gain,
            )
            for found in cache.options
        ],
        assumptions=list(cache.assumptions),
    )


def _limited_by(plan: Plan, capacity: CacheCapacity) -> int:
    return plan.baseline.ranks[capacity.limited_by].rank


def say_cache(plan: Plan, cache: CachePlan) -> str:
    """Say what the cache holds, who limits it, and the split that holds most."""
    limit = f"rank {_limited_by(plan, cache.now)} has no room for more"
    now = f"The KV cache holds {show_count(cache.now.tokens)} tokens: {limit}."
    best = next(iter(cache.options), None)
    if best is None or best.capacity.tokens <= cache.now.tokens:
        return f"{now} No split holds more."
    gain = "" if best.gain is None else f" ({show_gain(best.gain)})"
    cost = f"throughput changes by {show_gain(best.option.throughput_gain)}"
    if best.option.throughput_low <= 0 <= best.option.throughput_high:
        cost = "batches take as long, within the noise"
    words = describe(best.option.change)
    return f"{now} With {words} it holds {show_count(best.capacity.tokens)}{gain}, and {cost}."
