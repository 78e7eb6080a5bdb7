"""Waits for what other processes do, and finds them by what their environment holds."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

_Seen = TypeVar("_Seen")

# A guard against hanging, far above what a busy machine needs.
PATIENCE_S = 180.0


def wait_until(is_true: Callable[[], _Seen], why: str = "waited in vain") -> _Seen:
    """Look again and again, and return what was seen at last."""
    deadline = time.monotonic() + PATIENCE_S
    while not (seen := is_true()):
        assert time.monotonic() < deadline, why
        time.sleep(0.02)
    return seen


def processes_with(*marks: str) -> list[str]:
    """Return the command lines of all processes that have one of these in their environment."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            environment = (process / "environ").read_bytes().split(b"\0")
            if any(mark.encode() in environment for mark in marks):
                found.append((process / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return found


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port: int = taken.getsockname()[1]
        return port
