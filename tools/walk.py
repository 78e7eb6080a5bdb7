"""Which files a `find` walks through: lines of the functions it enters, by file.

    python tools/walk.py tests/data/h200/1f1b_p2_m4

A reader follows the files that docs/development/architecture.md names, in their order. They should
hold at least half of the lines that are entered; the last line printed says how many they hold.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
from collections import Counter
from inspect import CO_OPTIMIZED
from pathlib import Path
from types import CodeType, FrameType

from debubble.cli import main

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "debubble"
CHAPTER = "## How `find` comes to its answer"


def walk(arguments: list[str]) -> Counter[str]:
    """Run debubble, and count the lines of the bodies of all functions that it enters, by file."""
    entered: set[CodeType] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            entered.add(frame.f_code)

    sys.argv = ["debubble", *arguments]
    sys.setprofile(note)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
            main()
    finally:
        sys.setprofile(None)
    lines: set[tuple[str, int]] = set()
    for code in entered:
        file = Path(code.co_filename)
        # Bodies of modules and classes are no functions.
        if SOURCE in file.parents and code.co_flags & CO_OPTIMIZED:
            name = str(file.relative_to(SOURCE))
            lines |= {(name, line) for _, _, line in code.co_lines() if line}
    return Counter(name for name, _ in lines)


def named_files() -> list[str]:
    """Return the files that explain `find`, as the architecture names them."""
    text = (ROOT / "docs" / "development" / "architecture.md").read_text("utf-8")
    chapter = text.partition(CHAPTER)[2].partition("\n## ")[0].partition("`plan` goes on")[0]
    return list(dict.fromkeys(re.findall(r"`([a-z_/]+\.py)`", chapter)))


def show(lines: Counter[str], named: list[str]) -> None:
    """Print each file, and what those that are named hold of all."""
    total = lines.total()
    for file, count in lines.most_common():
        print(f"{count:6} {count / total:6.1%} {'*' if file in named else ' '} {file}")
    held = sum(lines[file] for file in named)
    print(f"{len(named)} of {len(lines)} files hold {held} of {total} lines ({held / total:.0%})")


if __name__ == "__main__":
    show(walk(["find", *sys.argv[1:]]), named_files())
