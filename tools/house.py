"""Counts the house: its files, how long they are, and how many of them a `find` walks through.

    python tools/house.py tests/data/h200/fwd_closed_m4

A file is on the path when a function of it is called while the answer is made; what its import
alone runs does not count.
"""

from __future__ import annotations

import inspect
import json
import sys
from contextlib import redirect_stdout
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import debubble
from debubble.cli import main

if TYPE_CHECKING:
    from types import CodeType, FrameType

HOUSE = Path(debubble.__file__).parent


def count_files() -> dict[str, float]:
    """Return how many files the package has, and how long they are."""
    lengths = [len(file.read_text("utf-8").splitlines()) for file in HOUSE.rglob("*.py")]
    return {"files": len(lengths), "median": median(lengths), "longest": max(lengths)}


def walk(traces: list[str]) -> list[str]:
    """Return the files that a `find` calls functions of."""
    found: set[str] = set()
    ours: dict[CodeType, str | None] = {}

    def note(frame: FrameType, event: str, _: object) -> None:
        if event != "call":
            return
        code = frame.f_code
        if code not in ours:
            path = Path(code.co_filename)
            known = path.is_relative_to(HOUSE) and code.co_flags & inspect.CO_NEWLOCALS
            ours[code] = str(path.relative_to(HOUSE)) if known else None
        file = ours[code]
        if file is not None and file not in found and not _imports(frame):
            found.add(file)

    with redirect_stdout(sys.stderr):
        sys.setprofile(note)
        try:
            main(["find", "--quiet", *traces])
        except SystemExit as end:
            if end.code:
                raise
        finally:
            sys.setprofile(None)
    return sorted(found)


def _imports(frame: FrameType) -> bool:
    """Tell what runs because a module is imported."""
    outer = frame.f_back
    while outer is not None:
        code = outer.f_code
        if code.co_name == "<module>" and Path(code.co_filename).is_relative_to(HOUSE):
            return True
        outer = outer.f_back
    return False


if __name__ == "__main__":
    print(json.dumps({**count_files(), "path": walk(sys.argv[1:])}, indent=1))
