"""Overlap on runs whose slowdown beside messages was planted, against running it."""

from __future__ import annotations

import pytest
from support.timelines.engine_runs import MS, overlapped_ns, planned_run

from debubble.plan.levers.overlap import consider
from debubble.plan.plan import make_plan

# A run of which the first forward passes run beside messages, and later ones do not.
RUN = ("1f1b", 8, 16)
# One of which no pass does, and that waits for messages most of all.
APART = ("forward-only", 4, 12)


@pytest.mark.slow
@pytest.mark.parametrize("slowdown", [1.0, 1.2, 2.0])
def test_what_messages_do_to_compute_is_told_and_the_run_with_overlap_predicted(slowdown):
    how = {"wire_ns": 4 * MS, "slowdown": slowdown, "noise": 0.01}
    found = consider(planned_run(*RUN, **how)[0])
    assert found.slowdown == pytest.approx(slowdown, rel=0.02)
    assert found.option.window_ns == pytest.approx(overlapped_ns(*RUN, **how), rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("slowdown", "gains"), [(1.0, True), (1.03, True), (1.2, False), (2.0, False)]
)
def test_it_is_said_to_gain_exactly_where_it_does(slowdown, gains):
    how = {"wire_ns": 4 * MS, "slowdown": slowdown}
    baseline, _ = planned_run(*RUN, **how)
    assert (overlapped_ns(*RUN, **how) < baseline.source.window_ns) == gains
    found = consider(baseline)
    assert (found.option.throughput_gain > 0) == gains
    assert (found.slowdown < found.break_even) == gains


def test_at_break_even_the_run_with_overlap_takes_what_it_takes_now():
    baseline, _ = planned_run(*RUN, wire_ns=4 * MS)
    even = consider(baseline).break_even
    then = overlapped_ns(*RUN, wire_ns=4 * MS, slowdown=even)
    assert then == pytest.approx(baseline.source.window_ns, rel=0.005)


def test_where_nothing_overlaps_the_slowdown_is_unknown_and_overlap_not_recommended():
    baseline, timeline = planned_run(*APART, wire_ns=3 * MS)
    plan = make_plan(baseline, timeline)
    assert plan.overlap.slowdown is None
    assert plan.overlap.option.throughput_gain > 0.05
    assert "overlap" not in {option.lever for option in plan.recommended}
    assert any("this run has no overlap" in said for said in plan.overlap.option.assumptions)
