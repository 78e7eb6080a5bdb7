"""Runs of one program in → when things happen, where ranks on one device slow each other.

What a rank gains by waiting less, the others lose in part: it is at work while they are. A measured
pass holds the slowdown of the run that it was measured in, and no other.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from debubble.costs.activity import trailing_activity
from debubble.simulate.engine import Engine
from debubble.simulate.program import Lengths, Times
from debubble.timeline.model import F64

# When passes are at work follows from how long they take: from here on windows move by less than
# a thousandth, on the recorded runs.
_ROUNDS = 4


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
