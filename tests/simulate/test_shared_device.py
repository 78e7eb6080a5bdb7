"""Ranks on one device: who waits less is at work more, and slows the others; elsewhere nobody."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support.timelines.engine_runs import planned_run

from debubble.plan.baseline import measure_baseline
from debubble.plan.change import Change
from debubble.plan.option import Idea, weigh
from debubble.simulate import shared_device
from debubble.simulate.communication import Communication
from debubble.simulate.costs import passes
from debubble.simulate.engine import Engine
from debubble.simulate.hand_set import GivenCosts, give_lengths
from debubble.simulate.planned import plan_program
from debubble.simulate.shared_device import run_shared, trailing_activity
from debubble.timeline.figures import measure_pipeline
from debubble.timeline.model import PassKind
from debubble.timeline.schedules import order_of

MS = 1_000_000
SLOPE, WIRE_NS = 0.1, 2 * MS


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


def test_passes_that_run_beside_more_others_take_longer(measured):
    """Free wires let both ranks work all the time; the second had waited half of it."""
    _, lengths, activity = measured
    free = np.zeros_like(lengths.wire)
    run = shared(measured, replace(lengths, sending=free, wire=free, drain=free))
    middle = (run.pass_end - run.pass_start)[150]
    assert activity[150] == 1.5
    assert middle == pytest.approx(5 * MS * np.exp(SLOPE / 2), rel=0.01)


PARTS = {"device": ("a", 0), "device_name": "NVIDIA H200", "multiprocessors": 33}


@pytest.mark.parametrize(("device", "moves"), [({"device": ("a", 0)}, False), (PARTS, True)])
def test_its_numbers_enter_no_prediction_for_ranks_with_devices_of_their_own(
    monkeypatch, device, moves
):
    """A run whose messages stall, predicted as another schedule, beside compute and as it is."""
    _, timeline = planned_run("1f1b", 4, 8, wire_ns=WIRE_NS)
    late = timeline.transfers.receive_end_ns + 6 * MS * (
        np.arange(len(timeline.transfers)) % 9 == 4
    )
    ranks = tuple(replace(rank, **device) for rank in timeline.ranks)
    timeline = replace(
        timeline, ranks=ranks, transfers=replace(timeline.transfers, receive_end_ns=late)
    )
    figures = measure_pipeline(timeline, 0)

    def predicted():
        baseline = measure_baseline(timeline, figures, layers=(2, 2, 2, 2))
        changes = Change(), Change(schedule="gpipe"), Change(schedule="zb-h1"), Change(overlap=True)
        return [weigh(baseline, Idea(lever="", change=change)).window_ns for change in changes]

    before = predicted()
    monkeypatch.setattr(shared_device, "_STALLED", 0.5)
    monkeypatch.setattr(passes, "SLOPE", 0.3)
    monkeypatch.setattr(passes, "BESIDE", 1.0)
    assert (predicted() != before) is moves
