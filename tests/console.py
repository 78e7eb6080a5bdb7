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
# In expected output this stands for anything on its line.
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
    """Compare line by line; trailing blanks do not count, a wildcard stands for anything."""
    left, right = (text.strip("\n").splitlines() for text in (expected, printed))
    return len(left) == len(right) and all(map(_same_line, left, right))


def _same_line(expected: str, printed: str) -> bool:
    pattern = ".*".join(map(re.escape, expected.rstrip().split(WILDCARD)))
    return re.fullmatch(pattern, printed.rstrip()) is not None
