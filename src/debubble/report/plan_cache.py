"""What splits leave for a KV cache in → its sentence, its table and its JSON out."""

from __future__ import annotations

from typing import Any

from debubble.plan.kv_cache import CacheCapacity, CacheOption, CachePlan
from debubble.plan.plan import Plan
from debubble.report.change import describe
from debubble.report.text import Table
from debubble.units import NS_PER_S, show_duration


def say_cache(plan: Plan, cache: CachePlan) -> str:
    """Say what the cache holds, who limits it, and the split that holds most."""
    rank = plan.baseline.ranks[cache.now.limited_by].rank
    now = f"The KV cache holds {cache.now.tokens:,} tokens: rank {rank} has no room for more."
    best = next(iter(cache.options), None)
    if best is None or best.capacity.tokens <= cache.now.tokens:
        return f"{now} No split holds more."
    change = describe(best.option.change)
    return f"{now} With {change} it holds {best.capacity.tokens:,}{_gain(best)}, {_cost(best)}."


def _gain(one: CacheOption) -> str:
    return "" if one.gain is None else f" ({one.gain:+.0%})"


def _cost(one: CacheOption) -> str:
    change = one.option.throughput_gain
    if one.option.throughput_low <= 0 <= one.option.throughput_high:
        return "and batches take as long, within the noise"
    return f"and throughput changes by {change:+.0%}"


def cache_table(plan: Plan, cache: CachePlan) -> Table:
    """Lay out the splits, the one in use among them."""
    table = Table(
        columns=("split", "KV cache tokens", "more", "limited by", "batch", "throughput"),
        title="KV cache: the rank with the least room for each of its layers limits all",
    )
    now = ",".join(map(str, plan.baseline.source.split or ()))
    table.rows.append(
        (
            f"{now} (now)",
            f"{cache.now.tokens:,}",
            "",
            _limit(plan, cache.now),
            show_duration(plan.baseline.window_ns),
            "",
        )
    )
    for one in cache.options:
        table.rows.append(
            (
                ",".join(map(str, one.option.change.split or ())),
                f"{one.capacity.tokens:,}",
                "–" if one.gain is None else f"{one.gain:+.0%}",
                _limit(plan, one.capacity),
                show_duration(one.option.window_ns),
                f"{one.option.throughput_gain:+.1%}",
            )
        )
    return table


def _limit(plan: Plan, capacity: CacheCapacity) -> str:
    return f"rank {plan.baseline.ranks[capacity.limited_by].rank}"


def cache_json(plan: Plan, cache: CachePlan) -> dict[str, Any]:
    """Return the same as data."""
    return {
        "bytes_per_token_layer": cache.cache.token_layer_bytes,
        "utilisation_fraction": cache.cache.utilisation,
        "measured_tokens": cache.cache.measured_tokens,
        **_capacity_json(plan, cache.now),
        "options": [
            {
                "change": {"split": list(one.option.change.split or ())},
                **_capacity_json(plan, one.capacity),
                "tokens_gain_fraction": one.gain,
                "batch_latency_s": one.option.window_ns / NS_PER_S,
                "interval": {
                    "batch_latency_s": [
                        one.option.low_ns / NS_PER_S,
                        one.option.high_ns / NS_PER_S,
                    ]
                },
                "throughput_gain_fraction": one.option.throughput_gain,
            }
            for one in cache.options
        ],
        "assumptions": list(cache.assumptions),
    }


def _capacity_json(plan: Plan, capacity: CacheCapacity) -> dict[str, Any]:
    return {
        "tokens": capacity.tokens,
        "tokens_by_rank": list(capacity.by_stage),
        "limited_by_rank": plan.baseline.ranks[capacity.limited_by].rank,
    }
