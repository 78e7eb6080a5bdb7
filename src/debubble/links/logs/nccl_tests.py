"""What nccl-tests prints in → its measurements.

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
from typing import Any

from debubble.errors import Code
from debubble.links.hop_times import GB
from debubble.links.logs.log import (
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
    r"(?: timestamp\S*)?$"
)
_STAMP = re.compile(r"\d+[-:]\d+")
"""Of `-T`, a date and a time."""
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


def _tells(text: str, _data: Any) -> bool:
    return bool(_CONFIG.search(text)) or any(map(_header_of, text.splitlines()))


def _header_of(line: str) -> re.Match[str] | None:
    return _HEADER.match("# " + " ".join(line.removeprefix("#").split()))


def _rows(text: str, file: str) -> Iterator[tuple[int, list[_Half | None]]]:
    header = None
    for count, line in enumerate(text.splitlines(), 1):
        where, words = f"line {count}", line.split()
        header = _header_of(line) or header
        # Lines of NCCL itself, such as `host:12:34 [0] NCCL INFO`, may begin with a digit, too.
        if not words or not words[0][:1].isdigit() or "NCCL" in line or ":" in words[0]:
            continue
        if header is None:
            raise damaged(f"{where}: figures before the names of their columns", file)
        words = [word for word in words if not _STAMP.match(word)]
        halves = header["halves"].split()
        # Some tests leave the reduction or the root empty.
        fixed = len(words) - len(halves)
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


def _half(named: Mapping[str, str], size: int, file: str, where: str) -> _Half | None:
    """Read one measurement, whose rate has to fit size and time: else columns changed places."""
    clock = "cputime" if "cputime" in named else "time"
    wrong = named.get("#wrong", named.get("error", "N/A"))
    time, algbw, busbw = (
        number_or_none(named[name], file, f"{where}, {name}") for name in (clock, "algbw", "busbw")
    )
    if time is None or algbw is None or busbw is None:
        return None
    half = _Half(
        time_us=time,
        algbw_gb_s=algbw,
        busbw_gb_s=busbw,
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


def _read(text: str, _data: Any, file: str) -> Log:
    average, bounds, named = (found.search(text) for found in (_AVERAGE, _BOUNDS, _TEST))
    if average is None:
        raise damaged("cut off: the line '# Avg bus bandwidth' is missing", file)
    test, ranks = named[1] if named else "", tuple(map(int, _RANK.findall(text)))
    rows = list(_rows(text, file))
    halves = [half for _, parts in rows for half in parts if half is not None]
    if not halves:
        raise damaged("no sizes were measured", file)
    rates = [half.busbw_gb_s for half in halves]
    mean = number(average[1], file, "the line '# Avg bus bandwidth'")
    checked_sum(rates, mean, len(rates), "the rows average", file)
    ring = f"{len(ranks)} ranks send in a ring, as fast as its slowest hop"
    passes_messages = test.startswith("sendrecv")
    return Log(
        file=file,
        program="nccl-tests",
        about=f"{test or 'nccl-tests'}, {counted(len(ranks), 'rank')}",
        columns=_COLUMNS,
        rows=tuple((size, *_cells(out), *_cells(into)) for size, (out, into) in rows),
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
            for size, (out, _) in rows
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
                (bounds and int(bounds[1])) or any(half.wrong for half in halves),
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
