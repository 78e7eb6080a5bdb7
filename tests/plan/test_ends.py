"""Stages with an embedding or a head: left without layers where that is quicker, and named."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.timelines.engine_runs import planned_run

from debubble.plan.change import Change
from debubble.plan.emit import EMITTERS
from debubble.plan.lever import Permissions
from debubble.plan.plan import make_plan
from debubble.plan.split import best_split, ends_in_layers
from debubble.report.answers.plan import answer_of_plan
from debubble.report.plan import plan_page
from debubble.timeline.model import PassKind

pytestmark = pytest.mark.slow

SERVING = {"vllm", "sglang", "tensorrt-llm"}


def run_with_ends(ranks, layers, *, embedding=0.0, head=0.0, name="1f1b", microbatches=24):
    """A run of so many layers a rank, whose ends take so many layers' worth more."""
    split = (layers,) * ranks
    baseline, timeline = planned_run(name, ranks, microbatches, split=split)
    extras = {int(PassKind.F): (embedding, head), int(PassKind.B): (embedding, head)}
    passes = replace(baseline.source.passes, extras=extras)
    return replace(baseline, source=replace(baseline.source, passes=passes)), timeline


def test_no_stage_is_left_with_nothing_to_do():
    baseline, _ = run_with_ends(4, 1, head=3.0)
    split = best_split(baseline, Change(), empty_ends=True).split
    assert min(split[:-1]) >= 1
    baseline, _ = run_with_ends(4, 4)
    assert min(best_split(baseline, Change(), empty_ends=True).split) >= 1


def test_a_run_with_a_head_alone_can_be_planned_from():
    baseline, _ = run_with_ends(4, 4, head=4.0)
    now = (6, 5, 5, 0)
    passes = replace(baseline.source.passes, layers=tuple(map(float, now)))
    source = replace(baseline.source, passes=passes, split=now)
    found = best_split(replace(baseline, source=source), Change())
    assert found.given_latency_s >= found.latency_s
    assert found.split == (5, 5, 5, 1)


@pytest.mark.parametrize("framework", [None, *EMITTERS])
def test_it_is_offered_to_those_who_can_be_told(framework):
    serves = framework in SERVING
    how = {"name": "forward-only"} if serves else {}
    baseline, timeline = run_with_ends(6, 3, head=3.2, **how)
    allowed = Permissions(framework=framework)
    splits = {one.change.split for one in make_plan(baseline, timeline, allowed=allowed).options}
    splits.discard(None)
    if framework is not None and framework.startswith("csv"):
        assert not splits
    else:
        assert any(0 in split for split in splits) is not serves


def test_head_and_embedding_are_named_in_layers():
    plan = make_plan(*run_with_ends(6, 3, embedding=0.4, head=3.2))
    answer = answer_of_plan(plan)
    assert ends_in_layers(plan.baseline) == pytest.approx((0.4, 3.2))
    assert answer.baseline.head_layers == pytest.approx(3.2)
    notes = plan_page(answer).notes
    assert any(
        one.startswith("stage 5: 3 layers + head (worth 3.2 layers); with split ")
        and one.endswith("it has 0 layers")
        for one in notes
    )
    assert any("stage 0: 3 layers + embedding (worth 0.4 layers)" in one for one in notes)
    without = plan_page(answer_of_plan(make_plan(*run_with_ends(4, 4)))).notes
    assert not any("worth of" in one for one in without)
