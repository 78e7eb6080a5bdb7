"""One rank's allocator in → what it holds always, per microbatch in flight, and for a moment."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from debubble.timeline.grouping import number_passes
from debubble.timeline.labels import Assignment
from debubble.timeline.model import I32, I64, MemoryFigures, PassKind
from debubble.timeline.work import Work
from debubble.trace.columns import MemoryDevice, RankTrace

# What a pass does to the microbatches whose activations a stage must keep. With a split backward
# pass they are free after the weight gradient.
_KEEPS = {PassKind.F: 1, PassKind.B: -1, PassKind.I: 0, PassKind.W: -1}
_FEWEST_SAMPLES = 3


def measure_memory(
    trace: RankTrace, work: Work, assignment: Assignment, step: I32
) -> MemoryFigures | None:
    """Fit the allocator's curve, on the host's clock, to the microbatches in flight.

    The allocator acts when the host issues work, not when the device does it.
    """
    on_device = trace.memory.device_type == MemoryDevice.DEVICE
    moments, allocated = trace.memory.start_ns[on_device], trace.memory.allocated_bytes[on_device]
    if not len(allocated) or allocated.max() < 0:
        return None
    reserved = trace.memory.reserved_bytes[on_device]
    after, in_flight, reduced = _in_flight(work, assignment, step)
    row = np.searchsorted(moments, after, side="right") - 1
    known = row >= 0
    fit = _fit(in_flight[known], reduced[known], allocated[row[known]])
    peak = int(allocated.max())
    return MemoryFigures(
        peak_bytes=peak,
        peak_reserved_bytes=int(reserved.max()) if reserved.max() >= 0 else None,
        static_bytes=fit.static_bytes if fit else None,
        per_microbatch_bytes=fit.per_microbatch_bytes if fit else None,
        transient_bytes=max(0, peak - fit.highest_bytes) if fit else None,
        most_in_flight=int(in_flight.max(initial=0)),
        limit_bytes=_limit(trace),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fit:
    static_bytes: int
    per_microbatch_bytes: int
    highest_bytes: int
    """The most that the line itself reaches."""


def _in_flight(work: Work, assignment: Assignment, step: I32) -> tuple[I64, I64, I64]:
    """Return, each time a pass had been issued: when, microbatches in flight, gradients there."""
    kept = np.flatnonzero((assignment.kind >= 0) & (step >= 0))
    passes, group = number_passes(
        step[kept], assignment.stage[kept], assignment.kind[kept], assignment.microbatch[kept]
    )
    issued = np.zeros(passes.shape[1], dtype=np.int64)
    np.maximum.at(issued, group, work.issued_ns[kept])
    order = np.argsort(issued, kind="stable")
    change = np.array([_KEEPS[PassKind(kind)] for kind in passes[2].tolist()], dtype=np.int64)
    held = np.zeros(len(order), dtype=np.int64)
    reduced = np.zeros(len(order), dtype=np.int64)
    for number in np.unique(passes[0]).tolist():
        mine = order[passes[0][order] == number]
        held[mine] = np.cumsum(change[mine])
        reduced[mine] = np.minimum(np.cumsum(change[mine] < 0), 1)
    return issued[order], held[order], reduced[order]


def _fit(in_flight: I64, reduced: I64, allocated: I64) -> _Fit | None:
    """Fit bytes = static + slope * microbatches + gradients; None where nothing varies.

    Gradients appear with a step's first backward pass and stay; they belong to what is static.
    """
    if len(in_flight) < _FEWEST_SAMPLES or np.ptp(in_flight) == 0:
        return None
    columns = np.stack((np.ones(len(in_flight)), in_flight, reduced), axis=1).astype(np.float64)
    base, slope, gradients = np.linalg.lstsq(columns, allocated.astype(np.float64), rcond=None)[0]
    highest = float((columns @ np.array([base, slope, gradients])).max())
    return _Fit(
        static_bytes=round(float(base + gradients)),
        per_microbatch_bytes=round(float(slope)),
        highest_bytes=round(highest),
    )


def _limit(trace: RankTrace) -> int | None:
    used = set(np.unique(trace.kernels.device).tolist())
    sizes = [d.memory_bytes for d in trace.header.devices if d.index in used and d.memory_bytes]
    return min(sizes, default=None)
