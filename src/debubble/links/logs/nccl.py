"""What nccl-tests prints, as text or JSON, in → its measurements."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from debubble.errors import LogError
from debubble.links.logs.model import (
    RERUN,
    Half,
    LogRank,
    NcclLog,
    NcclRow,
    check_average,
    check_half,
    number,
    number_or_none,
    whole,
)

_RANK = re.compile(
    r"^#\s+Rank\s+(\d+)\s+(?:Group\s+(\d+)\s+)?Pid\s+\d+\s+on\s+(\S+)\s+device\s+(\d+)"
    r"\s+\[[^\]]*\]\s*(.*)$"
)
_TEST = re.compile(r"^#\s*Collective test starting:\s*(\S+)")
_VERSION = re.compile(r"^#\s*nccl-tests version\s+(\S+)")
_AVERAGE = re.compile(r"^#\s*Avg bus bandwidth\s*:\s*(\S+)")
_BOUNDS = re.compile(r"^#\s*Out of bounds values\s*:\s*(\d+)")
_LADDER = re.compile(r"minBytes (\d+) maxBytes (\d+) step: (\d+)\((factor|bytes)\)")
_ROUNDED_BELOW = 4096
_CONFIG = re.compile(r"^#\s*nThreads?\s+\d+\s+nGpus\s+\d+")
_TIMES = ("time", "cputime")
_RATES = ("algbw", "busbw")
_REDUCTIONS = frozenset({"sum", "prod", "max", "min", "avg", "mulsum", "none", "all"})
_WRONG = ("#wrong", "error")
_EMPTY_FOR_SOME = ("redop", "root")
_TIMESTAMP = "timestamp"


def is_nccl_text(text: str) -> bool:
    """Tell whether nccl-tests wrote this."""
    lines = text.splitlines()
    return any(_CONFIG.match(line) or _header_of(line) for line in lines)


def read_nccl_text(text: str, file: str) -> NcclLog:
    """Read what one program of nccl-tests printed."""
    lines = text.splitlines()
    average = _said(_AVERAGE, lines)
    if not any(map(_header_of, lines)):
        raise LogError("no line names the columns", hint=RERUN, file=file)
    if not average:
        raise LogError("cut off: the line '# Avg bus bandwidth' is missing", hint=RERUN, file=file)
    rows = tuple(_rows(lines, file))
    mean = number(average, file, "the line '# Avg bus bandwidth'")
    check_average(rows, mean, file)
    _check_sizes(text, rows, file)
    bounds = _said(_BOUNDS, lines)
    return NcclLog(
        file=file,
        test=_said(_TEST, lines),
        version=_said(_VERSION, lines),
        ranks=tuple(_rank(found) for line in lines if (found := _RANK.match(line))),
        rows=rows,
        average_gb_s=mean,
        out_of_bounds=int(bounds) if bounds else None,
    )


def _check_sizes(text: str, rows: Sequence[NcclRow], file: str) -> None:
    """Hold the sizes against the settings: no row is missing between them or at an end."""
    found = _LADDER.search(text)
    if found is None:
        return
    smallest, largest, step = int(found[1]), int(found[2]), int(found[3])
    factor, plus = (step, 0) if found[4] == "factor" else (1, step)
    # Small sizes are rounded to whole elements for all ranks, and may become 0.
    sizes = [row.size_bytes for row in rows if row.size_bytes >= _ROUNDED_BELOW]
    gap = next((two for one, two in pairwise(sizes) if two != one * factor + plus), None)
    late = len(sizes) == len(rows) and sizes and sizes[0] > max(smallest, _ROUNDED_BELOW)
    if gap or late or (sizes and sizes[-1] * factor + plus <= largest):
        raise LogError(
            f"sizes from {smallest} to {largest} were asked for, and some are missing"
            + (f" before {gap}" if gap else ""),
            hint=RERUN,
            file=file,
        )


def _said(pattern: re.Pattern[str], lines: Sequence[str]) -> str:
    """Return what a line says; nothing where there is none."""
    return next((found[1] for line in lines if (found := pattern.match(line))), "")


def _rows(lines: Sequence[str], file: str) -> Iterator[NcclRow]:
    header: list[str] = []
    for count, line in enumerate(lines, 1):
        where = f"line {count}"
        if words := _header_of(line):
            header = words
            _check_header(header, file, where)
        elif line.strip()[:1].isdigit() and _is_row(line):
            if not header:
                raise LogError(f"{where}: figures before their header", hint=RERUN, file=file)
            yield _row(header, line.split(), file, where)


def _rank(found: re.Match[str]) -> LogRank:
    return LogRank(
        rank=int(found[1]),
        group=int(found[2] or 0),
        host=found[3],
        device=int(found[4]),
        device_name=found[5].strip(),
    )


def _header_of(line: str) -> list[str]:
    """Return the names of the columns; nothing for any other line."""
    words = line.removeprefix("#").split()
    named = line.startswith("#") and bool({"size", "count"} & set(words[:2]))
    return words if named and {"algbw", "busbw"} & set(words) else []


def _is_row(line: str) -> bool:
    """Tell rows from lines of NCCL itself, such as `host:12:34 [0] NCCL INFO`."""
    return "NCCL" not in line and ":" not in line.split(maxsplit=1)[0]


def _check_header(header: Sequence[str], file: str, where: str) -> None:
    """Refuse columns that a row could not be read by: two halves, each a time and two rates."""
    starts = [place for place, name in enumerate(header) if name in _TIMES]
    first = starts[0] if starts else 0
    ends = [*starts[1:], len(header)]
    halves = [list(header[begin:end]) for begin, end in zip(starts, ends, strict=False)]
    missing = [name for name in ("size", "count", "type") if header[:first].count(name) != 1]
    missing += [name for half in halves for name in _RATES if half.count(name) != 1]
    if not starts or missing:
        raise LogError(
            f"{where}: the header has no column {(missing or ['time'])[0]!r} where one belongs",
            hint="give the log as nccl-tests wrote it",
            file=file,
        )


def _row(header: Sequence[str], words: list[str], file: str, where: str) -> NcclRow:
    columns, words = _fit_columns(header, words, file, where)
    fixed = next(place for place, name in enumerate(columns) if name in _TIMES)
    named = dict(zip(columns[:fixed], words[:fixed], strict=True))
    size, count = whole(named["size"], file, where), whole(named["count"], file, where)
    if not named["type"][:1].isalpha() or named["type"] in _REDUCTIONS:
        raise LogError(f"{where}: {named['type']!r} is no type", hint=RERUN, file=file)
    starts = [place for place, name in enumerate(columns) if name in _TIMES]
    halves = [
        _half(columns[begin:end], words[begin:end], size, file, where)
        for begin, end in zip(starts, [*starts[1:], len(columns)], strict=True)
    ]
    return NcclRow(
        size_bytes=size,
        count=count,
        kind=named["type"],
        out_of_place=halves[0],
        in_place=halves[1] if len(halves) > 1 else None,
    )


def _fit_columns(
    header: Sequence[str], words: list[str], file: str, where: str
) -> tuple[list[str], list[str]]:
    """Give each word its column; some tests leave the reduction or the root empty."""
    columns = list(header)
    if _TIMESTAMP in columns[-1]:
        columns, words = columns[:-1], words[: len(columns) - 1]
    for name in _EMPTY_FOR_SOME:
        if len(words) < len(columns) and name in columns and not _fits(columns, words, name):
            columns.remove(name)
    if len(words) != len(columns):
        raise LogError(
            f"{where}: {len(words)} figures for {len(columns)} columns", hint=RERUN, file=file
        )
    return columns, words


def _fits(columns: Sequence[str], words: Sequence[str], name: str) -> bool:
    """Tell whether a word stands where a column says: a reduction is a word, a root is a number."""
    place = columns.index(name)
    word = words[place] if place < len(words) else ""
    is_word = word[:1].isalpha()
    return is_word if name == "redop" else word.lstrip("-").isdigit()


def _half(
    names: Sequence[str], words: Sequence[str], size: int, file: str, where: str
) -> Half | None:
    found = dict(zip(names, words, strict=True))
    clock = names[0]
    time, algbw, busbw = (
        number_or_none(found[name], file, where) for name in (clock, "algbw", "busbw")
    )
    wrong = next((found[name] for name in _WRONG if name in found), "N/A")
    if time is None or algbw is None or busbw is None:
        return None
    half = Half(
        time_us=time,
        algbw_gb_s=algbw,
        busbw_gb_s=busbw,
        wrong=number_or_none(wrong, file, where),
        host_time=clock == "cputime",
        iterations=tuple(
            (name, value)
            for name, word in found.items()
            if name.startswith("i_") and (value := number_or_none(word, file, where)) is not None
        ),
    )
    check_half(size, half, file, where)
    return half


_NOT_A_NUMBER = frozenset({"nan", "-nan", "N/A"})


def is_nccl_json(data: Any) -> bool:
    """Tell whether nccl-tests wrote this."""
    return isinstance(data, dict) and "config" in data and ("results" in data or "args" in data)


def read_nccl_json(data: dict[str, Any], file: str) -> NcclLog:
    """Read what one program of nccl-tests wrote.

    `env` holds the whole environment of whoever ran it, secrets too: it goes first of all.
    """
    data.pop("env", None)
    config = _part(data, "config", dict, file)
    devices = config.get("devices", [])
    rows = [
        _size_row(one, file, f"result {place}")
        for place, one in enumerate(_part(data, "results", list, file))
    ]
    ending = data.get("average_bus_bandwidth")
    if not isinstance(ending, dict) or "end_time" not in data:
        raise LogError("cut off: the test did not write its end", hint=RERUN, file=file)
    average = _number(ending, "bandwidth", file, "average_bus_bandwidth")
    check_average(rows, average, file)
    bounds = data.get("out_of_bounds")
    arguments = [word for word in data.get("args", []) if isinstance(word, str)]
    return NcclLog(
        file=file,
        test=arguments[0].rpartition("/")[2] if arguments else "",
        version=f"file version {data.get('version', 1)}",
        ranks=tuple(_place_of(one, file) for one in devices),
        rows=tuple(rows),
        average_gb_s=average,
        out_of_bounds=int(_number(bounds, "count", file, "out_of_bounds"))
        if isinstance(bounds, dict)
        else None,
    )


def _part(data: Any, name: str, kind: type, file: str) -> Any:
    found = data.get(name) if isinstance(data, dict) else None
    if not isinstance(found, kind):
        raise LogError(f"{name!r} is missing", hint=RERUN, file=file)
    return found


def _number(data: Any, name: str, file: str, where: str) -> float:
    found = data.get(name) if isinstance(data, dict) else None
    value = _finite(found)
    if value is None:
        raise LogError(f"{where}: {name!r} is no number", hint=RERUN, file=file)
    return value


def _finite(found: Any) -> float | None:
    """Return a number; None for anything else, and for what no computer counts to."""
    if isinstance(found, bool) or not isinstance(found, int | float):
        return None
    try:
        return float(found) if math.isfinite(found) else None
    except OverflowError:
        return None


def _place_of(one: Any, file: str) -> LogRank:
    return LogRank(
        rank=int(_number(one, "rank", file, "devices")),
        group=int(_number(one, "group", file, "devices")) if "group" in one else 0,
        host=str(one.get("hostname", "")),
        device=int(_number(one, "device", file, "devices")),
        device_name=str(one.get("device_info", "")),
    )


def _size_row(one: Any, file: str, where: str) -> NcclRow:
    size = int(_number(one, "size", file, where))
    halves = [
        _one_way(one, name, size, file, f"{where}, {name}") for name in ("out_of_place", "in_place")
    ]
    if "out_of_place" not in one:
        raise LogError(f"{where}: 'out_of_place' is missing", hint=RERUN, file=file)
    return NcclRow(
        size_bytes=size,
        count=int(_number(one, "count", file, where)),
        kind=str(one.get("type", "")),
        out_of_place=halves[0],
        in_place=halves[1],
    )


def _one_way(one: dict[str, Any], name: str, size: int, file: str, where: str) -> Half | None:
    data = one.get(name)
    if data is None or (isinstance(data, dict) and data.get("alg_bw") in _NOT_A_NUMBER):
        return None
    on_host = isinstance(data, dict) and "cpu_time" in data
    wrong = data.get("nwrong") if isinstance(data, dict) else None
    spread = one.get(f"{name}_per_iter")
    half = Half(
        time_us=_number(data, "cpu_time" if on_host else "time", file, where),
        algbw_gb_s=_number(data, "alg_bw", file, where),
        busbw_gb_s=_number(data, "bus_bw", file, where),
        wrong=_finite(wrong),
        host_time=on_host,
        iterations=tuple(
            (word, value) for word in spread if (value := _finite(spread[word])) is not None
        )
        if isinstance(spread, dict)
        else (),
    )
    check_half(size, half, file, where)
    return half
