"""What nccl-tests prints, as text or JSON, in → its measurements.

```
#   size  count   type  redop  root   time  algbw  busbw #wrong   time  algbw  busbw #wrong
   65536  16384  float   none    -1   31.2   2.10   2.10      0   30.9   2.12   2.12      0
   └─ some may be empty ──────────┘   └─ out of place ───────┘   └─ in place ───────────┘
```

Nothing is taken on trust: a rate has to fit its size and time, and the rows their average. A log
that was cut or altered is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from debubble.errors import Code
from debubble.links.hop_times import GB
from debubble.links.logs.log import (
    NOT_AVAILABLE,
    ROUNDED,
    Log,
    LogReader,
    Message,
    checked_sum,
    damaged,
    doubts_about,
    number,
    number_or_none,
    whole,
)
from debubble.units import NS_PER_S, NS_PER_US, counted

_COLUMNS = (
    "size_bytes",
    "time_s",
    "algbw_bytes_per_s",
    "busbw_bytes_per_s",
    "in_place_time_s",
    "in_place_algbw_bytes_per_s",
    "in_place_busbw_bytes_per_s",
)
_CONFIG = re.compile(r"^#\s*nThreads?\s+\d+\s+nGpus\s+\d+", re.MULTILINE)
_HALF = r"(?:time|cputime) algbw busbw(?: #wrong| error)?(?: i_\S+)*"
_HEADER = re.compile(
    rf"^# (?P<fixed>size count type(?: redop)?(?: root)?) (?P<halves>{_HALF}(?: {_HALF})?)"
    r"(?P<stamp>(?: timestamp\S*)?)$"
)
_RANK = re.compile(r"^#\s+Rank\s+(\d+)\s", re.MULTILINE)
_TEST = re.compile(r"^#\s*Collective test starting:\s*(\S+)", re.MULTILINE)
_AVERAGE = re.compile(r"^#\s*Avg bus bandwidth\s*:\s*(\S+)", re.MULTILINE)
_BOUNDS = re.compile(r"^#\s*Out of bounds values\s*:\s*(\d+)", re.MULTILINE)
_REDUCTIONS = frozenset({"sum", "prod", "max", "min", "avg", "mulsum", "none", "all"})
# Times are printed with as few as three digits in all.
_ROUNDED_SHARE = 0.006


@dataclass(frozen=True, slots=True, kw_only=True)
class _Half:
    """One measurement: out of place, or in place."""

    time_us: float
    algbw_gb_s: float
    busbw_gb_s: float
    wrong: bool
    host_time: bool
    """The time is the host's alone (`-C 1`): it tells no bandwidth."""


class _Test(NamedTuple):
    """What a log says of its test."""

    name: str
    """Such as `sendrecv_perf`; empty where the log does not tell."""
    ranks: tuple[int, ...]
    rows: list[tuple[int, list[_Half | None]]]
    """By size: out of place, and in place."""
    average_gb_s: float
    out_of_bounds: float


def _tells(text: str, data: Any) -> bool:
    if data is not None:
        return "config" in data and ("results" in data or "args" in data)
    return bool(_CONFIG.search(text)) or any(map(_header_of, text.splitlines()))


def _header_of(line: str) -> re.Match[str] | None:
    return _HEADER.match("# " + " ".join(line.removeprefix("#").split()))


def _read(text: str, data: Any, file: str) -> Log:
    return _log_of(_read_text(text, file) if data is None else _read_json(data, file), file)


def _read_text(text: str, file: str) -> _Test:
    average, bounds, test = (found.search(text) for found in (_AVERAGE, _BOUNDS, _TEST))
    if average is None:
        raise damaged("cut off: the line '# Avg bus bandwidth' is missing", file)
    return _Test(
        test[1] if test else "",
        tuple(map(int, _RANK.findall(text))),
        list(_text_rows(text, file)),
        number(average[1], file, "the line '# Avg bus bandwidth'"),
        float(bounds[1]) if bounds else 0.0,
    )


def _text_rows(text: str, file: str) -> Iterator[tuple[int, list[_Half | None]]]:
    header = None
    for count, line in enumerate(text.splitlines(), 1):
        where, words = f"line {count}", line.split()
        header = _header_of(line) or header
        # Lines of NCCL itself, such as `host:12:34 [0] NCCL INFO`, may begin with a digit, too.
        if not words or not words[0][:1].isdigit() or "NCCL" in line or ":" in words[0]:
            continue
        if header is None:
            raise damaged(f"{where}: figures before the names of their columns", file)
        halves = header["halves"].split()
        # Some tests leave the reduction or the root empty.
        fixed = len(words) - len(halves) - bool(header["stamp"])
        if not 3 <= fixed <= len(header["fixed"].split()):
            columns = len(halves) + len(header["fixed"].split())
            raise damaged(f"{where}: {len(words)} figures for {columns} columns", file)
        size, _ = (whole(word, file, where) for word in words[:2])
        if not words[2][:1].isalpha() or words[2] in _REDUCTIONS:
            raise damaged(f"{where}: {words[2]!r} is no type", file)
        second = next((at for at in range(1, len(halves)) if "time" in halves[at]), len(halves))
        pairs = list(zip(halves, words[fixed:], strict=False))
        parts = [dict(pairs[:second]), dict(pairs[second:])]
        yield size, [_half(part, size, file, where) if part else None for part in parts]


