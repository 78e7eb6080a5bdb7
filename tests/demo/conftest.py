"""What the demo's tests share: small workloads, and a way to see processes left behind."""

from __future__ import annotations

from pathlib import Path

import pytest


def _alive(folder: Path) -> list[int]:
    needle = str(folder.resolve()).encode()
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes()
        except OSError:  # it ended while we looked
            continue
        if needle in command.split(b"\0") and b"debubble.annexes.demo.rank" in command:
            found.append(int(process.name))
    return found


@pytest.fixture
def ranks_alive():
    """Return a function that lists the rank processes still running for a folder."""
    return _alive
