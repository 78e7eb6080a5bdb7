"""Deferred receives: offered where torch's runtime posts them, and predicted as it then does."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.timelines.engine_runs import MS, planned_run, run_unsteadily

from debubble.plan.advice import WORTH
from debubble.plan.change import Change
from debubble.plan.lever import Permissions
from debubble.plan.option import Idea, weigh
from debubble.plan.plan import make_plan
from debubble.plan.request import Planned
from debubble.report.answers.plan import answer_of_plan
from debubble.simulate.communication import Communication
from debubble.timeline.schedules import order_of

pytestmark = pytest.mark.slow

SPLIT = (2,) * 8
DEFERRED = Change(defer_receives=True)


def interleaved(wire_ns=2 * MS):
    return planned_run("interleaved-1f1b", 4, 8, chunks=2, split=SPLIT, wire_ns=wire_ns)


def run_by(framework, run):
    """The same run, recognised as a framework's."""
    baseline, timeline = run
    own = replace(baseline.ranks[0].parallelism, framework=framework)
    ranks = tuple(replace(rank, parallelism=own) for rank in baseline.ranks)
    return replace(baseline, source=replace(baseline.source, ranks=ranks)), timeline


def test_a_run_of_torchs_runtime_is_offered_deferred_receives():
    baseline, timeline = interleaved()
    option = next(one for one in make_plan(baseline, timeline).options if one.lever == "defer")
    assert option.change == DEFERRED
    order = order_of("interleaved-1f1b", 4, 8, 2)
    _, times = run_unsteadily(order, Communication.DEFERRED, split=SPLIT, wire_ns=2 * MS)
    assert option.window_ns == pytest.approx(int(times.window_ns), rel=0.01)


def test_what_no_recording_shows_and_older_versions_refuse_is_tried_not_recommended():
    plan = make_plan(*interleaved())
    deferred = [one for one in plan.options if one.change.defer_receives]
    assert deferred
    assert not any(one in plan.recommended for one in deferred)
    told = [one for one in answer_of_plan(Planned(plan=plan)).options if one.change.defer_receives]
    assert {one.advice for one in told} == {"try"}
    assert all(any("needs torch 2.13" in said for said in one.assumptions) for one in told)


def test_what_would_gain_less_than_is_worth_a_try_is_not_to_be_tried():
    plan = make_plan(*interleaved())
    deferred = next(one for one in plan.options if one.change.defer_receives)
    for gain, advice in ((0.0299, "noise"), (0.0301, "try"), (-0.0004, "no")):
        option = replace(deferred, throughput_gain=gain)
        told = answer_of_plan(Planned(plan=replace(plan, options=(option,))))
        assert [one.advice for one in told.options] == [advice], gain


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "forward-only"])
def test_schedules_that_post_receives_when_they_are_due_are_not(name):
    plan = make_plan(*planned_run(name, 4, 8, split=(4,) * 4))
    assert not any(one.lever == "defer" for one in plan.options)


def test_a_change_to_such_a_schedule_defers_them_where_that_adds_something():
    baseline, timeline = planned_run("1f1b", 4, 8, split=(4,) * 4, wire_ns=4 * MS)
    plan = make_plan(baseline, timeline)
    gains = {one.change: one.throughput_gain for one in plan.options}
    best = max((one for one in plan.options if one.lever == "schedule"), key=gain_of)
    both = replace(best.change, defer_receives=True)
    adds = weigh(baseline, Idea(lever="combined", change=both)).throughput_gain
    assert (both in gains) is (adds > best.throughput_gain + WORTH)


def gain_of(option):
    return option.throughput_gain


def test_it_is_written_for_torch_and_left_out_for_those_who_cannot_be_told():
    run = interleaved()
    told = answer_of_plan(Planned(plan=make_plan(*run, allowed=Permissions(framework="torch"))))
    option = next(one for one in told.options if one.lever == "defer")
    assert option.words == "receives deferred"
    assert option.change.defer_receives
    assert "ScheduleInterleaved1F1B(stages, n_microbatches=8" in option.apply["torch"]
    assert "defer_pp_recv=True" in option.apply["torch"]
    assert set(option.apply) == {"torch"}
    titan = make_plan(*run_by("torchtitan", run), allowed=Permissions(framework="torchtitan"))
    assert not any(one.change.defer_receives for one in titan.options)
    assert "receives deferred" in answer_of_plan(Planned(plan=titan)).left_out.sentence
    megatron = make_plan(*run_by("megatron", run), allowed=Permissions(framework="megatron"))
    assert not any(one.change.defer_receives for one in megatron.options)
