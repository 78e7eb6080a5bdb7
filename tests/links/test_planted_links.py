"""Simulated runs with one slow hop: it is named, its way and its price too; no false alarms."""

from __future__ import annotations

import pytest
from support.timelines.noisy_links import Case, tell

STEADY = {"noise": 0.03, "unlike": 0.0, "tails": 0.0}
MEETING = (
    Case(schedule="1f1b", **STEADY),
    Case(schedule="gpipe", rendezvous=True, **STEADY),
    Case(schedule="1f1b", ranks=8, microbatches=16, **STEADY),
)
# What a buffered message does not show is its hop's median: a few steps average that out.
BUFFERED = (
    Case(schedule="gpipe", steps=6, **STEADY),
    Case(schedule="forward-only", steps=6, **STEADY),
)
HOPS = ((1, 2), (2, 3), (2, 1), (0, 1))
SHARES = (0.5, 0.25, 0.1)
NOISY = (
    Case(schedule="1f1b"),
    Case(schedule="gpipe"),
    Case(schedule="forward-only"),
    Case(schedule="gpipe", rendezvous=True),
    Case(schedule="1f1b", ranks=8, microbatches=16),
)


def hops_of(case):
    return [hop for hop in HOPS if case.schedule != "forward-only" or hop[0] < hop[1]]


def name_of(case):
    return f"{case.schedule}-{case.ranks}-{'meet' if case.rendezvous else 'buffered'}"


@pytest.mark.slow
@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("case", [*MEETING, *BUFFERED], ids=name_of)
def test_a_slow_hop_is_named_with_its_direction_and_its_price(case, share):
    for seed, hop in enumerate(hops_of(case)):
        told = tell(case, seed, hop, 1 / share)
        assert told.slow == [hop]
        assert told.health.slow[0].cost_ns == pytest.approx(told.true_cost_ns, rel=0.05)


def test_the_other_way_of_a_slow_exchange_is_not_blamed():
    told = tell(MEETING[0], 0, (1, 2), 4.0)
    back = next(one for one in told.health.hops if one.hop == (2, 1))
    assert back.judgement.dragged
    assert back.cost_ns == 0
    assert back.times.both_ways.median_ns > 3 * back.times.one_way.median_ns


def false_alarms(seeds):
    return [seed for seed in seeds if tell(NOISY[seed % len(NOISY)], seed).slow]


@pytest.mark.slow
def test_healthy_runs_raise_no_alarm():
    assert len(false_alarms(range(50))) <= 1


@pytest.mark.accuracy
def test_a_thousand_healthy_runs_raise_ten_alarms_at_most():
    assert len(false_alarms(range(1000))) <= 10


def test_too_few_messages_make_no_verdict():
    told = tell(Case(schedule="gpipe", microbatches=2, steps=1, rendezvous=True), 0, (1, 2), 10.0)
    assert {one.judgement.verdict for one in told.health.hops} == {"unknown"}
