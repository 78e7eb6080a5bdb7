"""Marks between steps in → what each step took, on the device where there is one.

A host runs ahead of its device by many steps, so that what it times between two calls is what it
took to issue them. On CUDA each mark is an event in the device's own queue; it costs microseconds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_MS_PER_S = 1000.0


class StepClock:
    """Times steps: each begins at one mark and ends at another."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._on_device = _has_device()
        self._begun: list[Any] = []
        self._ended: list[Any] = []
        wait_for_device()

    def begin(self) -> None:
        """Note that a step begins here."""
        self._begun.append(self._mark())

    def end(self) -> None:
        """Note that it ends here."""
        self._ended.append(self._mark())

    def lengths(self) -> list[float]:
        """Return the seconds of each step; waits for the device to come to the last."""
        wait_for_device()
        return [self._between(*ends) for ends in zip(self._begun, self._ended, strict=True)]

    def _mark(self) -> Any:
        if not self._on_device:
            return self._clock()
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _between(self, begun: Any, ended: Any) -> float:
        if self._on_device:
            return float(begun.elapsed_time(ended)) / _MS_PER_S
        return float(ended - begun)


def wait_for_device() -> None:
    """Let the device come up to the host."""
    if _has_device():
        torch.cuda.synchronize()


def _has_device() -> bool:
    """Tell whether this process uses CUDA; asking must not make it do so."""
    return torch.cuda.is_available() and bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
