"""debubble finds where a pipeline-parallel PyTorch job waits, and what to do about it."""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """Give `debubble.capture` and `debubble.step`, loaded when they are first used."""
    if name in {"capture", "step"}:
        package = importlib.import_module("debubble.capture")
        globals()["step"] = package.step  # asked for each step: the next time without coming here
        return package if name == "capture" else package.step
    raise AttributeError(f"module 'debubble' has no attribute {name!r}")
