"""Runs `$ debubble …` as a reader of the docs would type it, and compares what it prints."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
_SETTINGS = {"NO_COLOR": "1", "COLUMNS": "120", "PYTHONIOENCODING": "utf-8"}
# In expected output this stands for anything on its line; alone on a line, for any lines.
WILDCARD = "…"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a command printed, stdout before stderr, and how it ended."""

    text: str
    code: int


def type_command(command: str, folder: Path) -> Answer:
    """Run `debubble …` in a folder that sees the repository's tests as `tests`."""
    if not (folder / "tests").exists():
        (folder / "tests").symlink_to(REPOSITORY / "tests")
    program, *words = shlex.split(command)
    assert program == "debubble", command
    done = subprocess.run(
        [sys.executable, "-m", "debubble", *words],
        cwd=folder,
        env=os.environ | _SETTINGS,
        capture_output=True,
        encoding="utf-8",
        check=False,
        timeout=120,
    )
    return Answer(text=done.stdout + done.stderr, code=done.returncode)


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
