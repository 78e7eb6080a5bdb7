"""Orders with lengths of one's own, run by the engine: shared by the tests of planned programs."""

from __future__ import annotations

import numpy as np

from debubble.schedules import order_of
from debubble.simulate.as_timeline import as_timeline
from debubble.simulate.communication import Communication
from debubble.simulate.engine import Engine
from debubble.simulate.hand_set import GivenCosts, give_lengths
from debubble.simulate.planned import plan_program
from debubble.timeline.model import PassKind

UNITS = {"F": 1, "B": 2, "I": 1, "W": 1}


def costs_of(order, units=UNITS, unit_ns=1_000_000, **more):
    """The same for every stage, or a list of one a stage."""
    stages = 1 + max(action.stage for actions in order for action in actions)
    passes = {
        PassKind[kind]: np.rint(np.broadcast_to(length, stages) * np.float64(unit_ns)).astype(int)
        for kind, length in units.items()
    }
    return GivenCosts(passes=passes, **more)


def run_order(order, units=UNITS, communication=Communication.LATENCY, *, rendezvous=False, **more):
    program = plan_program(order, communication, rendezvous=rendezvous)
    return program, Engine(program).run(give_lengths(program, costs_of(order, units, **more)))


def timeline_of(name, ranks, microbatches, chunks=None, **how):
    return as_timeline(*run_order(order_of(name, ranks, microbatches, chunks), **how))
