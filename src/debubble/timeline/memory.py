"""A rank's allocations in → what its memory is for, as a line over microbatches in flight."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from debubble.timeline.model import (
    F64,
    FEWEST_SAMPLES,
    I64,
    Flags,
    MemoryFigures,
    PassKind,
)
from debubble.timeline.work import Work, number_passes
from debubble.trace.columns import MemoryDevice, RankTrace

# What a pass does to the microbatches whose activations a stage must keep. With a split backward
# pass they are free after the weight gradient.
_KEEPS = {PassKind.F: 1, PassKind.B: -1, PassKind.I: 0, PassKind.W: -1}


def measure_memory(trace: RankTrace, work: Work) -> MemoryFigures | None:
    """Fit the allocator's curve, on the host's clock, to the microbatches in flight.

    The allocator acts when the host issues work, not when the device does it.
    """
    moments, allocated = allocator_curve(trace)
    if not len(allocated):
        return None
    reserved = trace.memory.reserved_bytes[_of_compute(trace)]
    levels = _levels(work)
    row = np.searchsorted(moments, levels.after_ns, side="right") - 1
    known = (row >= 0) & ~levels.ends_step
    if known.sum() < FEWEST_SAMPLES or np.ptp(levels.in_flight[known]) == 0:
        known = row >= 0
    until = np.searchsorted(moments, levels.until_ns[known], side="left")
    # The lowest level from each pass on, until the next; that after the pass itself at least.
    spans = zip(row[known].tolist(), np.maximum(until, row[known] + 1).tolist(), strict=True)
    lowest = np.array([allocated[first:end].min() for first, end in spans], dtype=np.int64)
    fit = _fit(levels.columns()[known], lowest)
    # Inside is from the first to the last piece of a step's passes. Forward only, what is held
    # between steps is outputs: passes made it, and no optimizer.
    trains = bool((work.kind > PassKind.F).any())
    inside = np.full(len(moments), not trains)
    for number in np.unique(levels.step).tolist():
        mine = levels.step == number
        begun, over = levels.begun_ns[mine].min(), levels.after_ns[mine].max()
        inside |= (moments >= begun) & (moments <= over)
    passes_peak = int(allocated[inside].max(initial=0)) or int(allocated.max())
    used = set(np.unique(trace.kernels.device).tolist())
    sizes = [d.memory_bytes for d in trace.header.devices if d.index in used and d.memory_bytes]
    return MemoryFigures(
        peak_bytes=int(allocated.max()),
        passes_peak_bytes=passes_peak,
        between_peak_bytes=int(allocated[~inside].max(initial=0)) or None,
        peak_reserved_bytes=int(reserved.max()) if reserved.max() > 0 else None,
        static_bytes=fit.static_bytes if fit else None,
        per_microbatch_bytes=fit.per_microbatch_bytes if fit else None,
        gradient_bytes=fit.gradient_bytes if fit else None,
        halfway_bytes=fit.halfway_bytes if fit else None,
        transient_bytes=max(0, passes_peak - fit.highest_bytes) if fit else None,
        most_in_flight=int(levels.in_flight.max(initial=0)),
        limit_bytes=min(sizes, default=None),
    )


def allocator_curve(trace: RankTrace) -> tuple[I64, I64]:
    """Return when the allocator acted, by the host's clock, and what it held then, in bytes."""
    mine = _of_compute(trace)
    moments, allocated = trace.memory.start_ns[mine], trace.memory.allocated_bytes[mine]
    if allocated.max(initial=-1) < 0:
        return moments[:0], allocated[:0]
    return moments, allocated


