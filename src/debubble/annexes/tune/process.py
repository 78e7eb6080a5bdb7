"""A command in → its process, and how it ended; all that came of it ends with it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from debubble.annexes.tune.guard import SIGNALLED
from debubble.annexes.tune.journal import Kind

GUARD = Path(__file__).with_name("guard.py")
MARK = "DEBUBBLE_TUNE_RUN"
"""In the environment of every process of a run: whose it is."""
_PROC = Path("/proc")
# The end of a traceback, with the line that failed.
_TAIL_LINES = 3
_TAIL_BYTES = 1 << 16
_OUT_OF_MEMORY = re.compile(
    rb"out of memory|OutOfMemoryError|MemoryError|Cannot allocate memory|can't allocate memory",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessEnd:
    """How a command ended."""

    code: int | None
    """As a shell says it, 128 + N for signal N; None where it was stopped for its time."""
    seconds: float


@contextlib.contextmanager
def guarded(
    words: Sequence[str], environment: Mapping[str, str], *, token: str, log: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a command under its guard; all that came of it ends with the `with`."""
    with log.open("wb") as output:
        guard = subprocess.Popen(  # noqa: S603 (our own file, and the user's command after it)
            [sys.executable, "-I", "-S", str(GUARD), *words],
            env={**environment, MARK: token},
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield guard
    finally:
        if guard.stdin is not None:
            guard.stdin.close()  # the guard's word to end whatever still runs
        guard.wait()
        end_marked(token)


def run_guarded(
    words: Sequence[str],
    environment: Mapping[str, str],
    *,
    token: str,
    log: Path,
    timeout_s: float | None,
) -> ProcessEnd:
    """Run a command under its guard, for so long at most."""
    began = time.monotonic()
    code: int | None
    with guarded(words, environment, token=token, log=log) as guard:
        try:
            code = guard.wait(timeout_s)
        except subprocess.TimeoutExpired:
            code = None
    return ProcessEnd(code=code, seconds=time.monotonic() - began)


def end_marked(token: str) -> int:
    """Kill what still runs of a run, should its guard have been killed too; return how many."""
    mark = f"{MARK}={token}".encode()
    marks = (mark, mark + b".load")
    ended = 0
    for folder in _PROC.glob("[0-9]*"):
        try:
            environment = (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if any(known in environment for known in marks) and int(folder.name) != os.getpid():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(int(folder.name), signal.SIGKILL)
                ended += 1
    return ended


def say_failure(code: int, log: Path) -> tuple[Kind, str]:
    """Say by its exit code and its output why a command failed.

    Of all that ends a job with SIGKILL the kernel is the most likely, which does so for memory.
    """
    with log.open("rb") as output:
        output.seek(max(0, log.stat().st_size - _TAIL_BYTES))
        tail = output.read()
    lines = [line.strip() for line in tail.decode("utf-8", "replace").splitlines()]
    words = " / ".join([line for line in lines if line][-_TAIL_LINES:])
    if _OUT_OF_MEMORY.search(tail):
        return Kind.OUT_OF_MEMORY, words
    kind, how = Kind.CRASHED, f"exit code {code}"
    if code == SIGNALLED + signal.SIGKILL:
        kind = Kind.OUT_OF_MEMORY
        how = f"killed (signal {signal.SIGKILL:d}), as the kernel does when memory is out"
    elif code > SIGNALLED:
        how = f"signal {code - SIGNALLED}"
    return kind, f"{how}: {words}" if words else how
