"""How settings stand, and which run comes next: by runs that were made up."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.measurements import sampled
from support.traces.read_once import analyse_recording
from support.traces.recordings import H200

from debubble.annexes.tune.journal import Run
from debubble.annexes.tune.loop import Budget, Next, Stop, decide
from debubble.annexes.tune.prospects import Prospects, Standing
from debubble.annexes.tune.setting import Setting
from debubble.annexes.tune.trial import Kind, Outcome, judge
from debubble.measure.prediction import Prediction
from debubble.plan.change import Change
from debubble.timeline.job import Basis

NOW = Setting(split=(3, 5), microbatches=8)
EVEN = Setting(split=(4, 4), microbatches=8)
NOTHING = Prospects(tries=(), untellable=(), refused=())


def run_of(number, setting, step_s, unprofiled=(), spread=0.001):
    steps = [step_s * (1 + spread * offset) for offset in (-1, 0, 1, -1, 0, 1)]
    pairs = tuple((None, one) for one in unprofiled)
    measurement = sampled(steps, unprofiled_s=pairs, unprofiled_batches_s=pairs)
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
    once = [plain[0], run_of(2, EVEN, 0.8)]
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


def test_what_came_slower_on_a_busy_machine_is_run_once_more():
    runs = [run_of(0, NOW, 1.0), run_of(0, EVEN, 0.9)]
    runs[1] = replace(runs[1], outcome=replace(runs[1].outcome, disturbed=True))
    chosen = next_of(standing_of(*runs))
    assert (chosen.setting, chosen.why) == (EVEN, "again: the machine was busy")
    assert next_of(standing_of(*runs, runs[1])).setting == NOW


def grown(setting, times):
    run = run_of(0, setting, 1.0)
    measurement = replace(run.outcome.measurement, microbatches=round(8 * times))
    return replace(run, outcome=replace(run.outcome, measurement=measurement))


def test_what_a_command_keeps_is_seen_even_of_a_run_that_does_not_count():
    more = replace(NOW, microbatches=16)
    larger = grown(more, 2)
    larger = replace(larger, outcome=replace(larger.outcome, kind=Kind.OTHER_BATCH))
    standing = standing_of(run_of(0, NOW, 1.0), larger)
    assert (standing.hold, standing.best, standing.grew(larger)) == ("microbatch", NOW, True)


def prediction_of(latency_s):
    return Prediction.of(
        Change(split=(4, 4)),
        words="even",
        basis=Basis.PROFILED,
        before_s=1.0,
        batch_latency_s=latency_s,
        low_s=0.95 * latency_s,
        high_s=1.05 * latency_s,
        bubble_fraction=0.3,
    )


@pytest.mark.parametrize(
    ("share", "steady", "said", "disturbed"),
    [
        (1.0, 0.0, "as predicted", False),
        (0.5, -1.0, "slower than predicted: the machine was busy, passes took", True),
        (0.5, 1.0, "slower than predicted: compute +", False),
        (2.0, -1.0, "faster than predicted: compute -", False),
    ],
)
def test_a_run_says_why_it_did_not_come_as_predicted(share, steady, said, disturbed, monkeypatch):
    monkeypatch.setattr("debubble.annexes.tune.trial.STEADY", steady)
    reading = analyse_recording(H200 / "1f1b_p2_m4")
    outcome = Outcome(kind=Kind.MEASURED, seconds=1.0, measurement=reading.measurement)
    took = reading.basis.batch_latency_ns / 1e9
    judged = judge(
        outcome,
        EVEN,
        reading,
        first=None,
        limit_bytes=None,
        prediction=prediction_of(share * took),
    )
    assert said in judged.message
    assert judged.disturbed is disturbed
