"""When passes run in an order: held against the simulator that prices everything."""

from __future__ import annotations

import random
from functools import cache

import numpy as np
import pytest
from support.orders import random_pipeline

from debubble.plan.orders.construct import construct, follow, named_rows, rhythms, rules
from debubble.plan.orders.improve import climb_from
from debubble.plan.orders.messages import MessageCosts, window_of
from debubble.plan.orders.pipeline import longest_rank
from debubble.simulate.communication import Communication
from debubble.simulate.engine import Engine
from debubble.simulate.events import OrderCycle
from debubble.simulate.hand_set import GivenCosts, give_lengths
from debubble.simulate.planned import plan_program
from debubble.timeline.model import PassKind
from debubble.timeline.schedules import check_order, hold

SEEDS = range(12)


@cache
def some_rows(seed):
    """Orders of all origins for a random pipeline, and what moves by chance make of them."""
    pipeline = random_pipeline(seed)
    found = [rows for _, rows in named_rows(pipeline)]
    found += filter(None, (construct(pipeline, rule) for rule in list(rules(pipeline))[::9]))
    found += filter(None, (follow(pipeline, own, wait=0.5) for own in rhythms(pipeline, 2)))
    for number, rows in enumerate(found[:6]):
        climb = climb_from(pipeline, rows, lambda _, times: times.window, seed + number)
        climb.kick(8)
        found.append(climb.now)
    return found


def costs_of(pipeline):
    stages = pipeline.stages
    return GivenCosts(
        passes={
            PassKind.F: np.array([stage.forward for stage in stages]),
            PassKind.I: np.array([stage.input_gradient for stage in stages]),
            PassKind.W: np.array([stage.weight_gradient for stage in stages]),
            PassKind.B: np.array([stage.backward for stage in stages]),
        },
        one_way=np.array(pipeline.up[:-1]),
        sending=7,
        drain=3,
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_a_quick_run_is_the_simulators_to_the_nanosecond(seed):
    pipeline = random_pipeline(seed)
    for rows in some_rows(seed):
        program = plan_program(pipeline.order(rows), Communication.LATENCY)
        times = Engine(program).run(give_lengths(program, costs_of(pipeline)))
        quick = pipeline.run(rows)
        numbers = [number for row in rows for number in row]
        assert [quick.start[number] for number in numbers] == times.pass_start.tolist()
        assert [quick.end[number] for number in numbers] == times.pass_end.tolist()
        assert quick.window == times.window_ns


@pytest.mark.parametrize("rendezvous", [False, True], ids=["buffered", "meeting"])
@pytest.mark.parametrize("seed", SEEDS)
def test_messages_on_a_queue_are_the_simulators_to_the_nanosecond(seed, rendezvous):
    pipeline = random_pipeline(seed)
    given = costs_of(pipeline)
    keys = [(stage, way) for stage in range(len(pipeline.stages)) for way in (True, False)]
    wire = {(stage, way): pipeline.up[stage if way else stage - 1] for stage, way in keys}
    costs = MessageCosts(
        communication=Communication.RUNTIME,
        rendezvous=rendezvous,
        wire=wire,
        sending=wire if rendezvous else dict.fromkeys(keys, 7),
        drain=wire if rendezvous else dict.fromkeys(keys, 3),
    )
    for rows in some_rows(seed):
        program = plan_program(pipeline.order(rows), Communication.RUNTIME, rendezvous=rendezvous)
        try:
            window = Engine(program).windows(give_lengths(program, given))[0]
        except OrderCycle:
            window = None
        assert window_of(pipeline, rows, costs) == window


@pytest.mark.parametrize("seed", SEEDS)
def test_a_run_from_a_change_on_is_the_whole_run(seed):
    pipeline = random_pipeline(seed)
    rows = next(iter(named_rows(pipeline)))[1]
    climb = climb_from(pipeline, rows, lambda _, times: times.window, seed)
    for _ in range(10):
        climb.go_on(2)
        whole = pipeline.run(climb.now)
        numbers = [number for row in climb.now for number in row]
        assert [climb.times.start[n] for n in numbers] == [whole.start[n] for n in numbers]
        assert climb.times.window == whole.window


@pytest.mark.parametrize("seed", SEEDS)
def test_every_order_that_is_built_finishes_and_fits(seed):
    pipeline = random_pipeline(seed)
    for rule in rules(pipeline):
        rows = construct(pipeline, rule)
        if rows is not None:
            check_order(pipeline.order(rows))
            assert pipeline.fits(rows)


def test_what_ranks_hold_is_counted_as_schedules_count_it():
    pipeline = random_pipeline(3)
    for rows in some_rows(3):
        order = pipeline.order(rows)
        expected = []
        for actions in order:
            held = hold(actions)
            each = np.array([pipeline.stages[stage].held for stage in held.stages])
            more = np.array([pipeline.stages[stage].halfway for stage in held.stages])
            expected.append((held.in_flight @ each + held.halfway @ more).max())
        assert pipeline.most_held(rows) == pytest.approx(expected)


def test_an_order_that_waits_for_itself_is_told():
    pipeline = random_pipeline(1)
    rows = [list(row) for row in dict(named_rows(pipeline))["1f1b"]]
    # The last rank waits for the second microbatch before it lets the first one back.
    rows[-1].insert(
        0,
        rows[-1].pop(
            next(
                k
                for k, n in enumerate(rows[-1])
                if n % pipeline.microbatches == pipeline.microbatches - 1
            )
        ),
    )
    assert pipeline.run(tuple(map(tuple, rows))) is None


def test_rows_and_orders_are_the_same_thing():
    pipeline = random_pipeline(2)
    for rows in some_rows(2):
        assert pipeline.rows(pipeline.order(rows)) == rows


def test_the_longest_rank_is_within_the_window():
    pipeline = random_pipeline(4)
    for rows in some_rows(4):
        times = pipeline.run(rows)
        work = max(sum(pipeline.lengths[number] for number in row) for row in rows)
        assert work <= longest_rank(rows, times) <= times.window


def test_kicks_are_the_same_for_the_same_seed():
    pipeline = random_pipeline(5)
    rows = dict(named_rows(pipeline))["1f1b"]

    def kicked(seed):
        climb = climb_from(pipeline, rows, lambda _, times: times.window, seed)
        climb.kick(20)
        return climb.now

    assert kicked(1) == kicked(1) != kicked(2)
    assert isinstance(
        climb_from(pipeline, rows, lambda _, times: times.window, 1).random, random.Random
    )
