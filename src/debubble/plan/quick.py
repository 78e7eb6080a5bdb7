"""Many candidates in → the latency of each at its means: to choose what is worth a closer look."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from debubble.plan.baseline import Baseline
from debubble.plan.change import Change
from debubble.simulate.covered import covered_ns
from debubble.simulate.predict import extra_layers, mean_lengths
from debubble.timeline.model import F64, I64
from debubble.units import NS_PER_S

# Splits at a time: more columns than these fit no cache.
_AT_ONCE = 100
# Until slowed passes and the messages beside them agree.
_ROUNDS = 4


def quick_latency_s(baseline: Baseline, change: Change) -> float:
    """Return the batch latency of a change, every pass and message at its mean."""
    engine = baseline.engine(change)
    lengths = mean_lengths(engine.program, baseline.source, baseline.what_if(change))
    return float(engine.windows(lengths)[0]) * baseline.correction / NS_PER_S


def slowed_latencies_s(
    baseline: Baseline, change: Change, slowdowns: F64, free_share: float = 1.0
) -> F64:
    """Return the same for several slowdowns of compute beside messages.

    `free_share` is what passes would take, against now, if no message had been beside them.
    """
    engine = baseline.engine(change)
    lengths = mean_lengths(engine.program, baseline.source, baseline.what_if(change))
    alone = lengths.passes[:, None] * np.full(len(slowdowns), free_share)
    beside = np.zeros_like(alone)
    for _ in range(_ROUNDS):
        times = engine.run(replace(lengths, passes=np.rint(alone + beside).astype(np.int64)))
        beside = (1 - 1 / slowdowns) * covered_ns(engine.program, times)
    latencies: F64 = times.window_ns * baseline.correction / NS_PER_S
    return latencies


def time_splits(baseline: Baseline, change: Change) -> Callable[[I64], F64]:
    """Return a function from splits, a row each, to their latencies in seconds."""
    what_if = baseline.what_if(change)
    engine = baseline.engine(change)
    program, stages = engine.program, len(what_if.layers)
    extra = extra_layers(program, baseline.source.passes)[:, None]
    unit = mean_lengths(program, baseline.source, replace(what_if, layers=(1.0,) * stages))
    one_layer = unit.passes[:, None] / (1 + extra)

    def latencies(splits: I64) -> F64:
        found = []
        for begin in range(0, len(splits), _AT_ONCE):
            held = splits[begin : begin + _AT_ONCE].T[program.passes.stage] + extra
            passes = np.rint(one_layer * held).astype(np.int64)
            found.append(engine.windows(replace(unit, passes=passes)))
        return np.concatenate(found) * baseline.correction / NS_PER_S

    return latencies
