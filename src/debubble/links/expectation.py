"""Messages of a run in → how long each should have taken, judged by its peers."""

from __future__ import annotations

import numpy as np

from debubble.simulate.lengths import hop_of
from debubble.simulate.measured import MeasuredStep
from debubble.timeline.model import I64


def expect_wire(steps: tuple[MeasuredStep, ...]) -> tuple[I64, ...]:
    """Return the expected wire time of each message of each step.

    Hops of one class carry messages of one size, one way or both ways at once. What a hop should do
    is the median of what the hops of its class do; alone in its class, what it does itself.
    """
    hop = np.concatenate([hop_of(step.program) for step in steps])
    size = np.concatenate([step.transfer_bytes for step in steps])
    fused = np.concatenate([step.fused for step in steps])
    wire = np.concatenate([seen_wire(step) for step in steps])
    expected = wire.copy()
    for one_size, both_ways in sorted(set(zip(size.tolist(), fused.tolist(), strict=True))):
        mine = (size == one_size) & (fused == both_ways)
        medians = [int(np.median(wire[mine & (hop == one)])) for one in np.unique(hop[mine])]
        # Of two hops the faster says what is possible.
        expected[mine] = sorted(medians)[(len(medians) - 1) // 2]
    return tuple(np.split(expected, np.cumsum([len(step.fused) for step in steps])[:-1]))


def seen_wire(step: MeasuredStep) -> I64:
    """Return from when both sides of each message were there to the receive's end."""
    times, messages = step.times, step.program.messages
    both = np.maximum(times.batch_start[messages.sent], times.batch_start[messages.received])
    seen: I64 = np.maximum(times.batch_end[messages.received] - both, 0)
    return seen
