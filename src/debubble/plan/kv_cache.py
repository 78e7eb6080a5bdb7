"""The lever of serving engines: layers split so that every rank holds as many tokens.

An engine fills what its weights leave with KV cache, and each token needs space on every rank. So
the rank with the least memory for each of its layers limits all; a rank with a head or an embedding
should hold fewer layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import floor

import numpy as np

from debubble.errors import NoSplitFits, UsageError
from debubble.plan.baseline import Baseline, stages_of
from debubble.plan.change import Change
from debubble.plan.option import Idea, Option, weigh
from debubble.plan.split import best_split
from debubble.plan.split_problem import SplitMemory, split_memory
from debubble.simulate.costs.memory import MemoryCosts
from debubble.timeline.model import F64, Flags
from debubble.timeline.schedules import Order
from debubble.units import show_count

# Of a device, what engines use unless they are told otherwise.
USUAL_UTILISATION = 0.9
# Capacities between that of the quickest split and the largest of all at which splits are looked
# for, as shares of the way.
_BETWEEN = (0.5, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheStage:
    """What one stage can hold."""

    capacity_bytes: float
    weight_bytes: float
    activation_bytes: float
    """Work space, and whatever else is held besides weights and cache."""
    layers: int
    """Those with a cache; 0 holds any number of tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheCapacity:
    """How many tokens fit."""

    tokens: int
    by_stage: tuple[int | None, ...]
    """What each stage can hold; None where no layer of it has a cache."""
    limited_by: int
    """The stage with the least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cache:
    """What is known of the cache."""

    token_layer_bytes: float
    """Keys and values of one token in one layer."""
    utilisation: float = USUAL_UTILISATION
    """Of a device's memory, what the engine may use."""
    measured_tokens: int = 0
    """Tokens for which the measured run held a cache already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheOption:
    """A split, by what its cache holds."""

    option: Option
    capacity: CacheCapacity
    gain: float | None
    """Of tokens, against the split in use; None where that has room for none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CachePlan:
    """What the cache holds now, and with other splits."""

    cache: Cache
    now: CacheCapacity
    """By rank."""
    options: tuple[CacheOption, ...]
    """The most tokens first."""
    assumptions: tuple[str, ...]


def cache_capacity(
    stages: Sequence[CacheStage], token_layer_bytes: float, *, utilisation: float = 0.9
) -> CacheCapacity:
    """Return the tokens that fit; of a device the engine may use the share `utilisation`."""
    if not any(stage.layers for stage in stages) or token_layer_bytes <= 0:
        raise UsageError(
            "no layer has a cache", hint="give the layers of each stage, and bytes of a token"
        )

    def tokens_of(stage: CacheStage) -> int | None:
        left = stage.capacity_bytes * utilisation - stage.weight_bytes - stage.activation_bytes
        if not stage.layers:
            return None
        return max(0, floor(left / (stage.layers * token_layer_bytes)))

    by_stage = tuple(map(tokens_of, stages))
    known = {number: tokens for number, tokens in enumerate(by_stage) if tokens is not None}
    limited_by = min(known, key=known.__getitem__)
    return CacheCapacity(tokens=known[limited_by], by_stage=by_stage, limited_by=limited_by)


def plan_cache(baseline: Baseline, cache: Cache, quickest: tuple[int, ...] | None) -> CachePlan:
    """Find the splits with the largest cache, and halfway there from the quickest split."""
    split, memory = _checked(baseline)
    bare = _without_cache(baseline, memory, cache, sum(split))
    now = _capacity(baseline, cache, bare, split)
    found = {} if quickest is None else {quickest: _capacity(baseline, cache, bare, quickest)}
    least = max([now.tokens, *(capacity.tokens for capacity in found.values())])
    most = _most_tokens(baseline, cache, bare, sum(split))
    for share in _BETWEEN:
        tokens = least + share * (most - least)
        filled = bare.layer_bytes + tokens * cache.token_layer_bytes
        try:
            other = best_split(baseline, Change(), memory=replace(bare, layer_bytes=filled)).split
        except NoSplitFits:
            continue
        found[other] = _capacity(baseline, cache, bare, other)
    found.pop(split, None)
    options = [
        CacheOption(
            option=weigh(baseline, Idea(lever="kv_cache", change=Change(split=other))),
            capacity=capacity,
            gain=capacity.tokens / now.tokens - 1 if now.tokens else None,
        )
        for other, capacity in found.items()
    ]
    held = (
        f"the measured run held a cache of {show_count(cache.measured_tokens)} tokens"
        if cache.measured_tokens
        else "the measured peak is taken to hold no KV cache; else give --kv-tokens-measured"
    )
    return CachePlan(
        cache=cache,
        now=now,
        options=tuple(sorted(options, key=lambda option: -option.capacity.tokens)),
        assumptions=(held, *memory.assumptions),
    )


