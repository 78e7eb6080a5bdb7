"""Message sizes and times in → latency and bandwidth: time = latency + bytes / bandwidth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from debubble.timeline.model import F64
from debubble.units import NS_PER_S

# Sizes closer than this share latency and bandwidth in all of them: no line can part the two.
_LEAST_SPAN = 4.0
# Medians of noisy messages are off by less than this from a line that they lie on.
_BENT = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """What a hop's messages take, as a line over their size."""

    latency_ns: float
    bytes_per_s: float
    worst_error: float
    """How far the line is off at the size it fits worst, as a share of what was measured."""

    @property
    def half_bytes(self) -> float:
        """The size at which half of the time is latency."""
        return self.latency_ns * self.bytes_per_s / NS_PER_S

    def time_ns(self, size: float) -> float:
        """Return what a message of some bytes takes."""
        return self.latency_ns + size * NS_PER_S / self.bytes_per_s


def fit_line(sizes: Sequence[float], times_ns: Sequence[float]) -> Fit | None:
    """Fit a line so that all sizes count alike; None where they are too few or too close.

    Errors are relative: by absolute ones the largest message alone would decide, and latency would
    be whatever is left over.
    """
    size, time = np.array(sizes, dtype=np.float64), np.array(times_ns, dtype=np.float64)
    kept = (size >= 0) & (time > 0)
    size, time = size[kept], time[kept]
    if len(np.unique(size)) < 2 or size.max() < _LEAST_SPAN * max(float(size.min()), 1.0):
        return None
    latency, per_byte = _solve(size, time)
    error = _worst(size, time, latency, per_byte)
    if error > _BENT:
        latency, per_byte = _between_pairs(size, time)
        error = _worst(size, time, latency, per_byte)
    if per_byte <= 0:
        return None
    return Fit(latency_ns=latency, bytes_per_s=NS_PER_S / per_byte, worst_error=error)


def _worst(size: F64, time: F64, latency: float, per_byte: float) -> float:
    return float(np.abs((latency + per_byte * size) / time - 1).max())


def _between_pairs(size: F64, time: F64) -> tuple[float, float]:
    """Return latency and time a byte of a ladder that no line fits, by the middle of all pairs.

    A bucket lets small messages pass, a protocol changes with size: some sizes are off, and all
    others should not follow them.
    """
    order = np.argsort(size)
    size, time = size[order], time[order]
    here, there = np.triu_indices(len(size), 1)
    apart = size[there] > size[here]
    slopes = (time[there] - time[here])[apart] / (size[there] - size[here])[apart]
    per_byte = float(np.median(slopes))
    return max(float(time[0] - per_byte * size[0]), 0.0), per_byte


def _solve(size: F64, time: F64) -> tuple[float, float]:
    """Return latency and time a byte, weighted by 1 / time; no latency is below 0."""
    rows = np.stack((1 / time, size / time), axis=1)
    latency, per_byte = np.linalg.lstsq(rows, np.ones(len(time)), rcond=None)[0]
    if latency < 0:
        latency, per_byte = 0.0, float((size / time).sum() / ((size / time) ** 2).sum())
    return float(latency), float(per_byte)
