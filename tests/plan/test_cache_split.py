"""Splits for a KV cache: against all splits there are, and what cannot be told."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.simulator.allocator import ACTIVATION, PARAMS, allocator_run
from support.timelines.engine_runs import planned_run

from debubble.errors import UsageError
from debubble.plan.change import Change
from debubble.plan.kv_cache import Cache, plan_cache
from debubble.plan.plan import make_plan
from debubble.plan.request import Planned
from debubble.plan.split import all_splits
from debubble.report.answers.plan import answer_of_plan
from debubble.report.plan import plan_page
from debubble.simulate.costs.memory import fit_memory

LAYERS = (4, 4, 4, 4)
CACHE = Cache(token_layer_bytes=0.5, utilisation=0.9)


def run_with_head(head=800.0, limit=4000.0, first=0.0):
    """Four ranks, of which the last holds a head and the first an embedding."""
    baseline, timeline = planned_run("forward-only", 4, 8, split=LAYERS)
    memory = fit_memory([allocator_run("forward-only", 4, 8, LAYERS)])
    more = (first, 0.0, 0.0, head)
    ranks = tuple(
        replace(rank, fixed_bytes=rank.fixed_bytes + extra)
        for rank, extra in zip(memory.ranks, more, strict=True)
    )
    memory = replace(memory, ranks=ranks)
    return replace(baseline, memory=memory, limits=(limit,) * 4), timeline


def tokens_of(baseline, split):
    """What fits, by the predicted peaks alone."""
    peaks = baseline.peaks(Change(split=split))
    return min(
        int((0.9 * 4000 - peak.peak_bytes) / (layers * 0.5))
        for peak, layers in zip(peaks, split, strict=True)
    )


def test_tokens_are_what_the_peaks_of_each_rank_leave():
    baseline, _ = run_with_head()
    found = plan_cache(baseline, CACHE, None)
    assert found.now.tokens == pytest.approx(tokens_of(baseline, LAYERS), abs=1)
    assert found.now.limited_by == 3
    for one in found.options:
        assert one.capacity.tokens == pytest.approx(
            tokens_of(baseline, one.option.change.split), abs=1
        )


@pytest.mark.parametrize("head", [0.0, 400.0, 800.0, 1200.0])
@pytest.mark.parametrize("first", [0.0, 300.0])
def test_no_split_holds_more_tokens_than_the_one_proposed(head, first):
    baseline, _ = run_with_head(head, first=first)
    found = plan_cache(baseline, CACHE, None)
    best = max(found.now.tokens, *(one.capacity.tokens for one in found.options), 0)
    every = [tokens_of(baseline, tuple(split)) for split in all_splits(16, 4).tolist()]
    assert best == pytest.approx(max(every), abs=1)


def test_the_trade_against_latency_is_shown():
    plan = make_plan(*run_with_head(1200.0), cache=CACHE)
    best = plan.cache.options[0]
    assert best.option.change.split[3] < 4
    assert best.gain > 0.1
    assert best.option.throughput_gain < 0  # an uneven split is slower
    page = plan_page(answer_of_plan(Planned(plan=plan)))
    said = next(one for one in page.findings if one.startswith("The KV cache holds"))
    assert f"it holds {best.capacity.tokens:,} ({100 * best.gain:+.0f} %)" in said
    found = answer_of_plan(Planned(plan=plan)).to_dict()["kv_cache"]
    assert found["tokens"] == plan.cache.now.tokens
    assert found["options"][0]["change"] == {"split": list(best.option.change.split)}


def test_a_cache_that_the_run_held_is_not_counted_twice():
    baseline, _ = run_with_head(head=0.0)
    held = replace(CACHE, measured_tokens=200)
    more = (
        plan_cache(baseline, held, None).now.tokens - plan_cache(baseline, CACHE, None).now.tokens
    )
    assert more == pytest.approx(200, abs=1)


def test_layers_without_room_hold_no_token():
    baseline, _ = run_with_head(limit=4 * (PARAMS + ACTIVATION))
    assert plan_cache(baseline, CACHE, None).now.tokens == 0


@pytest.mark.parametrize(
    ("lacks", "said"),
    [
        ({"memory": None}, "memory of weights and work space is not in the traces"),
        ({"limits": (None,) * 4}, "the memory of a device is unknown"),
        ({"schedule": "1f1b"}, "this run trains"),
    ],
)
def test_what_is_missing_is_said_and_the_rest_is_planned(lacks, said):
    baseline, timeline = run_with_head()
    with pytest.raises(UsageError, match=said):
        plan_cache(replace(baseline, **lacks), CACHE, None)
    if "schedule" not in lacks:
        plan = make_plan(replace(baseline, **lacks), timeline, cache=CACHE)
        assert plan.cache is None
        assert [said in one.reason for one in plan.refused if one.lever == "kv_cache"] == [True]
        assert plan.options
