"""A plan at another context length: what becomes of the run, and of each option."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.simulator.allocator import allocator_run
from support.timelines.engine_runs import planned_run

from debubble.plan.change import Change
from debubble.plan.context_length import at_length
from debubble.plan.lever import Permissions
from debubble.plan.option import headroom_after
from debubble.plan.plan import make_plan
from debubble.plan.request import Planned, Stated, Tokens
from debubble.report.answers.context_length import say_fate
from debubble.report.answers.plan import answer_of_plan
from debubble.report.plan import plan_page
from debubble.simulate.costs.memory import fit_memory

LAYERS = (4, 4, 4, 4)


def plan_of(name="1f1b", limit=None, **how):
    baseline, timeline = planned_run(name, 4, 8, split=LAYERS, **how)
    if limit is not None:
        memory = fit_memory([allocator_run(name, 4, 8, LAYERS)])
        baseline = replace(baseline, memory=memory)
        baseline = replace(baseline, limits=(limit(baseline),) * 4)
    return make_plan(baseline, timeline)


def test_passes_that_grow_as_tokens_do_make_the_same_bubble_twice_as_long():
    run = planned_run("1f1b", 4, 8, split=LAYERS)
    plan = make_plan(*run, allowed=Permissions(hold="microbatch"))
    other = at_length(plan, 2.0)
    assert other.unchanged.window_ns == pytest.approx(2 * plan.baseline.window_ns, rel=0.001)
    assert other.unchanged.bubble_fraction == pytest.approx(3 / 11, abs=0.001)
    # Nothing but the size of all passes differs: every option gains what it gained.
    for one in other.survivors:
        assert one.gain == pytest.approx(one.option.throughput_gain, abs=0.001)
    assert say_fate(other, other.best) == "still best"
    assert [one.rank for one in other.survivors] == list(range(1, len(other.survivors) + 1))


def test_a_larger_batch_is_the_best_at_no_length_where_it_would_change_training():
    other = at_length(plan_of(weight_share=0.5), 2.0)
    assert any(one.sure for one in other.survivors if one.changes_training)
    larger = [one.changes_training for one in other.survivors]
    assert larger == sorted(larger)
    assert not other.best.changes_training


def test_how_surely_passes_grow_counts_for_the_run_and_not_between_its_options():
    other = at_length(plan_of(noise=0.02), 4.0)
    unchanged = other.unchanged
    assert unchanged.high_ns / unchanged.low_ns > 1.4
    alike = [one for one in other.survivors if one.option.change.hold == "microbatch"]
    assert max((1 + one.high) / (1 + one.low) for one in alike) < 1.15
    # What cuts microbatches smaller rests on how they shrink, at any length.
    cut = [one for one in other.survivors if one.option.change.hold == "batch"]
    assert min((1 + one.high) / (1 + one.low) for one in cut) > 1.15


def test_an_option_that_no_longer_fits_is_said_to_and_has_no_rank():
    def just_enough(baseline):
        peaks = headroom_after(baseline, Change(token_scale=2.0))
        return 1.001 * max(one.peak_bytes for one in peaks)

    plan = plan_of(limit=just_enough)
    other = at_length(plan, 2.0)
    assert other.unchanged.fits_memory is True
    lost = [one for one in other.survivors if one.there.fits_memory is False]
    assert lost
    for one in lost:
        assert say_fate(other, one).startswith("no longer fits: ")
        assert say_fate(other, one).endswith(" short")
    assert {one.rank for one in lost} == {None}
    assert other.survivors[-len(lost) :] == tuple(lost)


def test_a_run_that_does_not_fit_at_that_length_is_said_first():
    def too_little(baseline):
        now, then = (
            max(one.peak_bytes for one in headroom_after(baseline, Change(token_scale=scale)))
            for scale in (1.0, 2.0)
        )
        return (now + then) / 2

    plan = plan_of(limit=too_little)
    answer = answer_of_plan(
        Planned(
            plan=plan,
            length=at_length(plan, 2.0),
            stated=Stated(tokens=Tokens(measured=1024)),
        )
    )
    findings = plan_page(answer).findings
    said = next(one for one in findings if one.startswith("With 2,048 tokens"))
    assert "it does not fit: a rank would need" in said


def test_json_holds_each_option_by_its_number_and_says_what_is_assumed():
    plan = plan_of()
    answer = answer_of_plan(
        Planned(
            plan=plan,
            length=at_length(plan, 2.0),
            stated=Stated(tokens=Tokens(measured=512)),
        )
    )
    found = answer.to_dict()["context_length"]
    assert (found["token_scale"], found["tokens"]) == (2.0, 1024)
    assert {one["option"] for one in found["options"]} == set(range(len(plan.options)))
    for one in found["options"]:
        low, high = one["interval"]["throughput_gain_fraction"]
        assert low < one["throughput_gain_fraction"] < high
    assert any("attention is not measured apart" in said for said in found["assumptions"])