def _read_json(data: dict[str, Any], file: str) -> _Test:
    """Read what `-J` wrote.

    `env` holds the whole environment of whoever ran it, secrets too: it goes first of all.
    """
    data.pop("env", None)
    config, results, words = (data.get(name) for name in ("config", "results", "args"))
    if not isinstance(config, dict) or not isinstance(results, list):
        raise damaged("'config' or 'results' is missing", file)
    ending, bounds = data.get("average_bus_bandwidth"), data.get("out_of_bounds")
    if not isinstance(ending, dict) or "end_time" not in data:
        raise damaged("cut off: the test did not write its end", file)
    devices = config.get("devices", [])
    for name, found, kind in (("devices", devices, dict), ("args", words or [], object)):
        if not isinstance(found, list) or not all(isinstance(row, kind) for row in found):
            raise damaged(f"'{name}' is no list", file)
    rows: list[tuple[int, list[_Half | None]]] = []
    for count, row in enumerate(results, 1):
        where = f"result {count}"
        if not isinstance(row, dict) or "out_of_place" not in row:
            raise damaged(f"{where}: 'out_of_place' is missing", file)
        size, _ = (whole(row.get(name), file, where) for name in ("size", "count"))
        halves = [row.get(name) for name in ("out_of_place", "in_place")]
        rows.append((size, [half and _half(half, size, file, where) for half in halves]))
    return _Test(
        str(words[0]).rpartition("/")[2] if words else "",
        tuple(whole(row.get("rank"), file, "devices") for row in devices),
        rows,
        number(ending.get("bandwidth"), file, "average_bus_bandwidth"),
        number(bounds.get("count"), file, "out_of_bounds") if isinstance(bounds, dict) else 0.0,
    )


def _half(named: Mapping[str, Any], size: int, file: str, where: str) -> _Half | None:
    """Read one measurement, whose rate has to fit size and time: else columns changed places."""
    if not isinstance(named, Mapping):
        raise damaged(f"{where}: {named!r} is no measurement", file)
    told = {word.replace("_", "").removeprefix("#").removeprefix("n"): word for word in named}
    clock = "cputime" if "cputime" in told else "time"
    time, algbw, busbw, wrong = (
        named.get(told.get(name, name)) for name in (clock, "algbw", "busbw", "wrong")
    )
    wrong = named.get("error", wrong)
    if algbw in NOT_AVAILABLE or time in NOT_AVAILABLE:
        return None
    half = _Half(
        time_us=number(time, file, f"{where}, {clock}"),
        algbw_gb_s=number(algbw, file, f"{where}, algbw"),
        busbw_gb_s=number(busbw, file, f"{where}, busbw"),
        wrong=bool(number_or_none(wrong, file, f"{where}, wrong")),
        host_time=clock == "cputime",
    )
    if min(half.time_us, half.algbw_gb_s, half.busbw_gb_s) < 0:
        raise damaged(f"{where}: a figure below 0", file)
    rate = size / (half.time_us * NS_PER_US) if half.time_us else 0.0
    if abs(rate - half.algbw_gb_s) > ROUNDED + _ROUNDED_SHARE * max(rate, half.algbw_gb_s):
        raise damaged(
            f"{where}: {size} bytes in {half.time_us:g} us are {rate:.2f} GB/s, and algbw says "
            f"{half.algbw_gb_s:g}",
            file,
            "columns are missing or changed places; give the log as nccl-tests wrote it",
        )
    return half


def _log_of(test: _Test, file: str) -> Log:
    halves = [half for _, parts in test.rows for half in parts if half is not None]
    if not halves:
        raise damaged("no sizes were measured", file)
    rates, ranks = [half.busbw_gb_s for half in halves], test.ranks
    checked_sum(rates, test.average_gb_s, len(rates), "the rows average", file)
    ring = f"{len(ranks)} ranks send in a ring, as fast as its slowest hop"
    passes_messages = test.name.startswith("sendrecv")
    return Log(
        file=file,
        program="nccl-tests",
        about=f"{test.name or 'nccl-tests'}, {counted(len(ranks), 'rank')}",
        columns=_COLUMNS,
        rows=tuple((size, *_cells(out), *_cells(into)) for size, (out, into) in test.rows),
        ranks=ranks,
        # Two ranks are a hop; a larger ring names none.
        messages=tuple(
            Message(
                hop=(ranks[0], ranks[1]),
                sent=True,
                size_bytes=size,
                time_ns=out.time_us * NS_PER_US,
                both_ways=True,
            )
            for size, (out, _) in test.rows
            if passes_messages and len(ranks) == 2
            if size and out is not None and out.time_us and not out.host_time
        ),
        doubts=doubts_about(
            file,
            (
                passes_messages and len(ranks) > 2,
                Code.RING_NAMES_NO_HOP,
                f"{ring}: which hop that is cannot be told",
                "run it on two ranks at a time, or torchrun … -m debubble.links",
            ),
            (
                any(half.host_time for half in halves),
                Code.HOST_TIMES,
                "times are the host's (-C 1): they tell no bandwidth",
                "run it again without -C",
            ),
            (
                test.out_of_bounds or any(half.wrong for half in halves),
                Code.WRONG_VALUES,
                "data arrived wrong: this link loses or changes what it carries",
                "take the machine out of service and check its links",
            ),
        ),
    )


def _cells(half: _Half | None) -> tuple[float | None, ...]:
    if half is None:
        return None, None, None
    time_s = half.time_us * NS_PER_US / NS_PER_S
    return time_s, half.algbw_gb_s * GB, half.busbw_gb_s * GB


READERS = (LogReader(_tells, _read),)
