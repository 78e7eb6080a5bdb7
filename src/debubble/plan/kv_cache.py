"""The lever of serving engines: layers split so that every stage holds as many tokens.

An engine fills what its weights leave with KV cache, and each token needs a place on every stage.
So the stage with the least room for each of its layers limits all.

Each token needs a place on every rank, so the rank with the least room for each of its layers
limits all; a rank with a head or an embedding should hold fewer layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import floor

import numpy as np

from debubble.costs.memory import MemoryCosts
from debubble.errors import NoSplitFits, UsageError
from debubble.plan.baseline import Baseline, stages_of
from debubble.plan.change import Change
from debubble.plan.option import Idea, Option, weigh
from debubble.plan.split import best_split
from debubble.plan.split_problem import Room, room_for
from debubble.timeline.model import F64, I64


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheStage:
    """What one stage has room for."""

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
    """What each stage has room for; None where no layer of it has a cache."""
    limited_by: int
    """The stage with the least."""


def bytes_per_token_layer(
    kv_heads: int, head_dim: int, value_dim: int, element_bytes: float
) -> float:
    """Return what one token takes in one layer, keys and values."""
    return kv_heads * (head_dim + value_dim) * element_bytes


def cache_capacity(
    stages: Sequence[CacheStage], token_layer_bytes: float, *, utilisation: float = 0.9
) -> CacheCapacity:
    """Return the tokens that fit; of a device the engine may use the share `utilisation`."""
    if not any(stage.layers for stage in stages) or token_layer_bytes <= 0:
        raise UsageError(
            "no layer has a cache", hint="give the layers of each stage, and bytes of a token"
        )
    by_stage = tuple(_tokens(stage, token_layer_bytes, utilisation) for stage in stages)
    known = {number: tokens for number, tokens in enumerate(by_stage) if tokens is not None}
    limited_by = min(known, key=known.__getitem__)
    return CacheCapacity(tokens=known[limited_by], by_stage=by_stage, limited_by=limited_by)


def _tokens(stage: CacheStage, token_layer_bytes: float, utilisation: float) -> int | None:
    room = stage.capacity_bytes * utilisation - stage.weight_bytes - stage.activation_bytes
    if not stage.layers:
        return None
    return max(0, floor(room / (stage.layers * token_layer_bytes)))


# Of a device, what engines use unless they are told otherwise.
USUAL_UTILISATION = 0.9
# Capacities between that of the quickest split and the largest of all at which splits are looked
# for, as shares of the way.
_BETWEEN = (0.5, 1.0)


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


def plan_cache(baseline: Baseline, cache: Cache, quickest: tuple[int, ...] | None) -> CachePlan:
    """Find the splits with the largest cache, and halfway there from the quickest split."""
    split, memory = _checked(baseline)
    bare = _bare_room(baseline, memory, cache)
    now = _capacity(baseline, cache, bare, split)
    found = {} if quickest is None else {quickest: _capacity(baseline, cache, bare, quickest)}
    least = max([now.tokens, *(one.tokens for one in found.values())])
    most = _most_tokens(baseline, cache, bare)
    for share in _BETWEEN:
        tokens = least + share * (most - least)
        try:
            one = best_split(baseline, Change(), room=_filled(bare, cache, tokens)).split
        except NoSplitFits:
            continue
        found[one] = _capacity(baseline, cache, bare, one)
    found.pop(split, None)
    options = [
        CacheOption(
            option=weigh(baseline, Idea(lever="kv_cache", change=Change(split=one))),
            capacity=capacity,
            gain=capacity.tokens / now.tokens - 1 if now.tokens else None,
        )
        for one, capacity in found.items()
    ]
    return CachePlan(
        cache=cache,
        now=now,
        options=tuple(sorted(options, key=lambda one: -one.capacity.tokens)),
        assumptions=_assumed(memory, cache),
    )


def _checked(baseline: Baseline) -> tuple[tuple[int, ...], MemoryCosts]:
    """Return the split in use and its memory; refuse where the cache cannot be told."""
    if baseline.schedule != "forward-only":
        raise UsageError(
            "this run trains: it has no KV cache", hint="leave --kv-bytes-per-token-layer out"
        )
    if baseline.source.split is None:
        raise UsageError(
            "how many layers each stage has is not known",
            hint="say it with --layers, such as 4,4,4,4",
        )
    if baseline.memory is None:
        raise UsageError(
            "the traces do not tell what weights and work space take",
            hint="record with profile_memory=True",
        )
    if None in baseline.limits:
        raise UsageError(
            "the memory of a device is not known", hint="say it with --memory-limit, such as 80GiB"
        )
    return baseline.source.split, baseline.memory


def _bare_room(baseline: Baseline, memory: MemoryCosts, cache: Cache) -> Room:
    """Return what ranks hold without any cache, and what they may hold."""
    order, split = baseline.order, baseline.source.split or ()
    limits = [(limit or 0.0) * cache.utilisation for limit in baseline.limits]
    room = room_for(memory, order, layers=sum(split), limit_bytes=limits)
    held = cache.measured_tokens * cache.token_layer_bytes
    return Room(
        layer_bytes=room.layer_bytes - held,
        stage_bytes=room.stage_bytes,
        cap_bytes=room.cap_bytes,
    )


def _filled(bare: Room, cache: Cache, tokens: float) -> Room:
    return Room(
        layer_bytes=bare.layer_bytes + tokens * cache.token_layer_bytes,
        stage_bytes=bare.stage_bytes,
        cap_bytes=bare.cap_bytes,
    )


def _homes(baseline: Baseline) -> I64:
    """Return the place of each stage."""
    order = baseline.order
    home = {action.stage: place for place, actions in enumerate(order) for action in actions}
    return np.array([home[stage] for stage in range(stages_of(order))])


def _capacity(
    baseline: Baseline, cache: Cache, bare: Room, split: tuple[int, ...]
) -> CacheCapacity:
    """Return the tokens that fit with a split, by rank."""
    homes, layers = _homes(baseline), np.array(split)
    ranks = range(len(baseline.ranks))
    weights, fixed = bare.layer_bytes[:, 0] * layers, bare.stage_bytes
    return cache_capacity(
        [
            CacheStage(
                capacity_bytes=float(bare.cap_bytes[place]),
                weight_bytes=float(weights[homes == place].sum()),
                activation_bytes=float(fixed[homes == place].sum()),
                layers=int(layers[homes == place].sum()),
            )
            for place in ranks
        ],
        cache.token_layer_bytes,
        utilisation=1.0,
    )


def _most_tokens(baseline: Baseline, cache: Cache, bare: Room) -> float:
    """Return the largest cache that any split has room for.

    With so many tokens each rank has room for so many layers: together they must hold all.
    """
    homes, total = _homes(baseline), sum(baseline.source.split or ())
    counts = np.arange(1, total + 1)
    rows = []
    for place in range(len(baseline.ranks)):
        mine = homes == place
        free = bare.cap_bytes[place] - bare.stage_bytes[mine].sum()
        weights = bare.layer_bytes[mine, 0].mean() * counts
        tokens: F64 = (free - weights) / (counts * cache.token_layer_bytes)
        rows.append(np.where(counts < mine.sum(), np.inf, tokens))
    room = np.stack(rows)
    """By rank and layers: the tokens that fit."""
    known = np.unique(room[np.isfinite(room) & (room > 0)])
    fit = [one for one in known.tolist() if (room >= one).sum(axis=1).sum() >= total]
    fit = [one for one in fit if (np.isfinite(room) & (room >= one)).any(axis=1).all()]
    return max(fit, default=0.0)


def _assumed(memory: MemoryCosts, cache: Cache) -> tuple[str, ...]:
    held = (
        f"the measured run held a cache of {cache.measured_tokens:,} tokens"
        if cache.measured_tokens
        else "the measured peak holds no KV cache; say how large it was with --kv-tokens-measured"
    )
    return (held, *memory.assumptions)
