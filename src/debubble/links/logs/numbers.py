"""Words of a log in → numbers, or an error that names the line."""

from __future__ import annotations

import math
from collections.abc import Sequence

from debubble.errors import LogError
from debubble.links.logs.model import Half, NcclRow

_NOT_AVAILABLE = frozenset({"N/A", "n/a", "NA"})
RERUN = "run the test again, or give the whole log"
# Rates are printed with two digits after the point, times with as few as three in all.
_ROUNDED_GB_S = 0.0051
_ROUNDED_SHARE = 0.006
_AVERAGE_SHARE = 0.001
# An exabyte less one has so many; longer ones are garbage that no float holds in the end.
_MOST_DIGITS = 18


def number(word: str, file: str, where: str) -> float:
    """Read a number."""
    try:
        value = float(word)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise LogError(f"{where}: {word!r} is no number", hint=RERUN, file=file)
    return value


def whole(word: str, file: str, where: str) -> int:
    """Read a whole number, 0 or more."""
    if not word.isdecimal() or len(word) > _MOST_DIGITS:
        raise LogError(f"{where}: {word!r} is no whole number", hint=RERUN, file=file)
    return int(word)


def number_or_none(word: str, file: str, where: str) -> float | None:
    """Read a number, or nothing where the test says that it has none."""
    return None if word in _NOT_AVAILABLE else number(word, file, where)


def check_half(size: int, half: Half, file: str, where: str) -> None:
    """Hold the rate against size and time: columns that changed places do not fit together."""
    if half.time_us < 0 or half.algbw_gb_s < 0 or half.busbw_gb_s < 0:
        raise LogError(f"{where}: a figure below 0", hint=RERUN, file=file)
    if half.wrong is not None and half.wrong != int(half.wrong):
        raise LogError(f"{where}: {half.wrong:g} is no count of elements", hint=RERUN, file=file)
    rate = size / half.time_us / 1000 if half.time_us else 0.0
    if abs(rate - half.algbw_gb_s) > _ROUNDED_GB_S + _ROUNDED_SHARE * max(rate, half.algbw_gb_s):
        raise LogError(
            f"{where}: {size} bytes in {half.time_us:g} us are {rate:.2f} GB/s, and algbw says"
            f" {half.algbw_gb_s:g}",
            hint="columns are missing or changed places; give the log as nccl-tests wrote it",
            file=file,
        )


def check_average(rows: Sequence[NcclRow], average: float, file: str) -> None:
    """Hold the rows against the average of the last line: rows that are missing do not add up."""
    halves = [half for row in rows for half in (row.out_of_place, row.in_place) if half]
    if not halves:
        raise LogError("no sizes were measured", hint=RERUN, file=file)
    mean = sum(half.busbw_gb_s for half in halves) / len(halves)
    if abs(mean - average) > _ROUNDED_GB_S + _AVERAGE_SHARE * max(mean, average):
        raise LogError(
            f"the rows average {mean:.3f} GB/s, and the log says {average:g}",
            hint="rows are missing or altered; give the log as nccl-tests wrote it",
            file=file,
        )
