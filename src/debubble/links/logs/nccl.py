"""What nccl-tests prints, as text or JSON, in → its measurements.

```
#   size  count   type  redop  root   time  algbw  busbw #wrong   time  algbw  busbw #wrong
   65536  16384  float   none    -1   31.2   2.10   2.10      0   30.9   2.12   2.12      0
   └─ some may be empty ──────────┘   └─ out of place ───────┘   └─ in place ───────────┘
```

Nothing is taken on trust: a rate has to fit its size and time, the rows their average, and the
sizes what was asked for. A log that was cut or altered is refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from debubble.links.hop_times import GB
from debubble.links.logs.model import (
    Half,
    LogRank,
    NcclLog,
    NcclRow,
    checked_half,
    checked_log,
    damaged,
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
_NOT_A_NUMBER = frozenset({"nan", "-nan", "N/A"})


def is_nccl_text(text: str) -> bool:
    """Tell whether nccl-tests printed this."""
    return any(_CONFIG.match(line) or _header_of(line) for line in text.splitlines())


def is_nccl_json(data: Any) -> bool:
    """Tell whether nccl-tests wrote this."""
    return isinstance(data, dict) and "config" in data and ("results" in data or "args" in data)


def read_nccl_text(text: str, file: str) -> NcclLog:
    """Read what one program of nccl-tests printed."""
    lines = text.splitlines()

    def said(pattern: re.Pattern[str]) -> str:
        """Return what a line says; nothing where there is none."""
        return next((found[1] for line in lines if (found := pattern.match(line))), "")

    if not any(map(_header_of, lines)):
        raise damaged("no line names the columns", file)
    average, bounds = said(_AVERAGE), said(_BOUNDS)
    if not average:
        raise damaged("cut off: the line '# Avg bus bandwidth' is missing", file)
    rows = tuple(_text_rows(lines, file))
    log = checked_log(
        NcclLog(
            file=file,
            test=said(_TEST),
            version=said(_VERSION),
            ranks=tuple(
                LogRank(
                    rank=int(found[1]),
                    group=int(found[2] or 0),
                    host=found[3],
                    device=int(found[4]),
                    device_name=found[5].strip(),
                )
                for line in lines
                if (found := _RANK.match(line))
            ),
            rows=rows,
            average_bytes_per_s=GB * number(average, file, "the line '# Avg bus bandwidth'"),
            out_of_bounds=int(bounds) if bounds else None,
        )
    )
    _check_sizes(text, rows, file)
    return log


def read_nccl_json(data: dict[str, Any], file: str) -> NcclLog:
    """Read what one program of nccl-tests wrote.

    `env` holds the whole environment of whoever ran it, secrets too: it goes first of all.
    """
    data.pop("env", None)
    config, results = data.get("config"), data.get("results")
    for name, found, kind in (("config", config, dict), ("results", results, list)):
        if not isinstance(found, kind):
            raise damaged(f"{name!r} is missing", file)
    rows = tuple(_json_row(row, file, f"result {count}") for count, row in enumerate(results or []))
    ending, bounds = data.get("average_bus_bandwidth"), data.get("out_of_bounds")
    if not isinstance(ending, dict) or "end_time" not in data:
        raise damaged("cut off: the test did not write its end", file)
    devices, words = (config or {}).get("devices", []), data.get("args", [])
    if not isinstance(words, list):
        raise damaged("'args' is no list of words", file)
    if not isinstance(devices, list) or not all(isinstance(row, dict) for row in devices):
        raise damaged("'devices' is no list of devices", file)
    arguments = [word for word in words if isinstance(word, str)]
    return checked_log(
        NcclLog(
            file=file,
            test=arguments[0].rpartition("/")[2] if arguments else "",
            version=f"file version {data.get('version', 1)}",
            ranks=tuple(_json_rank(row, file) for row in devices),
            rows=rows,
            average_bytes_per_s=GB * _figure(ending, "bandwidth", file, "average_bus_bandwidth"),
            out_of_bounds=int(_figure(bounds, "count", file, "out_of_bounds"))
            if isinstance(bounds, dict)
            else None,
        )
    )


def _check_sizes(text: str, rows: Sequence[NcclRow], file: str) -> None:
    """Hold the sizes against the settings: no row is missing between them or at an end."""
    found = _LADDER.search(text)
    if found is None:
        return
    smallest, largest, step = int(found[1]), int(found[2]), int(found[3])
    factor, plus = (step, 0) if found[4] == "factor" else (1, step)
    # Small sizes are rounded to whole elements for all ranks, and may become 0.
    sizes = [row.bytes for row in rows if row.bytes >= _ROUNDED_BELOW]
    gap = next((size for last, size in pairwise(sizes) if size != last * factor + plus), None)
    late = len(sizes) == len(rows) and sizes and sizes[0] > max(smallest, _ROUNDED_BELOW)
    if gap or late or (sizes and sizes[-1] * factor + plus <= largest):
        before = f" before {gap}" if gap else ""
        raise damaged(
            f"sizes from {smallest} to {largest} were asked for, and some are missing{before}", file
        )


def _text_rows(lines: Sequence[str], file: str) -> Iterator[NcclRow]:
    header: list[str] = []
    for count, line in enumerate(lines, 1):
        where = f"line {count}"
        if words := _header_of(line):
            header = words
            _check_header(header, file, where)
        elif line.strip()[:1].isdigit() and not _of_nccl_itself(line):
            if not header:
                raise damaged(f"{where}: figures before their header", file)
            yield _text_row(header, line.split(), file, where)


def _header_of(line: str) -> list[str]:
    """Return the names of the columns; nothing for any other line."""
    words = line.removeprefix("#").split()
    named = line.startswith("#") and bool({"size", "count"} & set(words[:2]))
    return words if named and {"algbw", "busbw"} & set(words) else []


def _of_nccl_itself(line: str) -> bool:
    """Tell lines of NCCL, such as `host:12:34 [0] NCCL INFO`, from rows."""
    return "NCCL" in line or ":" in line.split(maxsplit=1)[0]


def _check_header(header: Sequence[str], file: str, where: str) -> None:
    """Refuse columns that a row could not be read by: two halves, each a time and two rates."""
    halves = _halves_of(header)
    fixed = header[: halves[0].start if halves else 0]
    missing = [name for name in ("size", "count", "type") if fixed.count(name) != 1]
    missing += [name for half in halves for name in _RATES if header[half].count(name) != 1]
    if not halves or missing:
        raise damaged(
            f"{where}: the header has no column {(missing or ['time'])[0]!r} where one belongs",
            file,
            "give the log as nccl-tests wrote it",
        )


def _halves_of(columns: Sequence[str]) -> list[slice]:
    """Return where each half stands: from its time on, up to the next one's."""
    starts = [index for index, name in enumerate(columns) if name in _TIMES]
    return [slice(*ends) for ends in pairwise([*starts, len(columns)])]


