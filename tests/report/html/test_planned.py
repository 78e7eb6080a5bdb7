"""The planned step beside the measured one: what is drawn is what was predicted."""

from __future__ import annotations

import pytest
from support.timelines.engine_runs import planned_run

from debubble.plan.lever import Permissions
from debubble.plan.plan import make_plan
from debubble.plan.request import Planned
from debubble.report.answers.plan import answer_of_plan
from debubble.report.html.plan import plan_report, planned_view
from debubble.report.html.views import PipelineView
from debubble.report.plan import plan_page
from debubble.timeline.figures import measure_pipeline


def test_the_step_that_is_drawn_lasts_as_long_as_the_answer_says():
    baseline, timeline = planned_run("1f1b", 4, 8, split=(3, 3, 3, 7))
    plan = make_plan(baseline, timeline)
    planned = planned_view(plan)
    passes = planned.timeline.passes
    drawn_ns = int(passes.end_ns.max() - passes.start_ns.min())
    assert drawn_ns == pytest.approx(plan.best.window_ns, rel=0.02)
    shown = PipelineView(timeline=timeline, figures=measure_pipeline(timeline, 0), ledger=None)
    answer = answer_of_plan(Planned(plan=plan))
    report = plan_report(answer, shown, planned, plan_page(answer), "traces")
    board = report.boards[0]
    assert [slot.title for slot in board.slots] == ["measured", "planned"]
    lengths = [report.views[slot.views[0]]["length"] for slot in board.slots]
    assert lengths[0] == pytest.approx(baseline.window_ns, rel=0.01)
    assert lengths[1] == drawn_ns
    numbers = next(one for one in report.sections if "<h2>Numbers</h2>" in one)
    assert all(name in numbers for name in ("bubble", "batch latency"))


def test_where_nothing_is_to_be_done_nothing_is_drawn():
    run = planned_run("forward-only", 2, 64, split=(4, 4))
    plan = make_plan(*run, allowed=Permissions(microbatches=False, schedules=frozenset()))
    assert plan.best is None
    assert planned_view(plan) is None
