"""A simulated run is a run: measured, accounted for and drawn as a traced one is."""

from __future__ import annotations

import pytest
from support.timelines.engine_runs import UNITS, run_order, timeline_of

from debubble.ledger.ledger import build_ledger
from debubble.simulate.as_timeline import as_timeline
from debubble.simulate.communication import OF_ONE_SCHEDULE, Communication
from debubble.simulate.theory import bubble_fraction, ideal_bubble
from debubble.timeline.figures import measure_pipeline
from debubble.timeline.schedules import SCHEDULES, order_of, placement_of

MS = 1_000_000
ALL = [way for way in Communication if way not in OF_ONE_SCHEDULE]


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("communication", ALL)
def test_the_bubble_measured_on_it_is_the_orders_own_and_the_schedule_is_told(name, communication):
    figures = measure_pipeline(timeline_of(name, 4, 8, communication=communication), 0)
    if communication in {Communication.LATENCY, Communication.ASYNCHRONOUS}:
        expected = ideal_bubble(order_of(name, 4, 8), UNITS)
        assert figures.bubble_fraction == pytest.approx(expected, abs=1e-9)
    assert (figures.schedule, figures.microbatches) == (name, 8)
    assert figures.gaps == ()
    assert [rank.stages for rank in figures.ranks] == list(
        map(tuple, map(sorted, placement_of(name, 4)))
    )


def test_the_three_definitions_of_the_bubble_are_each_measured():
    figures = measure_pipeline(timeline_of("zbv", 4, 8), 0)
    assert figures.bubble_fraction == pytest.approx(0.0588, abs=1e-4)
    assert figures.longest_stage_bubble == 0
    figures = measure_pipeline(timeline_of("1f1b", 4, 8), 0)
    assert figures.bubble_fraction == bubble_fraction(4, 8)
    assert figures.bubble_over_ideal == pytest.approx(3 / 8)


@pytest.mark.parametrize("communication", ALL)
def test_message_kernels_seem_busy_and_are_not(communication):
    timeline = timeline_of("1f1b", 4, 8, communication=communication, one_way=MS // 5)
    figures = measure_pipeline(timeline, 0)
    assert figures.useful_fraction == pytest.approx(1 - figures.bubble_fraction)
    spins = communication not in {Communication.LATENCY, Communication.ASYNCHRONOUS}
    # A kernel spins from its post to its end; a message that nobody waits for is on the wire only.
    assert figures.apparent_fraction > figures.useful_fraction + (0.1 if spins else 0.0)
    assert figures.apparent_fraction < 1


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "dualpipe-v"])
@pytest.mark.parametrize("communication", ALL)
def test_its_ledger_adds_up_and_its_replay_lands_on_it(name, communication):
    timeline = timeline_of(name, 4, 8, communication=communication, one_way=MS // 5)
    ledger = build_ledger(timeline, 0, [0])
    assert sum(ledger.causes().values()) == ledger.total_ns
    assert ledger.replay_error == 0
    assert ledger.gaps == ()


def test_what_equal_stages_would_buy_is_what_they_do_buy():
    order = order_of("1f1b", 4, 8)
    uneven = {"F": [1, 1, 1, 2], "B": [2, 2, 2, 4]}
    even = {"F": 1.25, "B": 2.5}
    how = {"communication": Communication.FUSED, "one_way": MS // 10}
    timeline = as_timeline(*run_order(order, uneven, **how))
    ledger = build_ledger(timeline, 0, [0])
    expected = int(run_order(order, even, **how)[1].window_ns)
    assert ledger.saving_of("imbalance").batch_latency_ns == expected