def _text_row(header: Sequence[str], words: list[str], file: str, where: str) -> NcclRow:
    columns, words = _fit_columns(header, words, file, where)
    halves = _halves_of(columns)
    named = dict(zip(columns[: halves[0].start], words, strict=False))
    size = whole(named["size"], file, where)
    whole(named["count"], file, where)
    if not named["type"][:1].isalpha() or named["type"] in _REDUCTIONS:
        raise damaged(f"{where}: {named['type']!r} is no type", file)
    found = [_text_half(columns[half], words[half], size, file, where) for half in halves]
    return NcclRow(
        bytes=size,
        out_of_place=found[0],
        in_place=found[1] if len(found) > 1 else None,
    )


def _fit_columns(
    header: Sequence[str], words: list[str], file: str, where: str
) -> tuple[list[str], list[str]]:
    """Give each word its column; some tests leave the reduction or the root empty."""
    columns = list(header)
    if _TIMESTAMP in columns[-1]:
        columns, words = columns[:-1], words[: len(columns) - 1]
    for name in _EMPTY_FOR_SOME:
        if len(words) < len(columns) and name in columns:
            index = columns.index(name)
            word = words[index] if index < len(words) else ""
            # A reduction is a word, a root is a number.
            fits = word[:1].isalpha() if name == "redop" else word.lstrip("-").isdigit()
            if not fits:
                columns.remove(name)
    if len(words) != len(columns):
        raise damaged(f"{where}: {len(words)} figures for {len(columns)} columns", file)
    return columns, words