def _checked(baseline: Baseline) -> tuple[tuple[int, ...], MemoryCosts]:
    """Return the split in use and its memory; refuse where the cache cannot be told."""
    if baseline.schedule != "forward-only":
        raise UsageError(
            "this run trains: it has no KV cache", hint="leave --kv-bytes-per-token-layer out"
        )
    if baseline.source.split is None:
        raise UsageError(
            "the layers of each stage are unknown",
            hint="give --layers, such as 4,4,4,4",
        )
    if baseline.memory is None:
        raise UsageError(
            "the memory of weights and work space is not in the traces",
            hint="record with profile_memory=True",
        )
    if None in baseline.limits:
        raise UsageError(
            "the memory of a device is unknown", hint="give --memory-limit, such as 80GiB"
        )
    return baseline.source.split, baseline.memory


def _without_cache(
    baseline: Baseline, memory: MemoryCosts, cache: Cache, layers: int
) -> SplitMemory:
    """Return what ranks hold without any cache, and what they may hold."""
    limits = [(limit or 0.0) * cache.utilisation for limit in baseline.limits]
    peak = split_memory(memory, baseline.order, layers=layers, limit_bytes=limits)
    held = cache.measured_tokens * cache.token_layer_bytes
    return replace(peak, layer_bytes=peak.layer_bytes - held)


def _stages_by_rank(order: Order) -> list[Flags]:
    """Return which stages each rank holds."""
    holders = [{action.stage for action in actions} for actions in order]
    stages = range(stages_of(order))
    return [np.array([stage in held for stage in stages]) for held in holders]


def _capacity(
    baseline: Baseline, cache: Cache, bare: SplitMemory, split: tuple[int, ...]
) -> CacheCapacity:
    """Return the tokens that fit with a split, by rank."""
    layers = np.array(split)
    weights = bare.layer_bytes[:, 0] * layers
    return cache_capacity(
        [
            CacheStage(
                capacity_bytes=float(cap),
                weight_bytes=float(weights[own_layers].sum()),
                activation_bytes=float(bare.stage_bytes[own_layers].sum()),
                layers=int(layers[own_layers].sum()),
            )
            for own_layers, cap in zip(_stages_by_rank(baseline.order), bare.cap_bytes, strict=True)
        ],
        cache.token_layer_bytes,
        utilisation=1.0,
    )


def _most_tokens(baseline: Baseline, cache: Cache, bare: SplitMemory, layers: int) -> float:
    """Return the largest cache that any split can hold.

    With so many tokens each rank can hold so many layers: together they must hold all.
    """
    counts = np.arange(1, layers + 1)
    rows = []
    for own_layers, cap in zip(_stages_by_rank(baseline.order), bare.cap_bytes, strict=True):
        free = cap - bare.stage_bytes[own_layers].sum()
        weights = bare.layer_bytes[own_layers, 0].mean() * counts
        tokens: F64 = (free - weights) / (counts * cache.token_layer_bytes)
        rows.append(np.where(counts < own_layers.sum(), np.inf, tokens))
    holds = np.stack(rows)  # tokens that fit, by rank and layers
    known = np.unique(holds[np.isfinite(holds) & (holds > 0)])
    fit = [tokens for tokens in known.tolist() if (holds >= tokens).sum(axis=1).sum() >= layers]
    fit = [tokens for tokens in fit if (np.isfinite(holds) & (holds >= tokens)).any(axis=1).all()]
    return max(fit, default=0.0)
