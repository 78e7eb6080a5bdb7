"""Columns of a rank in → its busy time, and the figures of `inspect`."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from debubble.trace.columns import I64, MemoryDevice, Operation, RankTrace

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


_STEP = re.compile(r"^ProfilerStep#(\d+)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSummary:
    """What one rank's trace holds."""

    rank: int
    file: str
    format: str
    device: str
    steps: tuple[int, ...]
    events: int
    kernels: int
    communication_kernels: int
    unjoined_kernels: int
    """Kernels whose launch is not in the trace: they cannot be given to a step."""
    span_ns: int | None
    busy_fraction: float | None
    sends: int
    receives: int
    collectives: int
    sent_bytes: int | None
    """None where the trace does not tell sizes: `record_shapes` was off."""
    peers: tuple[int, ...]
    peak_memory_bytes: int | None


def summarise(trace: RankTrace) -> RankSummary:
    """Count what is in a trace."""
    span = device_span(trace)
    starts, ends = busy_intervals(trace)
    operators = trace.operators
    sent = operators.message_bytes[operators.operation == Operation.SEND]
    return RankSummary(
        rank=trace.rank if trace.rank is not None else -1,
        file=trace.file,
        format=trace.format,
        device=_device(trace),
        steps=steps_of(trace),
        events=trace.events,
        kernels=len(trace.kernels),
        communication_kernels=int(trace.kernels.communication.sum()),
        unjoined_kernels=int((trace.kernels.launch < 0).sum()),
        span_ns=None if span is None else span[1] - span[0],
        busy_fraction=None if span is None else _share(int((ends - starts).sum()), span),
        sends=len(sent),
        receives=int((operators.operation == Operation.RECEIVE).sum()),
        collectives=int((operators.operation == Operation.COLLECTIVE).sum()),
        sent_bytes=None if (sent < 0).any() else int(sent.sum()),
        peers=tuple(np.unique(operators.peer[operators.peer >= 0]).tolist()),
        peak_memory_bytes=peak_memory(trace),
    )


def steps_of(trace: RankTrace) -> tuple[int, ...]:
    """Return the numbers of the profiler's steps, as the host saw them."""
    host = trace.annotations.name[trace.annotations.stream < 0]
    found = (_STEP.match(trace.names[name]) for name in np.unique(host).tolist())
    return tuple(sorted({int(step[1]) for step in found if step}))


def _share(busy_ns: int, span: tuple[int, int]) -> float | None:
    length = span[1] - span[0]
    return busy_ns / length if length else None


def _device(trace: RankTrace) -> str:
    used = set(np.unique(trace.kernels.device).tolist())
    names = {device.name for device in trace.header.devices if device.index in used and device.name}
    if names:
        return ", ".join(sorted(names))
    return "unknown device" if used else "CPU"


def peak_memory(trace: RankTrace) -> int | None:
    """Return the most bytes allocated on a device; totals of the CPU are relative, so no peak."""
    on_device = trace.memory.device_type == MemoryDevice.DEVICE
    allocated = trace.memory.allocated_bytes[on_device]
    return int(allocated.max()) if len(allocated) and allocated.max() >= 0 else None
