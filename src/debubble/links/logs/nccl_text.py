"""Text of nccl-tests in, of any version → its rows, by the names of their columns."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise

from debubble.errors import LogError
from debubble.links.logs.model import Half, LogRank, NcclLog, NcclRow
from debubble.links.logs.numbers import (
    RERUN,
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
