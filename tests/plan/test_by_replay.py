"""A run that its simulation misses gets what the replay prices."""

from __future__ import annotations

from dataclasses import replace
from math import log

import numpy as np
import pytest
from support.timelines.engine_runs import MS, planned_run

from debubble.ledger.hop_health import account_for
from debubble.plan.plan import make_plan
from debubble.report.answers.plan import answer_of_plan
from debubble.timeline.figures import measure_pipeline

WIRE = 4 * MS


@pytest.fixture(scope="module")
def slow_hop():
    wire_ns = np.rint(np.array([1, 6, 1]) * WIRE).astype(np.int64)
    baseline, timeline = planned_run("1f1b", 4, 8, split=(4, 4, 4, 4), wire_ns=wire_ns)
    return baseline, timeline, account_for(timeline, measure_pipeline(timeline, 0))


def test_a_run_that_is_missed_is_planned_by_its_replay(slow_hop):
    baseline, timeline, ledger = slow_hop
    missed = replace(baseline, misfit=log(0.8))
    plan = make_plan(missed, timeline, links=ledger.links, ledger=ledger)
    assert plan.options
    assert all(option.by_replay for option in plan.options)
    repair = plan.best
    assert set(repair.change.repaired) == {(1, 2), (2, 1)}
    saved_ns = baseline.window_ns - repair.window_ns
    assert saved_ns == pytest.approx(ledger.links.cost_of(repair.change.repaired), abs=1)
    answer = answer_of_plan(plan)
    assert answer.verdict.startswith("Repair hops 1:2 and 2:1: +")
    assert "throughput by replay" in answer.verdict
    assert answer.options[0].by_replay
    assert any("Simulator error 25 % (limit 5 %)" in said for said in answer.findings)
    # Nobody can be told it, and nothing is written for it.
    assert answer.tellable_framework is None
    assert not any(option.apply for option in answer.options)


def test_a_run_that_is_met_has_the_same_price_for_a_repair(slow_hop):
    baseline, timeline, ledger = slow_hop
    plan = make_plan(baseline, timeline, links=ledger.links, ledger=ledger)
    repair = next(option for option in plan.options if option.lever == "link")
    assert not repair.by_replay
    saved_ns = baseline.window_ns - repair.window_ns
    assert saved_ns == pytest.approx(ledger.links.cost_of(repair.change.repaired), abs=1)
