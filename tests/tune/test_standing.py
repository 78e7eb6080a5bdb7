"""How settings stand, and which run comes next: by runs that were made up."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.measurements import sampled

from debubble.tune.journal import Run
from debubble.tune.loop import Budget, Next, Stop, decide
from debubble.tune.prospects import Prospects, Standing
from debubble.tune.setting import Setting
from debubble.tune.trial import Kind, Outcome

NOW = Setting(split=(3, 5), microbatches=8)
EVEN = Setting(split=(4, 4), microbatches=8)
NOTHING = Prospects(tries=(), untellable=(), refused=())


def run_of(number, setting, step_s, unprofiled=(), spread=0.001):
    steps = [step_s * (1 + spread * offset) for offset in (-1, 0, 1, -1, 0, 1)]
    measurement = sampled(steps, unprofiled_s=tuple((None, one) for one in unprofiled))
    return Run(
        number=number,
        token="",
        setting=setting,
        why="",
        began_s=0.0,
        expected=None,
        outcome=Outcome(kind=Kind.MEASURED, seconds=10.0, measurement=measurement),
    )


def standing_of(*runs, now=NOW):
    numbered = [replace(run, number=number) for number, run in enumerate(runs, start=1)]
    return Standing(now=now, runs=tuple(numbered))


def next_of(standing, runs=10):
    budget = Budget(runs=runs, seconds=None, timeout_s=None)
    return decide(standing, budget, lambda: NOTHING)


def test_rates_are_of_steps_without_the_profiler_where_every_run_timed_some():
    plain = [run_of(1, NOW, 1.0, (0.8, 0.8)), run_of(2, EVEN, 0.8, (0.4, 0.4))]
    assert standing_of(*plain).gain_of(EVEN) == pytest.approx(1.0)
    once = [plain[0], run_of(2, EVEN, 0.8, (0.4,))]
    assert standing_of(*once).gain_of(EVEN) == pytest.approx(0.25)


def test_a_pace_that_changes_steadily_is_taken_out_between_runs_of_the_first_setting():
    # Slower by a twentieth with each run; at one pace the even split takes half the time.
    other = Setting(split=(5, 3), microbatches=8)
    shares = ((NOW, 1.0), (EVEN, 0.5), (other, 2.0), (other, 2.0), (NOW, 1.0))
    runs = [run_of(0, one, (1 + 0.05 * n) * share) for n, (one, share) in enumerate(shares)]
    assert standing_of(*runs).gain_of(EVEN) == pytest.approx(1.0, abs=0.02)


def test_the_first_setting_runs_last():
    runs = [run_of(0, NOW, 1.0), run_of(0, EVEN, 0.8)]
    order = []
    while isinstance(chosen := next_of(standing_of(*runs)), Next):
        order.append(chosen.setting)
        runs.append(run_of(0, chosen.setting, 0.8 if chosen.setting == EVEN else 1.0))
    assert order == [EVEN, NOW]


def test_with_one_run_left_it_is_that_of_the_first_setting():
    chosen = next_of(standing_of(run_of(0, NOW, 1.0), run_of(0, EVEN, 0.8)), runs=3)
    assert chosen.setting == NOW


def test_where_two_runs_each_leave_it_open_a_third_is_made_and_no_fourth():
    near = [run_of(0, NOW, 1.0, spread=0.1), run_of(0, EVEN, 0.99, spread=0.1)]
    chosen = next_of(standing_of(*near, *near))
    assert chosen.setting == EVEN
    assert isinstance(next_of(standing_of(*near, *near, *near)), Stop)


@pytest.mark.parametrize(("step_s", "idle"), [(0.995, True), (0.9, False)])
def test_overlap_that_changes_nothing_is_seen(step_s, idle):
    off, on = replace(NOW, overlap=False), replace(NOW, overlap=True)
    standing = standing_of(run_of(0, off, 1.0), run_of(0, on, step_s), now=off)
    assert standing.overlap_is_idle(0.02) is idle
