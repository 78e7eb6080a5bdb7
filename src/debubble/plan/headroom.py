"""A predicted peak and a device's memory in → what is left of it, and what the rest is for."""

from __future__ import annotations

from dataclasses import dataclass

from debubble.units import show_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Headroom:
    """What one rank has left; None is what is not known."""

    limit_bytes: float | None
    """The device's memory, or what was given for it."""
    peak_bytes: float
    unallocated_bytes: float | None
    """Reserved by PyTorch and not allocated: fragments, which it may or may not use."""
    other_bytes: float | None
    """Held by others than PyTorch: NCCL, contexts, other processes."""

    @property
    def bytes(self) -> float | None:
        """The limit minus the peak; below 0 the rank does not fit."""
        return None if self.limit_bytes is None else self.limit_bytes - self.peak_bytes

    @property
    def sure_bytes(self) -> float | None:
        """What is left if fragments are never used; what is unknown of the rest counts as 0."""
        if self.bytes is None:
            return None
        return self.bytes - (self.unallocated_bytes or 0.0) - (self.other_bytes or 0.0)

    @property
    def fits(self) -> bool | None:
        """Whether the peak, and what others hold, stay below the limit."""
        if self.bytes is None:
            return None
        return self.bytes - (self.other_bytes or 0.0) >= 0

    def __str__(self) -> str:
        if self.bytes is None:
            return "headroom not known: the trace does not name the device's memory"
        if self.bytes < 0:
            return (
                f"{show_bytes(-self.bytes)} over the limit of {show_bytes(self.limit_bytes or 0)}"
            )
        return f"{show_bytes(self.bytes)} left of {show_bytes(self.limit_bytes or 0)}"


def headroom(
    peak_bytes: float,
    *,
    limit_bytes: float | None,
    measured_peak_bytes: float | None = None,
    measured_reserved_bytes: float | None = None,
    other_bytes: float | None = None,
) -> Headroom:
    """Hold a peak against a limit; what the measured run reserved in vain, it will again."""
    unallocated = None
    if measured_peak_bytes is not None and measured_reserved_bytes is not None:
        unallocated = max(0.0, measured_reserved_bytes - measured_peak_bytes)
    return Headroom(
        limit_bytes=limit_bytes,
        peak_bytes=peak_bytes,
        unallocated_bytes=unallocated,
        other_bytes=other_bytes,
    )
