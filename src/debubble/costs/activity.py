"""Passes in → how many ranks were at work on average in the while before each of them ended."""

from __future__ import annotations

import numpy as np

from debubble.timeline.model import F64, I64

# A device's clock follows its load with this delay or so; measured on an H200.
TRAILING_NS = 40_000_000


def trailing_activity(start_ns: I64, end_ns: I64) -> F64:
    """Return the mean number of passes under way in the 40 ms before each pass's end.

    A second dimension holds many runs, each by itself.
    """
    if start_ns.ndim == 1:
        return _of_one_run(start_ns, end_ns)
    runs = range(start_ns.shape[1])
    return np.stack([_of_one_run(start_ns[:, run], end_ns[:, run]) for run in runs], axis=1)


def _of_one_run(start_ns: I64, end_ns: I64) -> F64:
    start, end = np.sort(start_ns).astype(np.float64), np.sort(end_ns).astype(np.float64)
    begun, over = _running_sum(start), _running_sum(end)

    def worked_until(moment: F64) -> F64:
        first = np.searchsorted(start, moment, side="right")
        last = np.searchsorted(end, moment, side="right")
        return (first * moment - begun[first]) - (last * moment - over[last])

    until = end_ns.astype(np.float64)
    return (worked_until(until) - worked_until(until - TRAILING_NS)) / TRAILING_NS


def _running_sum(values: F64) -> F64:
    return np.concatenate(([0.0], np.cumsum(values)))
