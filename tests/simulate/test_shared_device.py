"""Ranks on one device: who waits less is at work more, and slows the others."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from debubble.simulate.communication import Communication
from debubble.simulate.costs.passes import trailing_activity
from debubble.simulate.engine import Engine, run_shared
from debubble.simulate.hand_set import GivenCosts, give_lengths
from debubble.simulate.planned import plan_program
from debubble.timeline.model import PassKind
from debubble.timeline.schedules import order_of

MS = 1_000_000
SLOPE = 0.1


@pytest.fixture(scope="module")
def measured():
    program = plan_program(order_of("forward-only", 2, 200), Communication.POSTED, rendezvous=True)
    costs = GivenCosts(passes={PassKind.F: np.full(2, 5 * MS)}, one_way=5 * MS)
    lengths = give_lengths(program, costs)
    engine = Engine(program)
    run = engine.run(lengths)
    return engine, lengths, trailing_activity(run.pass_start, run.pass_end)


def shared(measured, lengths):
    engine, _, activity = measured
    return run_shared(engine, lengths, measured_activity=activity, slope=SLOPE)


def test_a_run_that_does_not_change_takes_what_it_took(measured):
    engine, lengths, _ = measured
    assert shared(measured, lengths).window_ns == engine.run(lengths).window_ns


def test_passes_that_run_beside_more_others_take_longer(measured):
    """Free wires let both ranks work all the time; the second had waited half of it."""
    _, lengths, activity = measured
    free = np.zeros_like(lengths.wire)
    run = shared(measured, replace(lengths, sending=free, wire=free, drain=free))
    middle = (run.pass_end - run.pass_start)[150]
    assert activity[150] == 1.5
    assert middle == pytest.approx(5 * MS * np.exp(SLOPE / 2), rel=0.01)


def test_many_runs_are_each_as_alone(measured):
    _, lengths, _ = measured
    half = replace(lengths, wire=lengths.wire // 2, drain=lengths.drain // 2)
    columns = [one.columns() for one in (lengths, half)]
    together = type(lengths)(
        **{name: np.stack([one[name] for one in columns], axis=1) for name in columns[0]}
    )
    alone = [int(shared(measured, one).window_ns) for one in (lengths, half)]
    assert shared(measured, together).window_ns.tolist() == alone
