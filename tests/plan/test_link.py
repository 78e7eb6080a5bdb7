"""Slow hops, planted and recorded: what repairing one buys, against the run without it."""

from __future__ import annotations

import numpy as np
import pytest
from support.timelines.engine_runs import MS, planned_run

from debubble.ledger.hop_health import judge_links
from debubble.plan.change import Change
from debubble.plan.levers.link import repairs, words
from debubble.plan.plan import make_plan
from debubble.report.answers.plan import answer_of_plan
from debubble.timeline.figures import measure_pipeline

LAYERS = (4, 4, 4, 4)
WIRE = 4 * MS


def run_with(name, times, **how):
    """A run whose hop between ranks 1 and 2 takes so many times as long as the others."""
    wire_ns = np.rint(np.array([1, times, 1]) * WIRE).astype(np.int64)
    baseline, timeline = planned_run(name, 4, 8, split=LAYERS, wire_ns=wire_ns, **how)
    return baseline, timeline, judge_links(timeline, measure_pipeline(timeline, 0))


@pytest.mark.parametrize("times", [6, 1.7])
def test_a_repaired_link_makes_the_run_that_never_had_it(times):
    baseline, _, links = run_with("1f1b", times)
    healthy, _ = planned_run("1f1b", 4, 8, split=LAYERS, wire_ns=WIRE)
    (repair,) = repairs(baseline, links)
    # Both ways between two ranks are one repair.
    assert set(repair.option.change.repaired) == {(1, 2), (2, 1)}
    assert repair.option.window_ns == pytest.approx(healthy.window_ns, rel=0.01)
    assert repair.times_expected == pytest.approx(times, rel=0.01)
    assert repair.option.window_ns < 0.98 * baseline.window_ns


def repaired(found):
    return {frozenset(one.option.change.repaired) for one in found}


def test_all_slow_hops_of_a_rank_are_repaired_together():
    times = np.array([1, 6, 6, 1, 1, 6, 1])
    wire_ns = np.rint(times * WIRE).astype(np.int64)
    baseline, timeline = planned_run("forward-only", 8, 16, split=(2,) * 8, wire_ns=wire_ns)
    links = judge_links(timeline, measure_pipeline(timeline, 0))
    found = repairs(baseline, links)
    each = {frozenset({hop}) for hop in ((1, 2), (2, 3), (5, 6))}
    of_rank_2, of_all = frozenset({(1, 2), (2, 3)}), frozenset({(1, 2), (2, 3), (5, 6)})
    assert repaired(found) == each | {of_rank_2, of_all}
    assert words(Change(repaired=((1, 2), (2, 3)))) == (
        "repair all slow hops of rank 2, 1:2 and 2:3"
    )
    assert words(Change(repaired=((1, 2), (2, 1)))) == "repair hops 1:2 and 2:1"
    # A pipeline waits for its slowest hop: one of three repaired is nothing gained.
    gains = {frozenset(one.option.change.repaired): one.option.throughput_gain for one in found}
    assert max(gains[one] for one in each) < gains[of_all] / 2
    said = answer_of_plan(make_plan(baseline, timeline, links=links)).findings
    assert sum("repairing it " in one for one in said) <= 1


def test_other_levers_are_weighed_on_the_repaired_run_too():
    baseline, timeline, links = run_with("1f1b", 6)
    plan = make_plan(baseline, timeline, links=links)
    alone = next(one for one in plan.options if one.lever == "link")
    both = [one for one in plan.options if one.lever == "combined" and one.change.repaired]
    assert both
    assert max(one.throughput_gain for one in both) > alone.throughput_gain
    # What is not repaired is said to stay so; what is, is not.
    stays = "hop 1:2 stays 6.0 times as slow as the others"
    others = [one for one in plan.options if one.change.repaired is None]
    assert all(stays in one.assumptions for one in others)
    assert not any(stays in one.assumptions for one in (alone, *both))
