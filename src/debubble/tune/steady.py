"""A reading in → how far this machine was busy with something else while it was captured."""

from __future__ import annotations

import numpy as np

from debubble.errors import Code, Gap
from debubble.tune.reading import Reading
from debubble.units import show_share

# Passes of a quiet machine take up to 1.4 % more than usual on the mean, by 34 captures of 2 cores;
# those of a disturbed one 2.5 % and more, by 6.
_STEADY = 0.02


def excess(reading: Reading) -> float:
    """Return how much longer passes took, on the mean, than those of their stage usually do."""
    passes = reading.timeline.passes
    passes = passes.where(np.isin(passes.step, [window.step for window in reading.figures.windows]))
    took = (passes.end_ns - passes.start_ns).astype(np.float64)
    usual = np.zeros(len(took))
    for alike in np.unique(np.stack((passes.stage, passes.kind)), axis=1).T:
        mine = (passes.stage == alike[0]) & (passes.kind == alike[1])
        usual[mine] = np.median(took[mine])
    return float(took.sum() / usual.sum() - 1) if usual.sum() > 0 else 0.0


def is_steady(reading: Reading) -> bool:
    """Tell whether the machine was left alone."""
    return excess(reading) <= _STEADY


def busy_machine(reading: Reading, name: str) -> Gap:
    """Say that a capture was disturbed."""
    return Gap(
        code=Code.BUSY_MACHINE,
        message=f"this machine was busy during the capture of {name}: passes took "
        f"{show_share(excess(reading))} longer than usual",
        hint="close what else runs here, and try again",
    )
