"""Two runs as one: what they add to each other, where they contradict, and who is a stranger."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support.traces.read_once import build_recording
from support.traces.recordings import H200

from debubble.errors import Code, UsageError
from debubble.simulate.source import measure_source, pool_sources
from debubble.timeline.figures import measure_pipeline


def source_of(folder):
    timeline = build_recording(folder)
    return measure_source(timeline, measure_pipeline(timeline, 0))


@pytest.fixture(scope="module")
def run():
    return source_of(H200 / "1f1b_p2_m4")


def with_passes(source, factor, only=None):
    base = {
        one: log + (np.log(factor) if only is None or one[0] == only else 0.0)
        for one, log in source.passes.base.items()
    }
    return replace(source, passes=replace(source.passes, base=base))


def with_messages(source, factor):
    return replace(
        source,
        wires=replace(source.wires, message_bytes=round(source.wires.message_bytes * factor)),
    )


def test_a_run_and_itself_are_that_run_with_twice_the_sample(run):
    pooled = pool_sources(run, run)
    assert pooled.same_tokens
    assert pooled.gaps == ()
    assert pooled.source.passes.base == pytest.approx(run.passes.base)
    assert len(pooled.source.passes.residuals) == 2 * len(run.passes.residuals)
    assert len(pooled.source.wires.body) == 2 * len(run.wires.body)
    assert pooled.source.wires.one_way == pytest.approx(run.wires.one_way)


def test_costs_that_contradict_each_other_are_named_with_their_figure(run):
    gaps = pool_sources(run, with_passes(run, 1.5, only=0)).gaps
    assert [gap.code for gap in gaps] == [Code.COSTS_DIFFER]
    assert gaps[0].message.startswith("F takes 1.50 times as long a layer")


def test_costs_within_their_spread_are_no_contradiction(run):
    assert pool_sources(run, with_passes(run, 1.01)).gaps == ()


def test_messages_tell_how_many_tokens_the_other_run_has(run):
    pooled = pool_sources(run, with_messages(with_passes(run, 1.8), 2))
    assert pooled.token_ratio == 2
    assert not pooled.same_tokens
    growth = pooled.source.passes.growth[0, False]
    assert growth.times(2) == pytest.approx(1.8)
    assert growth.times(4) == pytest.approx(3.4)


def test_tokens_that_are_stated_must_agree_with_the_messages(run):
    with pytest.raises(UsageError, match="4 times as many tokens, but its messages are 2 times"):
        pool_sources(run, with_messages(run, 2), stated_ratio=4.0)


def test_without_sizes_of_messages_tokens_must_be_stated(run):
    nameless = replace(run, wires=replace(run.wires, message_bytes=-1))
    assert pool_sources(run, with_passes(nameless, 1.8), stated_ratio=2.0).token_ratio == 2.0
    with pytest.raises(UsageError, match="the tokens of the two runs are unknown"):
        pool_sources(run, nameless)


def test_another_model_is_refused(run):
    with pytest.raises(UsageError, match="layers of the two runs: 16 and 17"):
        pool_sources(run, replace(run, split=(8, 9)))
    with pytest.raises(UsageError, match="2 and 4 ranks"):
        pool_sources(run, source_of(H200 / "fwd_closed_m4"))


def test_slopes_are_brought_together_without_changing_what_was_seen(run):
    beside = run.passes.beside
    flat = replace(run, passes=run.passes.with_slopes(0.0, beside))
    steep = replace(run, passes=run.passes.with_slopes(0.1, beside))
    joined = pool_sources(flat, steep)
    assert joined.gaps == ()
    assert joined.source.passes.slope == 0.1
    assert joined.source.passes.base == pytest.approx(steep.passes.base)


def test_what_messages_do_to_compute_is_told_by_the_run_that_shows_it(run):
    def with_beside(beside, *, tells):
        model = run.passes.with_slopes(run.passes.slope, beside)
        shares = dict.fromkeys(model.shares, 0.5)
        return replace(run, passes=replace(model, shares=shares, tells_beside=tells))

    unsure, sure = with_beside(0.05, tells=False), with_beside(0.2, tells=True)
    for first, second in ((unsure, sure), (sure, unsure)):
        joined = pool_sources(first, second).source.passes
        assert (joined.beside, joined.tells_beside) == (0.2, True)
    # Where neither shows it, or both do, the first counts.
    assert pool_sources(unsure, with_beside(0.2, tells=False)).source.passes.beside == 0.05
    assert pool_sources(sure, with_beside(0.05, tells=True)).source.passes.beside == 0.2