def _of_compute(trace: RankTrace) -> Flags:
    """Take the host's allocator where no device runs kernels: a pipeline on CPUs.

    torch counts the host's bytes from the profiler's start: activations and gradients are in it,
    weights that were there before are not.
    """
    on_device: Flags = trace.memory.device_type == MemoryDevice.DEVICE
    if len(trace.kernels) or on_device.any():
        return on_device
    on_host: Flags = trace.memory.device_type == MemoryDevice.CPU
    return on_host


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fit:
    static_bytes: int
    per_microbatch_bytes: int
    gradient_bytes: int
    halfway_bytes: int
    highest_bytes: int
    """The most that the line itself reaches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Levels:
    """What a rank had to keep, each time a pass had been issued."""

    after_ns: I64
    until_ns: I64
    """When the next pass of the step began to be issued: what passes work with is free by then."""
    ends_step: Flags
    """No pass of the step comes after it, so that this is not known."""
    in_flight: I64
    halfway: I64
    """Of those in flight: with I behind them and W before them."""
    reduced: F64
    """Share of its stages that have gradients."""
    sent: I64
    """Passes I so far: torch keeps what they sent until the step ends."""
    step: I64
    begun_ns: I64

    def columns(self) -> F64:
        """Return what the allocator's level is made of, a column each; the first is constant."""
        constant = np.ones(len(self.in_flight))
        parts = (constant, self.in_flight, self.halfway, self.reduced, self.sent)
        return np.stack(parts, axis=1)


def _levels(work: Work) -> _Levels:
    work = work.where(work.in_pass & (work.step >= 0))
    passes, group = number_passes(work)
    issued = np.zeros(passes.shape[1], dtype=np.int64)
    np.maximum.at(issued, group, work.issued_ns)
    begun = np.full(passes.shape[1], np.iinfo(np.int64).max)
    np.minimum.at(begun, group, work.issued_ns)
    order = np.argsort(issued, kind="stable")
    numbers, stage, kind = passes[0], passes[1], passes[2]
    change = np.array([_KEEPS[PassKind(number)] for number in kind.tolist()], dtype=np.int64)
    stages, first_half = np.unique(stage), kind == PassKind.I
    # Where I has no kernels, as on torch's first stage, W is the whole backward pass.
    second_half = (kind == PassKind.W) & np.isin(stage, stage[first_half])
    held, halfway = np.zeros(len(order), dtype=np.int64), np.zeros(len(order), dtype=np.int64)
    reduced, sent = np.zeros(len(order)), np.zeros(len(order), dtype=np.int64)
    for number in np.unique(numbers).tolist():
        mine = order[numbers[order] == number]
        held[mine] = np.cumsum(change[mine])
        halfway[mine] = np.cumsum(first_half[mine].astype(np.int64) - second_half[mine])
        sent[mine] = np.cumsum(first_half[mine])
        for held_stage in stages.tolist():
            ended = np.cumsum((change[mine] < 0) & (stage[mine] == held_stage))
            reduced[mine] += np.minimum(ended, 1) / len(stages)
    ends_step = np.diff(numbers[order], append=-1) != 0
    return _Levels(
        after_ns=issued[order],
        until_ns=np.where(ends_step, issued[order], np.append(begun[order][1:], 0)),
        ends_step=ends_step,
        in_flight=held[order],
        halfway=halfway[order],
        reduced=reduced[order],
        sent=sent[order],
        step=numbers[order],
        begun_ns=begun[order],
    )


def _fit(columns: F64, allocated: I64) -> _Fit | None:
    """Fit bytes = static + slope * microbatches + gradients; None where nothing varies.

    Gradients appear with a stage's first backward pass and stay; they belong to what is static.
    """
    if len(columns) < FEWEST_SAMPLES or np.ptp(columns[:, 1]) == 0:
        return None
    shares = np.linalg.lstsq(columns, allocated.astype(np.float64), rcond=None)[0]
    base, slope, halfway, gradients, _ = shares.tolist()
    return _Fit(
        static_bytes=round(base + gradients),
        per_microbatch_bytes=round(slope),
        gradient_bytes=max(0, round(gradients)),
        halfway_bytes=round(halfway),
        highest_bytes=round(float((columns @ shares).max())),
    )
