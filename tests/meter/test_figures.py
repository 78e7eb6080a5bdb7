"""What a rank says of its steps; whether it got slower; who drags."""

from __future__ import annotations

import random

import pytest
from support.requirements import need_package

need_package("torch")

from debubble.annexes.meter.figures import (
    CHART,
    RankFigures,
    RankReport,
    StepFigures,
    Straggler,
    bubble_of,
    find_straggler,
    measure_step,
)
from debubble.annexes.meter.record import Step

MS = 1_000_000
WARM_UP = CHART.reference


def row(op, start_ms, end_ms, *, stage=0, peer=-1):
    return [op, stage, 0, start_ms * MS, end_ms * MS, 8, peer, None]


def step_of(*rows, ends_ms=100):
    return Step(3, None, list(rows), start_ns=0, end_ns=ends_ms * MS)


def test_a_wait_belongs_to_the_rank_waited_for_and_is_counted_once():
    found = measure_step(
        step_of(
            row("forward-recv", 0, 10, peer=0),
            row("F", 10, 30),
            row("forward-send", 30, 31, peer=2),
            row("forward-recv", 25, 28, peer=0),  # came while the pass ran: nobody waited
            row("backward-recv", 31, 50, peer=2),
            row("backward-recv", 32, 50, peer=2),  # of the same batch of messages
            row("B", 50, 90),
        )
    )
    assert found.waits_ns == {0: 10 * MS, 2: 19 * MS}
    assert found.busy_ns == 60 * MS
    assert (found.start_ns, found.end_ns) == (10 * MS, 90 * MS)
    assert found.passes_ns == {(0, "F"): 20 * MS, (0, "B"): 40 * MS}


def figures_of(number, busy_ns):
    return StepFigures(
        number=number,
        start_ns=0,
        end_ns=busy_ns,
        step_ns=2 * busy_ns,
        busy_ns=busy_ns,
        passes_ns={(0, "F"): busy_ns},
        waits_ns={},
    )


def alarms(steps, *, noise, seed, slower_from=None, by=1.05):
    """Return the steps at which a rank with so much noise raises an alarm."""
    rng = random.Random(seed)  # noqa: S311 (noise)
    rank = RankFigures(rank=0)
    found = []
    for number in range(steps):
        busy = 100 * MS * rng.lognormvariate(0, noise)
        if slower_from is not None and number >= slower_from:
            busy *= by
        if rank.take(figures_of(number, int(busy))):
            found.append(number)
    return found, rank


@pytest.mark.parametrize("noise", [0.001, 0.01, 0.02])
def test_a_rank_that_gets_5_percent_slower_is_found_within_20_steps(noise):
    for seed in range(40):
        begins = WARM_UP + 50
        found, rank = alarms(begins + 30, noise=noise, seed=seed, slower_from=begins)
        late = [number for number in found if number >= begins]
        assert late, (noise, seed)
        assert late[0] - begins < 20
        assert rank.report().slower_by == pytest.approx(0.05, abs=0.02)
        assert abs(rank.report().since_step - begins) <= 16


def test_quiet_ranks_raise_no_alarm():
    raised = [alarms(WARM_UP + 1200, noise=0.02, seed=seed)[0] for seed in range(60)]
    assert not any(raised)


def test_steps_under_a_profiler_say_nothing():
    rank = RankFigures(rank=0)
    for number in range(WARM_UP):
        rank.take(figures_of(number, 100 * MS + number % 7))
    for number in range(WARM_UP, WARM_UP + 40):
        assert not rank.take(figures_of(number, 150 * MS), disturbed=True)
    assert rank.report().slower_by == 0.0


def report(rank, *, slower_by=0.0, since=-1, spans=None):
    return RankReport(rank=rank, steps=spans or {}, slower_by=slower_by, since_step=since)


def test_the_bubble_of_a_pipeline_is_over_one_window_of_all_ranks():
    first = report(0, spans={7: (0, 80, 60), 8: (100, 180, 60)})
    assert bubble_of([first, report(1, spans={7: (20, 100, 40), 9: (0, 1, 1)})]) == 1 - 100 / 200
    assert bubble_of([]) is None
    assert bubble_of([first, report(1, spans={9: (0, 1, 1)})]) is None


def test_the_rank_that_got_slower_by_most_drags():
    reports = [report(0), report(1, slower_by=0.04, since=400), report(2, slower_by=0.06, since=12)]
    assert find_straggler(reports) == Straggler(rank=2, since_step=12, slower_by=0.06)
    assert find_straggler([report(0), report(1)]) is None
    assert find_straggler([]) is None
