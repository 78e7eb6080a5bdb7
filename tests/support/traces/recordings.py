"""Where recordings of real runs lie: those of the repository, and those beside a checkout."""

from __future__ import annotations

from pathlib import Path

DATA = Path(__file__).resolve().parents[2] / "data"
H200 = DATA / "h200"
SHARED = Path(__file__).resolve().parents[4] / "shared" / "data"
PUBLIC = SHARED / "public"
