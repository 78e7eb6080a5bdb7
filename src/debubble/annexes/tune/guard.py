"""Runs a command and leaves nothing of it behind: `python guard.py COMMAND …`.

Its stdin is a pipe that whoever started it holds open. When that ends, by `kill -9` too, or when
the command ends, every process that came of the command is killed, also those in sessions of their
own: this process adopts them. Needs the standard library alone, and is run as a file, without the
packages of the job.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_POLL_S = 0.05
_PROC = Path("/proc")
# As shells say it: ended by a signal, or not to be started at all.
SIGNALLED, _NOT_STARTED = 128, 127


def main(words: list[str]) -> int:
    """Run the command to its end, or to that of whoever wanted it; return its exit code."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        command = subprocess.Popen(  # noqa: S603 (the user's own command, no shell)
            words,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=_die_with_me,  # noqa: PLW1509 (one thread)
        )
    except OSError as error:
        sys.stderr.write(f"{words[0]} cannot be started: {error.strerror}\n")
        return _NOT_STARTED
    wanted = True
    while wanted and command.poll() is None:
        ready, _, _ = select.select([sys.stdin], [], [], _POLL_S)
        wanted = not ready
    code = command.returncode
    end_all(command.pid)
    if code is None:
        return SIGNALLED + signal.SIGKILL
    return code if code >= 0 else SIGNALLED - code


def end_all(group: int) -> None:
    """Kill all that came of the command, until nothing is left."""
    while True:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
        for process in descendants(os.getpid()):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(_POLL_S / 5)


def descendants(ancestor: int) -> list[int]:
    """Return the processes that came of one, as far as /proc tells."""
    children: dict[int, list[int]] = {}
    for folder in _PROC.glob("[0-9]*"):
        try:
            # The name, in brackets, may hold anything; what follows it is plain.
            parent = int(
                (folder / "stat").read_text("utf-8", "replace").rpartition(")")[2].split()[1]
            )
        except (OSError, IndexError, ValueError):
            continue
        children.setdefault(parent, []).append(int(folder.name))
    found: list[int] = []
    waiting = [ancestor]
    while waiting:
        mine = children.get(waiting.pop(), [])
        found += mine
        waiting += mine
    return found


def _die_with_me() -> None:
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    """Ask the kernel, where it is Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
