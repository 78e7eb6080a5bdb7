"""How settings stand, and which run comes next: by runs that were made up."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.measurements import sampled
from support.tuning import task_of

from debubble.annexes.tune.journal import Kind, Outcome, Run
from debubble.annexes.tune.loop import Next, decide
from debubble.annexes.tune.setting import Setting
from debubble.annexes.tune.standing import Candidates, Standing
from debubble.annexes.tune.task import Scope

NOW = Setting(split=(3, 5), microbatches=8)
EVEN = Setting(split=(4, 4), microbatches=8)


def run_of(number, setting, step_s, unprofiled=(), spread=0.001):
    steps = [step_s * (1 + spread * offset) for offset in (-1, 0, 1, -1, 0, 1)]
    pairs = tuple((None, one) for one in unprofiled)
    measurement = sampled(steps, unprofiled_s=pairs, unprofiled_batches_s=pairs)
    return Run(
        number=number,
        token="",
        setting=setting,
        why="",
        outcome=Outcome(kind=Kind.MEASURED, seconds=10.0, measurement=measurement),
    )


def standing_of(*runs):
    numbered = [replace(run, number=number) for number, run in enumerate(runs, start=1)]
    task = task_of(Path("nowhere"))
    task = replace(task, template=replace(task.template, now=NOW))
    return Standing(task=replace(task, scope=Scope()), runs=tuple(numbered))


def test_rates_are_of_steps_without_the_profiler_where_every_run_timed_some():
    plain = [run_of(1, NOW, 1.0, (0.8, 0.8)), run_of(2, EVEN, 0.8, (0.4, 0.4))]
    assert standing_of(*plain).gain_of(EVEN) == pytest.approx(1.0)
    once = [plain[0], run_of(2, EVEN, 0.8)]
    assert standing_of(*once).gain_of(EVEN) == pytest.approx(0.25)


def test_the_first_setting_runs_last():
    runs = [run_of(0, NOW, 1.0), run_of(0, EVEN, 0.8)]
    order = []
    while isinstance(chosen := decide(standing_of(*runs), Candidates), Next):
        setting = chosen.candidate.setting
        order.append(setting)
        runs.append(run_of(0, setting, 0.8 if setting == EVEN else 1.0))
    assert order == [EVEN, NOW]


def grown(setting, times):
    run = run_of(0, setting, 1.0)
    measurement = replace(run.outcome.measurement, microbatches=round(8 * times))
    return replace(run, outcome=replace(run.outcome, measurement=measurement))


def test_what_a_command_keeps_is_seen_even_of_a_run_that_does_not_count():
    more = Setting(split=(3, 5), microbatches=16)
    larger = grown(more, 2)
    larger = replace(larger, outcome=replace(larger.outcome, kind=Kind.OTHER_BATCH))
    standing = standing_of(run_of(0, NOW, 1.0), larger)
    assert (standing.keeps, standing.best, standing.grew(larger)) == ("microbatch", NOW, True)
