"""Traces in → the same traces, with less in them: no step marked, or a shorter capture."""

from __future__ import annotations

from dataclasses import replace

import numpy as np


def without_marks(trace):
    """The same rank, its profiler never told of a step."""
    marks = np.array([name.startswith("ProfilerStep#") for name in trace.names])
    return replace(trace, annotations=trace.annotations.take(~marks[trace.annotations.name]))


def in_step_with_device(trace, begin_ns, end_ns):
    """The same rank, captured for a while, had its host waited for its device all the time."""
    kept = (trace.kernels.start_ns >= begin_ns) & (trace.kernels.start_ns < end_ns)
    calls = trace.launches.start_ns[trace.kernels.launch[kept]]
    renumber = np.append(np.where(kept, np.cumsum(kept) - 1, -1), -1)
    operators = trace.operators
    operators = replace(operators, kernel=renumber[operators.kernel].astype(np.int32))
    near = (operators.start_ns > calls.min()) & (operators.start_ns < calls.max())
    posts = np.isin(operators.operation, (1, 2))
    operators = operators.take(near & ((operators.kernel >= 0) | ~posts))
    return replace(trace, kernels=trace.kernels.take(kept), operators=operators)


def captured(trace, begin_ns=None, end_ns=None):
    """The same rank, its profiler started later, or stopped earlier, on the rank's own clock.

    What the host did before the start is not there, nor what had begun on the device. What had not
    ended on the device by the end is not there; what the host was doing is cut short.
    """
    begin = np.iinfo(np.int64).min if begin_ns is None else begin_ns
    end = np.iinfo(np.int64).max if end_ns is None else end_ns
    cut = {}
    renumber = {}
    for name in ("kernels", "launches"):
        table = getattr(trace, name)
        kept = (table.start_ns >= begin) & (table.start_ns < end)
        if name == "kernels":
            kept &= table.start_ns + table.duration_ns <= end
        renumber[name] = np.append(np.where(kept, np.cumsum(kept) - 1, -1), -1)
        cut[name] = table.take(kept)
    for name in ("operators", "annotations", "memory", "cpu_operators"):
        table = getattr(trace, name)
        table = table.take((table.start_ns >= begin) & (table.start_ns < end))
        if hasattr(table, "duration_ns"):
            table = replace(table, duration_ns=np.minimum(table.duration_ns, end - table.start_ns))
        cut[name] = table
    for name, column, target in (
        ("kernels", "launch", "launches"),
        ("operators", "kernel", "kernels"),
    ):
        old = getattr(cut[name], column)
        new = renumber[target][old].astype(old.dtype)
        cut[name] = replace(cut[name], **{column: new})
    return replace(trace, **cut)
