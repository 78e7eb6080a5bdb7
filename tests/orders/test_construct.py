"""Orders made by rule, and moves: what comes out can run, and holds no more than it may."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.orders import random_pipeline

from debubble.plan.orders.construct import Pipeline, construct, rules
from debubble.plan.orders.search import _lower_bound_s, neighbour
from debubble.simulate.theory import ideal_bubble
from debubble.timeline.schedules import (
    Shape,
    check_order,
    hold,
    order_of,
    place_stages,
)

SIZES = st.tuples(st.integers(0, 99), st.integers(1, 5), st.integers(1, 9), st.integers(1, 2))


@settings(max_examples=25)
@given(SIZES)
def test_an_order_by_rule_can_finish_and_keeps_to_its_room(sizes):
    pipeline = random_pipeline(*sizes)
    made = [construct(pipeline, rule) for rule in rules(pipeline)]
    assert len(pipeline.placement[0]) > 1 or None not in made
    for order in filter(None, made):
        check_order(order)
        for actions, room in zip(order, pipeline.room, strict=True):
            assert hold(actions).in_flight.sum(axis=1).max() <= room


@settings(max_examples=25)
@given(SIZES, st.integers(0, 10**6))
def test_moves_keep_every_pass_and_the_turn_of_microbatches(sizes, seed):
    pipeline = random_pipeline(*sizes)
    order = next(filter(None, (construct(pipeline, rule) for rule in rules(pipeline))), None)
    chance = random.Random(seed)  # noqa: S311 (no secret)
    for _ in range(60 if order else 0):
        order = neighbour(order, chance) or order
    parts = {"B": "IW"}
    for rank, actions in enumerate(order or ()):
        done = Counter(
            (a.stage, part, a.microbatch) for a in actions for part in parts.get(a.kind, a.kind)
        )
        count = range(pipeline.microbatches)
        assert done == Counter(
            (s, k, m) for s in pipeline.placement[rank] for k in "FIW" for m in count
        )
        for stage in pipeline.placement[rank]:
            for kinds in ("F", "BI"):
                turns = [a.microbatch for a in actions if a.stage == stage and a.kind in kinds]
                assert turns == sorted(turns)


def equal_pipeline(ranks, microbatches, room):
    took = {"F": 100, "I": 100, "W": 100, "B": 200}
    return Pipeline(
        placement=place_stages(Shape.LOOP, ranks, 1),
        microbatches=microbatches,
        pass_ns={(kind, stage): ns for kind, ns in took.items() for stage in range(ranks)},
        hop_ns={},
        room=(room,) * ranks,
    )


@pytest.mark.parametrize(("ranks", "microbatches"), [(4, 8), (8, 24)])
def test_on_equal_stages_rules_reach_the_zero_bubble_papers_schedules(ranks, microbatches):
    unit = {"F": 1.0, "I": 1.0, "W": 1.0, "B": 2.0}
    for name, room in (("zb-h1", ranks), ("zb-h2", 2 * ranks)):
        pipeline = equal_pipeline(ranks, microbatches, room)
        made = [construct(pipeline, rule) for rule in rules(pipeline)]
        best = min(ideal_bubble(order, unit) for order in made if order)
        assert best <= ideal_bubble(order_of(name, ranks, microbatches), unit) + 1e-9


@pytest.mark.parametrize("seed", range(4))
def test_no_order_of_equal_stages_is_under_the_bound(seed):
    ranks, microbatches = 2 + seed, 3 * (1 + seed)
    pipeline = equal_pipeline(ranks, microbatches, 2 * ranks)
    unit = {"F": 100.0, "I": 100.0, "W": 100.0, "B": 200.0}
    for order in (construct(pipeline, rule) for rule in rules(pipeline)):
        window_ns = 300 * microbatches / (1 - ideal_bubble(order, unit))
        assert _lower_bound_s(pipeline) * 1e9 <= window_ns * (1 + 1e-9)
