"""Where recordings of real runs lie: those of the repository, and those beside a checkout."""

from __future__ import annotations

from pathlib import Path

import pytest

DATA = Path(__file__).resolve().parents[2] / "data"
H200 = DATA / "h200"
SHARED = Path(__file__).resolve().parents[4] / "shared" / "data"
PUBLIC = SHARED / "public"


def recorded_run(name: str) -> Path:
    """Return the folder of one of our H200 runs; the repository itself holds some of them."""
    return existing(H200 / name if (H200 / name).is_dir() else SHARED / "h200" / name)


def existing(recording: Path) -> Path:
    """Return a recording if it is there, and skip where it is not."""
    if not recording.exists():
        whose = "others and are" if PUBLIC in recording.parents else "us, but are"
        pytest.skip(f"{recording} is not there: such recordings belong to {whose} not shipped")
    return recording
