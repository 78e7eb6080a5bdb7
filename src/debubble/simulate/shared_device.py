"""What ranks that share a device do to each other. Used only where they surely do.

    rank 0   [ F ][ F ][ F ]      at work all the time
    rank 1   [ F ]     [ F ]      passes of rank 0 beside these take longer: the device's clock
                                  follows its load

Three things, each of which the 43 pairs of `benchmarks/predict.py` want (`--ablations`): passes are
slower the more ranks are at work; a message's kernel takes multiprocessors from compute on a part
that has few; and messages stall, for threads that move them through the host lose their cores. How
often differs so much from launch to launch that the share of one says nothing of the next.

The numbers are of one H200 cut into four. Ranks with devices of their own never come here, so they
enter no prediction for those: `tests/simulate/test_shared_device.py`.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from debubble.simulate.engine import Engine
from debubble.simulate.overlap import time_under
from debubble.simulate.program import Lengths, Times
from debubble.timeline.model import F64, I64

# A device's clock follows its load with this delay or so; measured on an H200.
_TRAILING_NS = 40_000_000
# What one more rank at work adds to the passes of others, of the logarithm: from run to run 0.03 to
# 0.11. One run shows half of it, for a clock follows its mean load as well.
SLOPE = 0.08
# What a message's kernel adds to the compute beside it, of the logarithm, on a part of 30
# multiprocessors, where the run has nothing beside messages: seven recorded runs, 0.12 to 0.17.
BESIDE = 0.14
# The share of messages that stall: of 5,350, on two starts of the machine.
_STALLED = 0.13
# When passes are at work follows from how long they take: from here on windows move by less than
# a thousandth, on the recorded runs.
_ROUNDS = 4


def trailing_activity(start_ns: I64, end_ns: I64) -> F64:
    """Return the mean number of passes under way in the 40 ms before each pass's end.

    A second dimension holds many runs, each by itself.
    """
    until = end_ns.astype(np.float64)
    return time_under(until - _TRAILING_NS, until, start_ns, end_ns) / _TRAILING_NS


def run_shared(engine: Engine, lengths: Lengths, *, measured_activity: F64, slope: float) -> Times:
    """Run with passes as much slower as more ranks are at work than when they were measured.

    A second dimension of the lengths holds many runs.
    """
    times = engine.run(lengths)
    measured = measured_activity.reshape(-1, *[1] * (lengths.passes.ndim - 1))
    for _ in range(_ROUNDS):
        more = trailing_activity(times.pass_start, times.pass_end) - measured
        slowed = np.rint(lengths.passes * np.exp(slope * more)).astype(np.int64)
        times = engine.run(replace(lengths, passes=slowed))
    return times


def stalls(random: np.random.Generator, shape: tuple[int, ...], seen_ns: F64) -> F64:
    """Draw what messages of another launch stall for, by the stalls that were seen."""
    if not len(seen_ns):
        return np.zeros(shape)
    return np.where(random.random(shape) < _STALLED, random.choice(seen_ns, size=shape), 0.0)


def mean_stall_ns(seen_ns: F64) -> float:
    """Return the mean of what `stalls` draws."""
    return _STALLED * float(seen_ns.mean()) if len(seen_ns) else 0.0
