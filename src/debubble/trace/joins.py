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
    moment_ns: I64,
    thread: NDArray[np.signedinteger],
    start_ns: I64,
    end_ns: I64,
    range_thread: NDArray[np.signedinteger],
) -> NDArray[np.intp]:
    """Return the range of the same thread that holds each moment; -1 where none does.

    Of ranges that overlap, the one that started last is meant.
    """
    found = _neighbours(moment_ns, thread, start_ns, range_thread, after=False)
    inside = found >= 0
    inside[inside] = moment_ns[inside] <= end_ns[found[inside]]
    return np.where(inside, found, UNKNOWN)


def find_next(
    moment_ns: I64,
    thread: NDArray[np.signedinteger],
    start_ns: I64,
    range_thread: NDArray[np.signedinteger],
) -> NDArray[np.intp]:
    """Return the first range of the same thread that starts at or after each moment, or -1."""
    return _neighbours(moment_ns, thread, start_ns, range_thread, after=True)


def _neighbours(
    moment_ns: I64,
    thread: NDArray[np.signedinteger],
    start_ns: I64,
    range_thread: NDArray[np.signedinteger],
    *,
    after: bool,
) -> NDArray[np.intp]:
    """Return the range of the same thread that starts last before, or first after, each moment.

    One sort of moments and ranges together: a loop over threads would take minutes where a broken
    trace has a hundred thousand of them.
    """
    ranges = len(start_ns)
    found = np.full(len(moment_ns), UNKNOWN, dtype=np.intp)
    if not ranges:
        return found
    is_moment = np.arange(ranges + len(moment_ns)) >= ranges
    threads = np.concatenate((range_thread, thread))
    ties = ~is_moment if after else is_moment
    order = np.lexsort((ties, np.concatenate((start_ns, moment_ns)), threads))
    place = np.arange(len(order))
    if after:
        nearest = np.where(is_moment[order], len(order), place)[::-1]
        nearest = np.minimum.accumulate(nearest)[::-1]
    else:
        nearest = np.maximum.accumulate(np.where(is_moment[order], UNKNOWN, place))
    asked = is_moment[order] & (nearest >= 0) & (nearest < len(order))
    neighbour, moment = order[nearest[asked]], order[asked]
    same = (threads[neighbour] == threads[moment]) & (threads[moment] != UNKNOWN)
    found[moment[same] - ranges] = neighbour[same]
    return found
