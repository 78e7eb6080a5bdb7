"""Many candidates in → the latency of each at its means: to choose what is worth a closer look."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from debubble.plan.baseline import Baseline
from debubble.plan.change import Change
from debubble.simulate.engine import Engine
from debubble.simulate.planned import plan_program
from debubble.simulate.predict import mean_lengths
from debubble.timeline.model import F64, I64
from debubble.units import NS_PER_S

# Splits at a time: more columns than these fit no cache.
_AT_ONCE = 1000


def quick_latency_s(baseline: Baseline, change: Change, *, slowdown: float = 1.0) -> float:
    """Return the batch latency of a change, every pass and message at its mean."""
    what_if = baseline.what_if(change)
    what_if = replace(what_if, pass_scale=what_if.pass_scale * slowdown)
    program = plan_program(
        what_if.order, what_if.communication, rendezvous=not baseline.source.wires.buffers
    )
    lengths = mean_lengths(program, baseline.source, what_if)
    return float(Engine(program).run(lengths).window_ns) * baseline.correction / NS_PER_S


def time_splits(baseline: Baseline, change: Change) -> Callable[[I64], F64]:
    """Return a function from splits, a row each, to their latencies in seconds."""
    what_if = baseline.what_if(change)
    program = plan_program(
        what_if.order, what_if.communication, rendezvous=not baseline.source.wires.buffers
    )
    stages = len(what_if.weights)
    engine = Engine(program)
    unit = mean_lengths(program, baseline.source, replace(what_if, weights=(1.0,) * stages))
    even = np.zeros(stages, dtype=np.int64) + 1
    extra = np.array(baseline.weights(tuple(even.tolist()), stages)) - 1.0

    def latencies(splits: I64) -> F64:
        found = []
        for begin in range(0, len(splits), _AT_ONCE):
            weights = splits[begin : begin + _AT_ONCE].T + extra[:, None]
            passes = np.rint(unit.passes[:, None] * weights[program.passes.stage]).astype(np.int64)
            found.append(engine.run(replace(unit, passes=passes)).window_ns)
        return np.concatenate(found) * baseline.correction / NS_PER_S

    return latencies
