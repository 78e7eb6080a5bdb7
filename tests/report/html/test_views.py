"""The page holds what was measured: its columns, opened again, say what the ledger says."""

from __future__ import annotations

import base64
from dataclasses import replace

import numpy as np

from debubble.ledger.causes import CAUSES, Cause
from debubble.report.html.views import tick_for, views_of


def opened(text, kind):
    return np.frombuffer(base64.b64decode(text), dtype=f"<{kind}").astype(np.int64)


def test_passes_are_those_of_the_step(recorded):
    views, left_out = views_of(recorded)
    assert left_out == 0
    assert [view["step"] for view in views] == [step.number for step in recorded.ledger.steps]
    for view in views:
        passes = recorded.timeline.passes
        mine = passes.where(passes.step == view["step"])
        begin = mine.start_ns.min()
        starts = opened(view["passes"]["start"], "u4")
        assert view["tick_ns"] == 1
        assert sorted(starts) == sorted(mine.start_ns - begin)
        assert sum(view["passes"]["counts"]) == len(mine)
        assert view["length"] == mine.end_ns.max() - begin


def test_waits_sum_to_the_ledger_to_the_nanosecond(recorded):
    totals = dict.fromkeys(CAUSES, 0)
    for view in views_of(recorded)[0]:
        waits = view["waits"]
        lengths = opened(waits["end"], "u4") - opened(waits["start"], "u4")
        for cause, length in zip(opened(waits["cause"], "u1"), lengths, strict=True):
            totals[CAUSES[cause]] += int(length)
    expected = recorded.ledger.causes()
    for cause in CAUSES:
        if cause not in (Cause.COMPUTE, Cause.COLLECTIVE):
            assert totals[cause] == expected[cause]


def test_the_replay_has_the_measured_length_and_the_ideal_one_is_shorter(recorded):
    for view, replays in zip(views_of(recorded)[0], recorded.ledger.replays, strict=True):
        replayed, ideal = view["replays"]
        assert replayed["length"] == replays.unchanged_ns
        assert ideal["length"] == replays.without_ns["all",] < view["length"]
        assert opened(ideal["end"], "u4").max() == ideal["length"]


def test_memory_reaches_its_peak_in_some_step_of_a_thinned_curve(recorded):
    [trace] = [trace for trace in recorded.traces if trace.rank == 0]
    assert len(trace.memory.start_ns) > 1400
    curves = [view["memory"][0] for view in views_of(recorded)[0]]
    highest = max(np.frombuffer(base64.b64decode(one["bytes"]), "<f4").max() for one in curves)
    rank = recorded.figures.ranks[0]
    assert highest <= rank.memory.peak_bytes * 1.0001
    assert all(len(opened(one["time"], "u4")) <= 1401 for one in curves)
    for one in curves:
        assert (np.diff(opened(one["time"], "u4")) >= 0).all()


def test_a_page_that_is_full_says_what_it_left_out(recorded):
    views, left_out = views_of(recorded, most_bytes=1)
    assert (len(views), left_out) == (1, len(recorded.ledger.steps) - 1)


def test_ticks_count_any_length_in_32_bits():
    assert tick_for(2**31) == 1
    assert tick_for(2**31 + 1) == 2
    assert 3_600 * 10**9 // tick_for(3_600 * 10**9) <= 2**31


def test_microbatches_are_numbered_beyond_sixteen_bits(recorded):
    passes = recorded.timeline.passes
    later = replace(passes, microbatch=passes.microbatch + 40_000)
    timeline = replace(recorded.timeline, passes=later)
    shown = replace(recorded, timeline=timeline, ledger=None, traces=())
    [view, *_] = views_of(shown)[0]
    assert set(opened(view["passes"]["microbatch"], "i4")) == {40_000, 40_001, 40_002, 40_003}
