"""Planned for a framework: what it cannot be told is not weighed, and said once."""

from __future__ import annotations

import pytest
from support.traces.read_once import analyse_recording
from support.traces.recordings import DATA, H200

from debubble import api
from debubble.report.plan import plan_page

pytestmark = pytest.mark.slow

TORCH, MEGATRON = H200 / "1f1b_p3_m7", DATA / "frameworks" / "mg_2321"


def plan_of(folder, **how):
    return api.plan(analyse_recording(folder), frameworks=(), **how)


def schedules(found):
    return {one.change.schedule for one in found.options} - {None}


def test_a_run_of_a_known_framework_is_planned_for_that_unless_another_is_named():
    assert plan_of(MEGATRON).planned_for == "megatron"
    assert schedules(plan_of(MEGATRON)) <= {"interleaved-1f1b"}
    assert plan_of(MEGATRON, planned_for="torch").planned_for == "torch"
    free = plan_of(MEGATRON, planned_for="any")
    assert (free.planned_for, free.left_out) == (None, None)
    assert schedules(free) - {"interleaved-1f1b"}


def test_a_run_of_nobodys_framework_is_planned_for_any():
    found = plan_of(TORCH)
    assert found.planned_for is None
    assert {"zb-h2", "zbv"} <= schedules(found)


def test_to_write_for_a_framework_is_to_plan_for_it_unless_another_is_named():
    assert plan_of(TORCH, emit="megatron").planned_for == "megatron"
    assert plan_of(TORCH, emit="torchtitan@main").planned_for == "torchtitan@main"
    assert plan_of(TORCH, emit="megatron", planned_for="any").planned_for is None


def test_the_best_of_what_a_framework_can_be_told_is_combined_before_anything_is_ranked():
    """Ranked over all schedules, Megatron was left with the split alone."""
    told = plan_of(TORCH, planned_for="megatron")
    both = [one.change for one in told.options if one.change.split and one.change.microbatches]
    assert both
    assert {change.schedule for change in both} == {None}
    free = plan_of(TORCH)
    assert all(one.change.schedule for one in free.options if one.lever == "combined")


def test_what_is_left_out_is_said_in_one_line_and_not_refused():
    found = plan_of(TORCH, planned_for="megatron")
    assert found.left_out.sentence == (
        "megatron has no setting for: schedules gpipe, looped-bfs, zb-h1, "
        "zb-h2, interleaved-zb, zbv, dualpipe-v; transfers overlapped with compute"
    )
    assert {one.change.schedule for one in found.refused} == {"interleaved-1f1b"}
    notes = [note for note in plan_page(found).notes if "no setting" in note]
    assert notes == [f"{found.left_out.sentence}; --for any includes them"]
    assert found.overlap is None


def test_what_a_framework_has_no_words_for_at_all_leaves_nothing():
    found = plan_of(TORCH, emit="vllm")
    assert found.options == []
    assert found.verdict == (
        "No change is possible; most options are refused because vLLM has no setting to train: it "
        "serves, and the run has backward passes (1f1b)."
    )
    assert found.emitted.reason.startswith("vLLM has no setting to train")
