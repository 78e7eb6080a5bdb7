"""Runs `$ debubble …` as a reader of the docs would type it, and compares what it prints."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

REPOSITORY = Path(__file__).resolve().parents[3]
_SETTINGS = {"NO_COLOR": "1", "COLUMNS": "120", "PYTHONIOENCODING": "utf-8"}
# In expected output this stands for anything on its line; alone on a line, for any lines.
WILDCARD = "…"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a command printed, stdout before stderr, and how it ended."""

    text: str
    code: int
    out: str = ""
    err: str = ""


def type_command(command: str, folder: Path) -> Answer:
    """Run `debubble …` in a folder that sees the repository's tests as `tests`."""
    if not (folder / "tests").exists():
        (folder / "tests").symlink_to(REPOSITORY / "tests")
    program, *words = shlex.split(command)
    assert program == "debubble", command
    with TemporaryDirectory() as kept:
        order = {
            "words": words,
            "folder": str(folder),
            "environment": os.environ | _SETTINGS,
            "out": f"{kept}/out",
            "err": f"{kept}/err",
        }
        code = _host().run(order)
        printed = [Path(order[name]).read_text("utf-8") for name in ("out", "err")]
    return Answer(text="".join(printed), code=code, out=printed[0], err=printed[1])


class _Host:
    """The process that commands are forked from; it ends when its stdin does."""

    def __init__(self) -> None:
        # One thread, of its libraries too, so that its forks find no lock held.
        settings = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("console_host.py"))],
            env=os.environ | _SETTINGS | settings,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, order: dict[str, object]) -> int:
        """Run one command to its end."""
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(f"{json.dumps(order)}\n")
        stdin.flush()
        code = int(stdout.readline())
        if code == -signal.SIGALRM:
            said = Path(str(order["err"])).read_text("utf-8")
            raise TimeoutError(f"{order['words']} hangs; it said: {said}")
        return code


@cache
def _host() -> _Host:
    return _Host()


def matches(expected: str, printed: str) -> bool:
    """Compare line by line: a wildcard stands for anything on its line, or alone for any lines."""
    lines = [line.rstrip() for line in expected.strip("\n").splitlines()]
    pattern = "".join(map(_pattern, lines))
    text = "".join(f"{line.rstrip()}\n" for line in printed.strip("\n").splitlines())
    return re.fullmatch(pattern, text) is not None


def _pattern(line: str) -> str:
    if line == WILDCARD:
        return r"(?:.*\n)*"
    return "[^\n]*".join(map(re.escape, line.split(WILDCARD))) + r"\n"
