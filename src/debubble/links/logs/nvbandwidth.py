"""What nvbandwidth and SuperBench's gpu_copy print in → their measurements.

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

from debubble.links.logs.model import (
    CopyLog,
    Matrix,
    MatrixLog,
    damaged,
    number,
    number_or_none,
    whole,
)

_VERSION = re.compile(r"^nvbandwidth Version:\s*(\S+)")
_RUNNING = re.compile(r"^Running (\S+?)\.?$")
_TITLE = re.compile(r"\((GB/s|ns|us)\)\s*$")
_SUM = re.compile(r"^SUM (\S+)\s+(\S+)\s*$")
# What is printed after the last test.
_CLOSING = "NOTE: The reported results"
# The status of a test that has not come to its end.
_UNDER_WAY = "Running"
# Each cell is printed with two digits after the point.
_ROUNDED = 0.0051
_FIGURE = re.compile(r"^((?:cpu|gpu\d+|gpu_all)_(?:to|and)_\S+)\s*(\S*)\s*(\S*)$")
_END = r"(?:cpu|gpu\d+|gpu_all)"
_NAME = re.compile(rf"^{_END}_(?:to|and)_{_END}_(?:(?:read|write)_)?by_(?:sm|dma)")


def is_nvbandwidth_text(text: str) -> bool:
    """Tell whether nvbandwidth printed this."""
    return any(_VERSION.match(line) or _RUNNING.match(line) for line in text.splitlines())


def is_nvbandwidth_json(data: Any) -> bool:
    """Tell whether nvbandwidth wrote this."""
    return isinstance(data, dict) and "nvbandwidth" in data


def read_nvbandwidth_text(text: str, file: str) -> MatrixLog:
    """Read every matrix that was printed; tests that were waived have none."""
    lines = text.splitlines()
    version = next((found[1] for line in lines if (found := _VERSION.match(line))), "")
    starts = [index for index, line in enumerate(lines) if _RUNNING.match(line)]
    if not starts:
        raise damaged("no test was run", file)
    tests = [
        _matrix_of_text(lines[begin:end], begin + 1, file)
        for begin, end in pairwise([*starts, len(lines)])
    ]
    sums = [found[1] for line in lines if (found := _SUM.match(line))]
    begun = [test.name for test in tests if test.cells]
    if sums != begun:
        name = next((name for name in sums if name not in begun), sums[-1])
        raise damaged(
            f"{name} has a sum, and was not begun",
            file,
            "lines are missing; give the log as nvbandwidth wrote it",
        )
    cut = ""
    if not any(line.startswith(_CLOSING) for line in lines[starts[-1] :]):
        cut = f"it ends after {tests[-1].name}, without nvbandwidth's closing note"
    elif not version:
        cut = f"it begins with {tests[0].name}, without nvbandwidth's first line"
    return MatrixLog(file=file, version=version, tests=tuple(tests), cut=cut)


def _matrix_of_text(lines: Sequence[str], first: int, file: str) -> Matrix:
    found = _RUNNING.match(lines[0])
    name = found[1] if found else ""
    title = next((index for index, line in enumerate(lines) if _TITLE.search(line)), None)
    if title is None:
        if not any(line.startswith(("Waived", "WAIVED")) for line in lines[1:]):
            raise damaged(f"line {first}: {name} has no matrix", file)
        return _without_figures(name, "Waived")
    unit = _TITLE.findall(lines[title])[0]
    table = list(takewhile(bool, (line.split() for line in lines[title + 1 :])))
    if len(table) < 2:
        raise damaged(f"line {first + title}: {name} has no matrix", file)
    where = f"line {first + title + 1}"
    columns = tuple(whole(word, file, where) for word in table[0])
    rows, cells = [], []
    for count, words in enumerate(table[1:], 2):
        where = f"line {first + title + count}"
        if len(words) != len(columns) + 1:
            raise damaged(f"{where}: {len(words) - 1} figures for {len(columns)} columns", file)
        rows.append(whole(words[0], file, where))
        cells.append(tuple(number_or_none(word, file, where) for word in words[1:]))
    ending = next((found for line in lines if (found := _SUM.match(line))), None)
    if ending is None or ending[1] != name:
        raise damaged(f"line {first}: {name} has no sum at its end", file)
    matrix = Matrix(
        name=name,
        status="Passed",
        unit=unit,
        rows=tuple(rows),
        columns=columns,
        cells=tuple(cells),
        total=number(ending[2], file, f"line {first}"),
    )
    return _checked(matrix, file)


def read_nvbandwidth_json(data: dict[str, Any], file: str) -> MatrixLog:
    """Read every matrix that was written; its cells are words."""
    root = data["nvbandwidth"]
    tests = root.get("testcases") if isinstance(root, dict) else None
    if not isinstance(tests, list):
        raise damaged("'testcases' is missing", file)
    found = tuple(_matrix_of_json(test, file) for test in tests)
    stopped = next((test.name for test in found if test.status == _UNDER_WAY), None)
    return MatrixLog(
        file=file,
        version=str(root.get("git_version", root.get("version", ""))),
        tests=found,
        cut=f"it was written while {stopped} ran" if stopped else "",
    )


def _matrix_of_json(test: Any, file: str) -> Matrix:
    name = test.get("name") if isinstance(test, dict) else None
    if not isinstance(name, str):
        raise damaged("a test without a name", file)
    status = str(test.get("status", ""))
    grid = test.get("bandwidth_matrix")
    if status != "Passed":
        return _without_figures(name, status or "without a status")
    if not isinstance(grid, list) or not all(isinstance(row, list) for row in grid):
        raise damaged(f"{name}: 'bandwidth_matrix' is missing", file)
    cells = tuple(tuple(number_or_none(str(cell), file, name) for cell in row) for row in grid)
    if len({len(row) for row in cells}) != 1:
        raise damaged(f"{name}: rows of different lengths", file)
    if "sum" not in test:
        raise damaged(f"{name}: 'sum' is missing", file)
    described = _TITLE.findall(str(test.get("bandwidth_description", "")))
    matrix = Matrix(
        name=name,
        status=status,
        unit=described[0] if described else ("ns" if "latency" in name else "GB/s"),
        rows=tuple(range(len(cells))),
        columns=tuple(range(len(cells[0]))),
        cells=cells,
        total=number(str(test["sum"]), file, name),
    )
    return _checked(matrix, file)


def _without_figures(name: str, status: str) -> Matrix:
    return Matrix(name=name, status=status, unit="", rows=(), columns=(), cells=(), total=None)


def _checked(matrix: Matrix, file: str) -> Matrix:
    """Hold the cells against their sum: what is missing does not add up."""
    known = [cell for row in matrix.cells for cell in row if cell is not None]
    total = matrix.total or 0.0
    if abs(sum(known) - total) > _ROUNDED * (len(known) + 1) + 1e-4 * abs(total):
        raise damaged(
            f"{matrix.name}: the figures add up to {sum(known):.2f}, and the log says {total:.2f}",
            file,
            "figures are missing or altered; give the log as nvbandwidth wrote it",
        )
    return matrix


def is_gpu_copy(text: str) -> bool:
    """Tell whether this lists copies between devices."""
    return any(_FIGURE.match(line) for line in text.splitlines())


def read_gpu_copy(text: str, file: str) -> CopyLog:
    """Read a name and a figure a line."""
    rates: dict[str, float] = {}
    for count, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        found = _FIGURE.match(line.strip())
        if found is None or not _NAME.match(found[1]) or not found[2] or found[3]:
            raise damaged(f"line {count}: not the name of a copy and its figure", file)
        if found[1] in rates:
            raise damaged(f"line {count}: {found[1]} comes twice", file)
        rates[found[1]] = number(found[2], file, f"line {count}")
    return CopyLog(file=file, rates_gb_s=tuple(rates.items()))
