"""A pass of launches and kernels, run by itself and as events of the engine."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from debubble.serving.costs import PassProgram, Reflexes
from debubble.simulate.events import Waits


@given(st.lists(st.tuples(st.integers(0, 90), st.integers(0, 90), st.booleans()), min_size=1))
def test_a_pass_takes_what_the_engine_says(steps):
    """Items: what its host does before each, how long its kernel is, whether the host waits."""
    gap, latency, wake = 3, 5, 7
    host, device, waits = (np.array(column) for column in zip(*steps, strict=True))
    device = np.where(waits, 0, device)
    reflexes = Reflexes(gap_ns=gap, latency_ns=latency, wake_ns=wake)
    program = PassProgram(host_ns=host, device_ns=device, waits=waits, reflexes=reflexes)
    # Event 0 begins all; item i has its host's moment at 2 i + 1 and its device's at 2 i + 2.
    edges = []
    for item, (step, kernel, wait) in enumerate(
        zip(host.tolist(), device.tolist(), waits.tolist(), strict=True)
    ):
        at, on_device = 2 * item + 1, 2 * item + 2
        before = (at - 2 if item else 0), (on_device - 2 if item else 0)
        edges.append((at, before[0], step))
        if wait:
            edges += [(at, before[1], wake), (on_device, before[1], 0)]
        else:
            edges += [(on_device, before[1], gap + kernel), (on_device, at, latency + kernel)]
    target, source, after = np.array(edges).T
    events = 2 * len(steps) + 1
    moments = Waits(events, target, source).run_once(after, np.zeros(events, dtype=np.int64))
    taken, lead = program.run(1.0, 1.0)
    assert taken == pytest.approx(moments[-1])
    assert lead == pytest.approx(max(moments[-1] - moments[-2], 0))
