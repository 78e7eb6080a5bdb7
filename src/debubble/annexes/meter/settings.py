"""What a meter is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from debubble.capture.settings import JobSettings
from debubble.errors import UsageError

# In the meter's folder.
CAPTURES = "captures"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(JobSettings):
    """Where a meter writes, how much it keeps, and whether it has slow ranks captured."""

    variable: ClassVar[str] = "DEBUBBLE_METER"
    done: ClassVar[str] = "metered"
    traces: ClassVar[str] = "rank*.csv"
    out: Path = Path("debubble-meter")
    segment: int = 20
    """Steps of one file of a rank: whoever reads them waits no longer than these take."""
    keep: int = 50
    """How many files of each rank stay: of some 70 KB each, a few MB in all."""
    on_drift: bool = True
    """Capture a few steps when a rank gets slower."""
    tokens: int | None = None
    """Of one step, over all microbatches."""
    split: tuple[int, ...] | None = None
    """Layers of each stage."""

    def __post_init__(self) -> None:
        for name in ("segment", "keep", "tokens"):
            count = getattr(self, name)
            if count is not None and count < 1:
                raise UsageError(f"{name} is {count}", hint="give at least 1")


USUAL = Settings()
"""What is not said."""
