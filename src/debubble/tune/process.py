"""A command in → how it ended out, with its output in a file and no process of it left."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

GUARD = Path(__file__).with_name("guard.py")
MARK = "DEBUBBLE_TUNE_RUN"
"""In the environment of every process of a run: whose it is."""
_PROC = Path("/proc")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a command ended."""

    code: int | None
    """As a shell says it, 128 + N for signal N; None where it was stopped for its time."""
    seconds: float
    out_of_memory: bool = False
    """Whether the kernel killed a process of this machine for memory meanwhile."""


def run_guarded(
    words: Sequence[str],
    environment: Mapping[str, str],
    *,
    token: str,
    log: Path,
    timeout_s: float | None,
) -> Ended:
    """Run a command under its guard, for so long at most."""
    began, killed = time.monotonic(), _killed_for_memory()
    with log.open("wb") as output:
        guard = subprocess.Popen(  # noqa: S603 (our own file, and the user's command after it)
            [sys.executable, "-I", "-S", str(GUARD), *words],
            env={**environment, MARK: token},
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    code: int | None
    try:
        code = guard.wait(timeout_s)
    except subprocess.TimeoutExpired:
        code = None
    finally:
        if guard.stdin is not None:
            guard.stdin.close()  # the guard's word to end whatever still runs
        guard.wait()
        end_marked(token)
    return Ended(
        code=code,
        seconds=time.monotonic() - began,
        out_of_memory=_killed_for_memory() > killed,
    )


def _killed_for_memory() -> int:
    """Count the processes that the kernel killed for memory so far; 0 where it does not tell."""
    try:
        lines = (_PROC / "vmstat").read_text("utf-8").splitlines()
    except OSError:
        return 0
    counts = [line.split()[1] for line in lines if line.startswith("oom_kill ")]
    return int(counts[0]) if counts else 0


def end_marked(token: str) -> int:
    """Kill what still runs of a run, should its guard have been killed too; return how many."""
    mark = f"{MARK}={token}".encode()
    ended = 0
    for folder in _PROC.glob("[0-9]*"):
        try:
            if mark not in (folder / "environ").read_bytes().split(b"\0"):
                continue
        except OSError:
            continue
        if int(folder.name) != os.getpid():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(int(folder.name), signal.SIGKILL)
                ended += 1
    return ended
