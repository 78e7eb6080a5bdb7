"""The planned step beside the measured one: what is drawn is what was predicted."""

from __future__ import annotations

import pytest
from support.timelines.engine_runs import planned_run

from debubble.plan.lever import Permissions
from debubble.plan.plan import make_plan
from debubble.plan.request import Planned
from debubble.report.answers.plan import answer_of_plan
from debubble.report.html.plan import plan_report, views_of_plan
from debubble.report.html.views import PipelineView
from debubble.report.plan import plan_page
from debubble.timeline.figures import measure_pipeline
from debubble.timeline.job import Basis


@pytest.mark.parametrize(
    ("traced", "now"), [(Basis.PROFILED, "measured"), (Basis.UNPROFILED, "now (simulated)")]
)
def test_both_steps_are_drawn_on_the_basis_of_the_plan_and_last_as_it_says(traced, now):
    baseline, timeline = planned_run("1f1b", 4, 8, split=(3, 3, 3, 7))
    assert baseline.basis == Basis.PROFILED
    plan = make_plan(baseline, timeline)
    shown = PipelineView(timeline=timeline, figures=measure_pipeline(timeline, 0), ledger=None)
    compared = views_of_plan(plan, shown, traced)
    answer = answer_of_plan(Planned(plan=plan))
    report = plan_report(answer, shown, compared, plan_page(answer), "traces")
    board = report.boards[0]
    assert [slot.title for slot in board.slots] == [now, "planned"]
    views = [report.views[slot.views[0]] for slot in board.slots]
    lengths = [view["length"] * view["tick_ns"] for view in views]
    assert lengths[0] == pytest.approx(baseline.window_ns, rel=0.01)
    assert lengths[1] == pytest.approx(plan.best.window_ns, rel=0.02)
    numbers = next(one for one in report.sections if "<h2>Numbers</h2>" in one)
    assert all(name in numbers for name in ("bubble", "batch latency"))


def test_where_nothing_is_to_be_done_nothing_is_drawn():
    run = planned_run("forward-only", 2, 64, split=(4, 4))
    plan = make_plan(*run, allowed=Permissions(barred=frozenset({"microbatches", "schedule"})))
    assert plan.best is None
    shown = PipelineView(timeline=run[1], figures=measure_pipeline(run[1], 0), ledger=None)
    assert views_of_plan(plan, shown, Basis.PROFILED) == ()
