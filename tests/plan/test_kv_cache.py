"""KV-cache tokens by stage."""

from __future__ import annotations

from dataclasses import replace

import pytest

from debubble.errors import UsageError
from debubble.plan.kv_cache import CacheStage, cache_capacity

GIB = 1024**3
# Llama-3 70B in bf16: 8 KV heads of 128, keys and values, 80 layers of 1.6 GiB.
TOKEN = 8 * (128 + 128) * 2


def stage(layers, extra=0.0, capacity=80.0):
    return CacheStage(
        capacity_bytes=capacity * GIB,
        weight_bytes=(1.6 * layers + extra) * GIB,
        activation_bytes=2 * GIB,
        layers=layers,
    )


def test_tokens_are_what_the_fullest_stage_has_room_for():
    stages = [stage(20, extra=2), stage(20), stage(20), stage(20, extra=4)]
    found = cache_capacity(stages, TOKEN, utilisation=0.9)
    free = [72 - 32 - 2 - extra for extra in (2, 0, 0, 4)]
    assert found.by_stage == tuple(int(gib * GIB / (20 * 4096)) for gib in free)
    assert found.limited_by == 3
    assert found.tokens == found.by_stage[3]


def test_fewer_layers_on_a_full_stage_hold_more_tokens():
    even = cache_capacity([stage(20, 2), stage(20), stage(20), stage(20, 4)], TOKEN)
    moved = cache_capacity([stage(20, 2), stage(21), stage(20), stage(19, 4)], TOKEN)
    assert moved.tokens > even.tokens
    assert moved.limited_by != 3


def test_memory_for_each_layer_counts_not_memory():
    # The second stage has less memory free, but far fewer layers that need it.
    found = cache_capacity([stage(30, capacity=80), stage(10, capacity=40)], TOKEN)
    assert found.limited_by == 0
    assert found.by_stage[1] > found.by_stage[0]


def test_weights_that_do_not_fit_leave_no_token_and_a_stage_without_cache_does_not_count():
    full = replace(stage(20), weight_bytes=100 * GIB)
    empty = replace(stage(20), layers=0)
    found = cache_capacity([empty, full, stage(20)], TOKEN)
    assert (found.tokens, found.limited_by, found.by_stage[0]) == (0, 1, None)


def test_no_layer_with_a_cache_is_refused():
    with pytest.raises(UsageError, match="no layer has a cache"):
        cache_capacity([replace(stage(20), layers=0)], TOKEN)
