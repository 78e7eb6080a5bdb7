"""Which launch queued a kernel, and which range on a thread holds a moment."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from debubble.trace.columns import I32, I64, UNKNOWN


def join_launches(kernel_correlation: I64, launch_correlation: I64) -> I32:
    """Return each kernel's row in the launches, by correlation; -1 where there is none."""
    if not len(launch_correlation):
        return np.full(len(kernel_correlation), UNKNOWN, dtype=np.int32)
    order = np.argsort(launch_correlation, kind="stable")
    found = np.searchsorted(launch_correlation, kernel_correlation, sorter=order)
    row = order[np.minimum(found, len(order) - 1)]
    matches = (launch_correlation[row] == kernel_correlation) & (kernel_correlation >= 0)
    return np.where(matches, row, UNKNOWN).astype(np.int32)


def find_enclosing(
    moment_ns: I64, thread: I32, start_ns: I64, end_ns: I64, range_thread: I32
) -> NDArray[np.intp]:
    """Return the range of the same thread that holds each moment; -1 where none does.

    Of ranges that overlap, the one that started last is meant.
    """
    found = np.full(len(moment_ns), UNKNOWN, dtype=np.intp)
    for number in np.unique(thread):
        ranges = np.flatnonzero(range_thread == number)
        moments = np.flatnonzero(thread == number)
        if number < 0 or not len(ranges):
            continue
        ranges = ranges[np.argsort(start_ns[ranges], kind="stable")]
        last = np.searchsorted(start_ns[ranges], moment_ns[moments], side="right") - 1
        candidate = ranges[np.maximum(last, 0)]
        inside = (last >= 0) & (moment_ns[moments] <= end_ns[candidate])
        found[moments] = np.where(inside, candidate, UNKNOWN)
    return found


def find_next(moment_ns: I64, thread: I32, start_ns: I64, range_thread: I32) -> NDArray[np.intp]:
    """Return the first range of the same thread that starts at or after each moment, or -1."""
    found = np.full(len(moment_ns), UNKNOWN, dtype=np.intp)
    for number in np.unique(thread):
        ranges = np.flatnonzero(range_thread == number)
        moments = np.flatnonzero(thread == number)
        if number < 0 or not len(ranges):
            continue
        ranges = ranges[np.argsort(start_ns[ranges], kind="stable")]
        after = np.searchsorted(start_ns[ranges], moment_ns[moments], side="left")
        there = after < len(ranges)
        found[moments[there]] = ranges[after[there]]
    return found
