"""The planned step beside the measured one: what is drawn is what was predicted."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.timelines.engine_runs import planned_run
from support.traces.read_once import analyse_recording
from support.traces.recordings import H200

from debubble.plan.lever import Permissions
from debubble.plan.plan import make_plan
from debubble.report.html.reports import plan_report
from debubble.report.text import Page
from debubble.timeline.job import Basis


@pytest.mark.parametrize("now", ["measured", "now (simulated)"])
def test_both_steps_are_drawn_on_the_basis_of_the_plan_and_last_as_it_says(now):
    run = analyse_recording(H200 / "1f1b_p3_m7")
    plan = run.plan()
    if now != "measured":
        plan = replace(plan, baseline=replace(plan.baseline, basis=Basis.UNPROFILED))
    report = plan_report(run, plan, Page(answer="x"), "traces")
    [board] = report.boards
    assert [slot.title for slot in board.slots] == [now, "planned"]
    views = [report.views[slot.views[0]] for slot in board.slots]
    lengths = [view["length"] * view["tick_ns"] for view in views]
    assert lengths[0] == pytest.approx(plan.baseline.window_ns, rel=0.02)
    assert lengths[1] == pytest.approx(plan.best.window_ns, rel=0.02)


def test_where_nothing_is_to_be_done_the_run_is_drawn_as_it_is():
    run = analyse_recording(H200 / "1f1b_p3_m7")
    nothing = Permissions(barred=frozenset({"microbatches", "schedule"}))
    plan = make_plan(*planned_run("forward-only", 2, 64, split=(4, 4)), allowed=nothing)
    assert plan.best is None
    report = plan_report(run, plan, Page(answer="x"), "traces")
    assert [slot.title for slot in report.boards[0].slots] == [""]
