"""What a meter is asked for, and the folders that it fills."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from debubble.capture.settings import PROFILED_STEPS, JobSettings
from debubble.errors import UsageError

# In the meter's folder.
CAPTURES = "captures"
# As captures are named: the job's start in UTC, and the first step.
SEGMENT_NAME = re.compile(r"^\d{8}-\d{6}-step\d+$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(JobSettings):
    """Where a meter writes, how much it keeps, and when it has a few steps captured."""

    variable: ClassVar[str] = "DEBUBBLE_METER"
    done: ClassVar[str] = "metered"
    out: Path = Path("debubble-meter")
    segment: int = 20
    """Steps of one file of a rank: whoever reads them waits no longer than these take."""
    keep: int = 50
    """How many files of each rank stay: of some 70 KB each, a few MB in all."""
    on_drift: bool = True
    """Capture a few steps when a rank gets slower."""
    steps: int = PROFILED_STEPS
    """How many steps such a capture profiles."""
    captures: int = 3
    """How many captures stay: traces of six steps take megabytes a rank."""
    every_s: float = 600.0
    """The least time between two of them, whatever drifts, or whoever asks: a profiler that comes
    back more often is part of the problem."""
    tokens: int | None = None
    """Of one step, over all microbatches."""
    split: tuple[int, ...] | None = None
    """Layers of each stage."""
    tell_s: float = 1.0
    """How often ranks tell each other, and metrics are written."""
    line_s: float = 60.0
    """How often a line goes to the log, and scalars to the logger."""
    close_s: float = 5.0
    """How long the end of the job waits for a logger or a disk that hangs."""

    def __post_init__(self) -> None:
        for name in ("segment", "keep", "steps", "captures", "tokens"):
            count = getattr(self, name)
            if count is not None and count < 1:
                raise UsageError(f"{name} is {count}", hint="give at least 1")
        if self.every_s < 0:
            raise UsageError(f"every_s is {self.every_s:g}", hint="give 0 or more")


USUAL = Settings()
"""What is not said."""


def list_segments(out: Path) -> list[Path]:
    """Return the folders that hold a meter's tables, oldest first."""
    if not out.is_dir():
        return []
    return sorted(
        folder
        for folder in out.iterdir()
        if SEGMENT_NAME.match(folder.name) and any(folder.glob("rank*.csv"))
    )
