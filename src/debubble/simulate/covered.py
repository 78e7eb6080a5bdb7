"""A program that was run in → how long each pass ran beside messages of its own rank."""

from __future__ import annotations

import numpy as np

from debubble.simulate.program import Program, Times
from debubble.timeline.model import F64, I64


def covered_ns(program: Program, times: Times) -> F64:
    """Return it for each pass, and each of many runs; waiting for the other side is no message."""
    messages, place = program.messages, program.batches.place
    begun = np.maximum(times.batch_start[messages.sent], times.batch_start[messages.received])
    over = times.batch_end[messages.received]
    covered = np.zeros(times.pass_start.shape)
    for rank in range(len(program.ranks)):
        mine = program.passes.place == rank
        touches = (place[messages.sent] == rank) | (place[messages.received] == rank)
        covered[mine] = under(
            times.pass_start[mine], times.pass_end[mine], begun[touches], over[touches]
        )
    return covered


def under(start_ns: I64, end_ns: I64, begun_ns: I64, over_ns: I64) -> F64:
    """Return how much of each stretch lies under some others; a second dimension holds runs."""
    if start_ns.ndim == 1:
        return _of_one_run(start_ns, end_ns, begun_ns, over_ns)
    runs = range(start_ns.shape[1])
    columns = (start_ns, end_ns, begun_ns, over_ns)
    return np.stack([_of_one_run(*(one[:, run] for one in columns)) for run in runs], axis=1)


def _of_one_run(start_ns: I64, end_ns: I64, begun_ns: I64, over_ns: I64) -> F64:
    begun, over = np.sort(begun_ns).astype(np.float64), np.sort(over_ns).astype(np.float64)
    sums = [np.concatenate(([0.0], np.cumsum(one))) for one in (begun, over)]

    def passed(moment: I64) -> F64:
        first = np.searchsorted(begun, moment, side="right")
        last = np.searchsorted(over, moment, side="right")
        here: F64 = (first * moment - sums[0][first]) - (last * moment - sums[1][last])
        return here

    length = (end_ns - start_ns).astype(np.float64)
    # Two messages at once cover no more than one does.
    return np.clip(passed(end_ns) - passed(start_ns), 0.0, length)