def _text_half(
    names: Sequence[str], words: Sequence[str], size: int, file: str, where: str
) -> Half | None:
    found = dict(zip(names, words, strict=True))
    clock = names[0]
    time, algbw, busbw = (number_or_none(found[name], file, where) for name in (clock, *_RATES))
    if time is None or algbw is None or busbw is None:
        return None
    wrong = next((found[name] for name in _WRONG if name in found), "N/A")
    iterations = (
        (name, number_or_none(word, file, where))
        for name, word in found.items()
        if name.startswith("i_")
    )
    half = Half(
        time_s=time / 1e6,
        algbw_bytes_per_s=algbw * GB,
        busbw_bytes_per_s=busbw * GB,
        wrong=number_or_none(wrong, file, where),
        host_time=clock == "cputime",
        iterations={name: value for name, value in iterations if value is not None},
    )
    return checked_half(size, half, file, where)


def _json_rank(row: Any, file: str) -> LogRank:
    return LogRank(
        rank=int(_figure(row, "rank", file, "devices")),
        group=int(_figure(row, "group", file, "devices")) if "group" in row else 0,
        host=str(row.get("hostname", "")),
        device=int(_figure(row, "device", file, "devices")),
        device_name=str(row.get("device_info", "")),
    )


def _json_row(row: Any, file: str, where: str) -> NcclRow:
    size = int(_figure(row, "size", file, where))
    out_of_place, in_place = (
        _json_half(row, name, size, file, f"{where}, {name}")
        for name in ("out_of_place", "in_place")
    )
    if "out_of_place" not in row:
        raise damaged(f"{where}: 'out_of_place' is missing", file)
    _figure(row, "count", file, where)
    return NcclRow(
        bytes=size,
        out_of_place=out_of_place,
        in_place=in_place,
    )


def _json_half(row: dict[str, Any], name: str, size: int, file: str, where: str) -> Half | None:
    data, spread = row.get(name), row.get(f"{name}_per_iter")
    if data is None:
        return None
    known = data if isinstance(data, dict) else {}
    if known.get("alg_bw") in _NOT_A_NUMBER:
        return None
    host_time = "cpu_time" in known
    iterations = spread.items() if isinstance(spread, dict) else ()
    half = Half(
        time_s=_figure(data, "cpu_time" if host_time else "time", file, where) / 1e6,
        algbw_bytes_per_s=_figure(data, "alg_bw", file, where) * GB,
        busbw_bytes_per_s=_figure(data, "bus_bw", file, where) * GB,
        wrong=_finite(known.get("nwrong")),
        host_time=host_time,
        iterations={
            word: value for word, figure in iterations if (value := _finite(figure)) is not None
        },
    )
    return checked_half(size, half, file, where)


def _figure(data: Any, name: str, file: str, where: str) -> float:
    value = _finite(data.get(name)) if isinstance(data, dict) else None
    if value is None:
        raise damaged(f"{where}: {name!r} is no number", file)
    return value


def _finite(found: Any) -> float | None:
    """Return a number; None for anything else, and for what no computer counts to."""
    if isinstance(found, bool) or not isinstance(found, int | float):
        return None
    try:
        return float(found) if math.isfinite(found) else None
    except OverflowError:
        return None
