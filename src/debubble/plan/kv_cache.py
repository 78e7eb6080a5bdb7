"""Stages of an inference engine in → the tokens its KV cache holds: as many as the fullest stage.

An engine fills what its weights leave with KV cache, and each token needs a place on every stage.
So the stage with the least room for each of its layers limits all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import floor

from debubble.errors import UsageError


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
