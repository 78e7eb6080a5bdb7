"""What nvbandwidth and the samples' copy tests print in → their measurements."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from debubble.errors import LogError
from debubble.links.logs.model import (
    RERUN,
    CopyLog,
    Matrix,
    MatrixLog,
    number,
    number_or_none,
    whole,
)

_FIGURE = re.compile(r"^((?:cpu|gpu\d+|gpu_all)_(?:to|and)_\S+)\s*(\S*)\s*(\S*)$")
_END = r"(?:cpu|gpu\d+|gpu_all)"
_NAME = re.compile(rf"^{_END}_(?:to|and)_{_END}_(?:(?:read|write)_)?by_(?:sm|dma)")


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
            raise LogError(
                f"line {count}: not the name of a copy and its figure", hint=RERUN, file=file
            )
        if found[1] in rates:
            raise LogError(f"line {count}: {found[1]} comes twice", hint=RERUN, file=file)
        rates[found[1]] = number(found[2], file, f"line {count}")
    return CopyLog(file=file, rates_gb_s=tuple(rates.items()))


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
    starts = [place for place, line in enumerate(lines) if _RUNNING.match(line)]
    if not starts:
        raise LogError("no test was run", hint=RERUN, file=file)
    tests = [
        _matrix(lines[begin:end], begin + 1, file)
        for begin, end in zip(starts, [*starts[1:], len(lines)], strict=True)
    ]
    sums = [found[1] for line in lines if (found := _SUM.match(line))]
    told = [one.name for one in tests if one.cells]
    if sums != told:
        name = next((one for one in sums if one not in told), sums[-1])
        raise LogError(
            f"{name} has a sum, and was not begun",
            hint="lines are missing; give the log as nvbandwidth wrote it",
            file=file,
        )
    cut = ""
    if not any(line.startswith(_CLOSING) for line in lines[starts[-1] :]):
        cut = f"it ends after {tests[-1].name}, without nvbandwidth's closing note"
    elif not version:
        cut = f"it begins with {tests[0].name}, without nvbandwidth's first line"
    return MatrixLog(file=file, version=version, tests=tuple(tests), cut=cut)


def _matrix(lines: Sequence[str], first: int, file: str) -> Matrix:
    found = _RUNNING.match(lines[0])
    name = found[1] if found else ""
    title = next((place for place, line in enumerate(lines) if _TITLE.search(line)), None)
    if title is None:
        waived = any(line.startswith(("Waived", "WAIVED")) for line in lines[1:])
        if not waived:
            raise LogError(f"line {first}: {name} has no matrix", hint=RERUN, file=file)
        return _without_figures(name, "Waived")
    unit = _TITLE.findall(lines[title])[0]
    table = list(_table(lines, title + 1))
    if len(table) < 2:
        raise LogError(f"line {first + title}: {name} has no matrix", hint=RERUN, file=file)
    where = f"line {first + title + 1}"
    columns = tuple(whole(word, file, where) for word in table[0])
    rows, cells = [], []
    for place, words in enumerate(table[1:], 2):
        where = f"line {first + title + place}"
        if len(words) != len(columns) + 1:
            raise LogError(
                f"{where}: {len(words) - 1} figures for {len(columns)} columns",
                hint=RERUN,
                file=file,
            )
        rows.append(whole(words[0], file, where))
        cells.append(tuple(number_or_none(word, file, where) for word in words[1:]))
    ending = next((found for line in lines if (found := _SUM.match(line))), None)
    if ending is None or ending[1] != name:
        raise LogError(f"line {first}: {name} has no sum at its end", hint=RERUN, file=file)
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


def _table(lines: Sequence[str], first: int) -> Iterator[list[str]]:
    for line in lines[first:]:
        words = line.split()
        if not words:
            return
        yield words


def read_nvbandwidth_json(data: dict[str, Any], file: str) -> MatrixLog:
    """Read every matrix that was written; its cells are words."""
    root = data["nvbandwidth"]
    tests = root.get("testcases") if isinstance(root, dict) else None
    if not isinstance(tests, list):
        raise LogError("'testcases' is missing", hint=RERUN, file=file)
    found = tuple(_from_json(one, file) for one in tests)
    stopped = next((one.name for one in found if one.status == _UNDER_WAY), None)
    return MatrixLog(
        file=file,
        version=str(root.get("git_version", root.get("version", ""))),
        tests=found,
        cut=f"it was written while {stopped} ran" if stopped else "",
    )


def _from_json(one: Any, file: str) -> Matrix:
    name = one.get("name") if isinstance(one, dict) else None
    if not isinstance(name, str):
        raise LogError("a test without a name", hint=RERUN, file=file)
    status = str(one.get("status", ""))
    grid = one.get("bandwidth_matrix")
    if status != "Passed":
        return _without_figures(name, status or "without a status")
    if not isinstance(grid, list) or not all(isinstance(row, list) for row in grid):
        raise LogError(f"{name}: 'bandwidth_matrix' is missing", hint=RERUN, file=file)
    cells = tuple(tuple(number_or_none(str(cell), file, name) for cell in row) for row in grid)
    if len({len(row) for row in cells}) != 1:
        raise LogError(f"{name}: rows of different lengths", hint=RERUN, file=file)
    if "sum" not in one:
        raise LogError(f"{name}: 'sum' is missing", hint=RERUN, file=file)
    described = _TITLE.findall(str(one.get("bandwidth_description", "")))
    matrix = Matrix(
        name=name,
        status=status,
        unit=described[0] if described else ("ns" if "latency" in name else "GB/s"),
        rows=tuple(range(len(cells))),
        columns=tuple(range(len(cells[0]))),
        cells=cells,
        total=number(str(one["sum"]), file, name),
    )
    return _checked(matrix, file)


def _without_figures(name: str, status: str) -> Matrix:
    return Matrix(name=name, status=status, unit="", rows=(), columns=(), cells=(), total=None)


def _checked(matrix: Matrix, file: str) -> Matrix:
    """Hold the cells against their sum: what is missing does not add up."""
    known = [cell for row in matrix.cells for cell in row if cell is not None]
    total = matrix.total or 0.0
    if abs(sum(known) - total) > _ROUNDED * (len(known) + 1) + 1e-4 * abs(total):
        raise LogError(
            f"{matrix.name}: the figures add up to {sum(known):.2f}, and the log says {total:.2f}",
            hint="figures are missing or altered; give the log as nvbandwidth wrote it",
            file=file,
        )
    return matrix
