"""What theory says of a run whose schedule is stated."""

from __future__ import annotations

from functools import cache

import pytest
from support.traces.recordings import H200

from debubble.report.theory import theory_of, theory_of_schedule
from debubble.schedules import Statement, order_of, state_schedule
from debubble.simulate.theory import ideal_bubble
from debubble.timeline.build import build_timeline
from debubble.timeline.figures import measure_pipeline
from debubble.trace.run import find_run, read_run


@cache
def timeline(name):
    return build_timeline(read_run(find_run([str(H200 / name)])).ranks)


def figures(name, statement=None):
    return measure_pipeline(timeline(name), 0, statement=statement)


def test_a_true_statement_changes_nothing():
    without, stated = figures("1f1b_p3_m7"), figures("1f1b_p3_m7", state_schedule("1f1b"))
    assert stated.gaps == ()
    assert theory_of(stated) == theory_of(without) == pytest.approx(2 / 9)
    assert theory_of_schedule(stated) == theory_of_schedule(without) == pytest.approx(2 / 9)


def test_an_order_of_ones_own_is_used_where_no_schedule_is_recognised():
    own = Statement(text="own.csv", order=order_of("gpipe", 3, 7))
    assert theory_of_schedule(figures("1f1b_p3_m7", own)) == pytest.approx(2 / 9)


@pytest.mark.parametrize("name", ["zb-h1", "zbv", "looped-bfs"])
def test_the_theory_is_that_of_what_was_stated_with_backward_passes_cut_in_half(name):
    one = figures("1f1b_p3_m7", state_schedule(name))
    kinds = {kind.name: 0.0 for kind in {row.kind for row in one.stages}}
    for row in one.stages:
        kinds[row.kind.name] += row.median_ns
    halves = {"F": kinds["F"], "B": kinds["B"], "I": kinds["B"] / 2, "W": kinds["B"] / 2}
    expected = ideal_bubble(order_of(name, 3, 7), halves)
    assert theory_of_schedule(one) == pytest.approx(expected, abs=1e-9)
    assert theory_of_schedule(one) < 0.22
    assert theory_of(one) == (pytest.approx(2 / 9) if name == "zb-h1" else None)


def test_a_schedule_that_cannot_be_has_no_theory():
    one = figures("1f1b_p3_m7", state_schedule("interleaved-1f1b", 3))
    assert theory_of(one) is None
    assert theory_of_schedule(one) is None


def test_backward_passes_that_never_ran_have_no_theory():
    assert theory_of_schedule(figures("fwd_closed_m4", state_schedule("1f1b"))) is None
