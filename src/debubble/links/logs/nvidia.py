"""What nvbandwidth, SuperBench and `nvidia-smi` print in → measurements, and how devices join.

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

from debubble.links.hop_times import CLASSES, GB, Hop, LinkClass, nvlink_of
from debubble.links.logs.model import (
    ROUNDED_GB_S,
    CopyLog,
    LinkErrors,
    Matrix,
    MatrixLog,
    NvlinkDevice,
    NvlinkErrors,
    NvlinkStatus,
    Topology,
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
        sum=number(ending[2], file, f"line {first}"),
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
        sum=number(str(test["sum"]), file, name),
    )
    return _checked(matrix, file)


def _without_figures(name: str, status: str) -> Matrix:
    return Matrix(name=name, status=status, unit="", rows=(), columns=(), cells=(), sum=None)


def _checked(matrix: Matrix, file: str) -> Matrix:
    """Hold the cells against their sum: what is missing does not add up."""
    known = [cell for row in matrix.cells for cell in row if cell is not None]
    total = matrix.sum or 0.0
    if abs(sum(known) - total) > ROUNDED_GB_S * (len(known) + 1) + 1e-4 * abs(total):
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
        rates[found[1]] = GB * number(found[2], file, f"line {count}")
    return CopyLog(file=file, bytes_per_s=rates)


_STYLE = re.compile(r"\x1b\[[0-9;]*m")
_GPU = re.compile(r"^GPU(\d+)$")
_JOIN = re.compile(r"^(?:X|NV\d+|PIX|PXB|PHB|NODE|SYS|NVB|PSB)$")
_DEVICE = re.compile(r"^GPU (\d+):\s*(.*?)\s*(?:\(UUID:.*)?$")
_LINK = re.compile(r"^\s*Link (\d+):\s*(.+?)\s*$")
_COUNTER = re.compile(r"^\s*Link (\d+):\s*([A-Za-z][\w ()-]*Errors?[\w ()-]*):\s*(\d+|N/A)\s*$")
_RATE = re.compile(r"^(\S+) GB/s$")
_AS_PRINTED = "give what `nvidia-smi topo -m` printed, as it is"
# 12 links are NVLink 3, 18 are NVLink 4 or 5: the device tells which.
_BY_LINKS = {12: "nvlink3", 8: "nvlink4-h800"}
_PCIE_5 = ("H100", "H200", "H800", "B200", "L40S")


def is_topology(text: str) -> bool:
    """Tell whether `nvidia-smi topo -m` printed this."""
    return any(_columns(line) for line in _plain(text))


def is_nvlink_status(text: str) -> bool:
    """Tell whether `nvidia-smi nvlink -s` printed this."""
    lines = _plain(text)
    return any(map(_DEVICE.match, lines)) and any(map(_LINK.match, lines))


def read_topology(text: str, file: str) -> Topology:
    """Read the part of the matrix that is about devices; network cards and processors stay out."""
    columns: list[int] = []
    joins: dict[Hop, str] = {}
    seen: list[int] = []
    for count, line in enumerate(_plain(text), 1):
        if not columns:
            columns = _columns(line)
            continue
        words = line.split()
        row = _GPU.match(words[0]) if words else None
        if row is None:
            continue
        seen.append(int(row[1]))
        cells = words[1 : len(columns) + 1]
        if len(cells) < len(columns) or not all(map(_JOIN.match, cells)):
            raise damaged(
                f"line {count}: not {len(columns)} joins, such as NV18 or SYS", file, _AS_PRINTED
            )
        joins |= {(seen[-1], other): cell for other, cell in zip(columns, cells, strict=True)}
    if not columns or seen != columns:
        raise damaged(f"{len(seen)} rows for {len(columns)} devices", file, _AS_PRINTED)
    for (here, there), how in joins.items():
        back = joins[there, here]
        if (here == there) != (how == "X") or back != how:
            raise damaged(
                f"GPU{here} to GPU{there} is {how}, and back it is {back}",
                file,
                "cells are missing or changed places; give it as nvidia-smi printed it",
            )
    return Topology(file=file, joins={pair: how for pair, how in joins.items() if how != "X"})


def is_nvlink_errors(text: str) -> bool:
    """Tell whether `nvidia-smi nvlink -e` printed this."""
    lines = _plain(text)
    return any(map(_DEVICE.match, lines)) and any(map(_COUNTER.match, lines))


def read_nvlink_errors(text: str, file: str) -> NvlinkErrors:
    """Read the counters of each device's links; those that a device does not have are left out."""
    device: tuple[int, str] | None = None
    counters: list[LinkErrors] = []
    for count, line in enumerate(_plain(text), 1):
        if found := _DEVICE.match(line):
            device = int(found[1]), found[2]
        elif found := _COUNTER.match(line):
            if device is None:
                raise damaged(f"line {count}: link {found[1]} of no device", file)
            if found[3].isdigit():
                counters.append(
                    LinkErrors(
                        device=device[0],
                        name=device[1],
                        link=int(found[1]),
                        kind=found[2].lower(),
                        errors=int(found[3]),
                    )
                )
        elif line.strip() and not line.lstrip().startswith("Link"):
            raise damaged(f"line {count}: neither a device nor a counter", file)
    return NvlinkErrors(file=file, counters=tuple(counters))


def read_nvlink_status(text: str, file: str) -> NvlinkStatus:
    """Read the links of each device."""
    devices: list[tuple[int, str, list[float | None]]] = []
    for count, line in enumerate(_plain(text), 1):
        where = f"line {count}"
        if found := _DEVICE.match(line):
            devices.append((int(found[1]), found[2], []))
        elif found := _LINK.match(line):
            if not devices or int(found[1]) != len(devices[-1][2]):
                raise damaged(f"{where}: link {found[1]} out of turn", file)
            rate = _RATE.match(found[2])
            if rate is None and found[2] != "<inactive>":
                raise damaged(f"{where}: {found[2]!r} is no rate", file)
            devices[-1][2].append(GB * number(rate[1], file, where) if rate else None)
        elif line.strip():
            raise damaged(f"{where}: neither a device nor a link", file)
    if len({len(links) for _, _, links in devices}) > 1:
        raise damaged("devices with different numbers of links", file)
    return NvlinkStatus(
        file=file,
        devices=tuple(
            NvlinkDevice(device=index, name=name, links_bytes_per_s=tuple(links))
            for index, name, links in devices
        ),
    )


def class_of_join(join: str, device_name: str) -> LinkClass | None:
    """Return the kind of wire of a join, as far as it and the device tell."""
    if join.startswith("NV") and join[2:].isdigit():
        known = nvlink_of(device_name)
        return known or CLASSES.get(_BY_LINKS.get(int(join[2:]), ""))
    if not device_name:
        return None
    newer = any(word in device_name for word in _PCIE_5)
    return CLASSES["pcie5" if newer else "pcie4"] if "A100" in device_name or newer else None


def _columns(line: str) -> list[int]:
    words = line.split()
    found = [match for word in words if (match := _GPU.match(word))]
    alone = bool(words) and _GPU.match(words[0]) and (len(words) < 2 or _GPU.match(words[1]))
    several = len(words) > 1 and not _JOIN.match(words[1])
    return [int(match[1]) for match in found] if alone and (several or len(words) == 1) else []


def _plain(text: str) -> list[str]:
    return [_STYLE.sub("", line) for line in text.splitlines()]
