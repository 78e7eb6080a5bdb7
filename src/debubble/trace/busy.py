"""Columns in → busy time out: compute as a union of intervals, however many streams overlap."""

from __future__ import annotations

import numpy as np

from debubble.trace.columns import I64, RankTrace

_COMMUNICATION_PREFIX = "c10d::"


def busy_intervals(trace: RankTrace) -> tuple[I64, I64]:
    """Return starts and ends of disjoint stretches in which the rank computed.

    On a device: kernels, copies and memsets that are not communication. Without device work:
    operators of the CPU that are not communication. Annotations never count: they include waits.
    """
    if len(trace.kernels):
        kernels = trace.kernels
        kept = ~kernels.communication
        start = kernels.start_ns[kept]
        return merge(start, start + kernels.duration_ns[kept])
    operators = trace.cpu_operators
    computes = np.array([not n.startswith(_COMMUNICATION_PREFIX) for n in trace.names], dtype=bool)
    kept = computes[operators.name] if len(operators) else np.zeros(0, dtype=bool)
    start = operators.start_ns[kept]
    return merge(start, start + operators.duration_ns[kept])


def device_span(trace: RankTrace) -> tuple[int, int] | None:
    """Return first start and last end of all device work, or else of all CPU operators."""
    table = trace.kernels if len(trace.kernels) else trace.cpu_operators
    if not len(table):
        return None
    return int(table.start_ns[0]), int((table.start_ns + table.duration_ns).max())


def merge(start: I64, end: I64) -> tuple[I64, I64]:
    """Return the union of intervals, given sorted by start, as disjoint intervals."""
    if not len(start):
        return start, end
    reach = np.maximum.accumulate(end)
    first = np.concatenate(([True], start[1:] > reach[:-1]))
    last = np.concatenate((first[1:], [True]))
    return start[first], reach[last]
