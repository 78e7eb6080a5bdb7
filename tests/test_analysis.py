"""One run, every fact about it once: what theory says, and how often things are worked out."""

from __future__ import annotations

import pytest
from making import H200

from debubble.analysis import analyse_found
from debubble.fleet.question import Question
from debubble.schedules import Statement, order_of, state_schedule
from debubble.simulate.theory import ideal_bubble
from debubble.trace.run import find_run


def analysis(name, statement=None):
    return analyse_found(find_run([str(H200 / name)]), Question(statement=statement))


def test_a_true_statement_changes_nothing():
    without, stated = analysis("1f1b_p3_m7"), analysis("1f1b_p3_m7", state_schedule("1f1b"))
    assert stated.warnings == without.warnings
    assert stated.theory == without.theory == pytest.approx(2 / 9)
    assert stated.theory_of_schedule == without.theory_of_schedule == pytest.approx(2 / 9)


def test_an_order_of_ones_own_is_used_where_no_schedule_is_recognised():
    own = Statement(text="own.csv", order=order_of("gpipe", 3, 7))
    assert analysis("1f1b_p3_m7", own).theory_of_schedule == pytest.approx(2 / 9)


@pytest.mark.parametrize("name", ["zb-h1", "zbv", "looped-bfs"])
def test_the_theory_is_that_of_what_was_stated_with_backward_passes_cut_in_half(name):
    run = analysis("1f1b_p3_m7", state_schedule(name))
    one = run.pipeline
    kinds = {kind.name: 0.0 for kind in {row.kind for row in one.stages}}
    for row in one.stages:
        kinds[row.kind.name] += row.median_ns
    halves = {"F": kinds["F"], "B": kinds["B"], "I": kinds["B"] / 2, "W": kinds["B"] / 2}
    expected = ideal_bubble(order_of(name, 3, 7), halves)
    assert run.theory_of_schedule == pytest.approx(expected, abs=1e-9)
    assert run.theory_of_schedule < 0.22
    assert run.theory == (pytest.approx(2 / 9) if name == "zb-h1" else None)


def test_a_schedule_that_cannot_be_has_no_theory():
    run = analysis("1f1b_p3_m7", state_schedule("interleaved-1f1b", 3))
    assert run.theory is None
    assert run.theory_of_schedule is None


def test_backward_passes_that_never_ran_have_no_theory():
    assert analysis("fwd_closed_m4", state_schedule("1f1b")).theory_of_schedule is None
