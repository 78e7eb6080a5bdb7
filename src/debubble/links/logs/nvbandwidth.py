"""What nvbandwidth prints in → a figure for each pair of devices.

```
Running device_to_device_memcpy_read_ce.
memcpy CE GPU(row) -> GPU(column) bandwidth (GB/s)
           0         1
 0       N/A    395.10        a figure for each pair
 1    396.40       N/A
SUM device_to_device_memcpy_read_ce 791.50        the cells have to add up to it
```
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise, takewhile
from typing import Any

from debubble.errors import Code
from debubble.links.logs.log import (
    RERUN,
    Cell,
    Log,
    LogReader,
    checked_sum,
    damaged,
    doubts_about,
    number,
    number_or_none,
)

_VERSION = re.compile(r"^nvbandwidth Version:", re.MULTILINE)
_RUNNING = re.compile(r"^Running (\S+?)\.?$")
_UNIT = re.compile(r"\((GB/s|ns|us)\)\s*$")
_SUM = re.compile(r"^SUM (\S+)\s+(\S+)\s*$")
# What is printed after the last test.
_CLOSING = "NOTE: The reported results"
_Row = tuple[Cell, ...]


def _tells(text: str, _data: Any) -> bool:
    return bool(_VERSION.search(text)) or any(map(_RUNNING.match, text.splitlines()))


def _read(text: str, _data: Any, file: str) -> Log:
    """Read every matrix; tests that were waived have none."""
    lines = text.splitlines()
    starts = [index for index, line in enumerate(lines) if _RUNNING.match(line)]
    if not starts:
        raise damaged("no test was run", file)
    rows = [
        _test_of(lines[begin:end], begin + 1, file)
        for begin, end in pairwise([*starts, len(lines)])
    ]
    cut = ""
    if not any(line.startswith(_CLOSING) for line in lines[starts[-1] :]):
        cut = f"it ends after {rows[-1][0]}, without nvbandwidth's closing note"
    elif not _VERSION.search(text):
        cut = f"it begins with {rows[0][0]}, without nvbandwidth's first line"
    return Log(
        file=file,
        program="nvbandwidth",
        about="nvbandwidth",
        columns=("test", "status", "figures", "sum", "unit"),
        rows=tuple(rows),
        doubts=doubts_about(
            file,
            (
                any(str(name).endswith("_ce") and figures for name, _, figures, *_ in rows),
                Code.COPY_ENGINE,
                "figures of copy engines; NCCL sends with kernels, and is slower",
                "hold NCCL's figures against those of kernels (_sm), or its own",
            ),
            (
                cut,
                Code.LOG_CUT,
                f"{cut}: tests may be missing",
                RERUN,
            ),
        ),
    )


def _test_of(lines: Sequence[str], first: int, file: str) -> _Row:
    name = lines[0].removeprefix("Running ").rstrip(".")
    where = f"line {first}: {name}"
    sums = [found for line in lines if (found := _SUM.match(line))]
    title = next((index for index, line in enumerate(lines) if _UNIT.search(line)), None)
    if title is None:
        if sums or not any(line.startswith(("Waived", "WAIVED")) for line in lines[1:]):
            raise damaged(f"{where} has no matrix", file)
        return name, "Waived", None, None, None
    if [found[1] for found in sums] != [name]:
        raise damaged(f"{where} has no sum of its own at its end", file)
    table = list(takewhile(bool, (line.split() for line in lines[title + 1 :])))
    if len(table) < 2 or any(len(words) != len(table[0]) + 1 for words in table[1:]):
        raise damaged(f"{where} has rows that do not fit its columns", file)
    figures = [number_or_none(word, file, where) for words in table[1:] for word in words[1:]]
    total = number(sums[0][2], file, where)
    known = [figure for figure in figures if figure is not None]
    checked_sum(known, total, 1, f"the figures of {name} add up to", file)
    return name, "Passed", tuple(figures), total, _UNIT.findall(lines[title])[0]


READERS = (LogReader(_tells, _read),)
