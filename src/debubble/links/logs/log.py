"""What every log of a link test, or of a recorder beside a job, is read into; and its errors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from debubble.errors import Code, Gap, LogError
from debubble.links.hop_times import Hop

Cell = str | int | float | tuple[float | None, ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """Messages of one size over one hop, as one side of it saw them."""

    hop: Hop
    sent: bool
    """Seen by its sender; else by its receiver."""
    size_bytes: int
    time_ns: float
    """What its kernel took, with what it waited for the other side."""
    alone: bool = True
    """The time is its own; else of all that were called together."""
    both_ways: bool = False
    """Another one went the other way at once, and the time is that of either."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """A log: one table, what it tells of single hops or of wires, and what not to read into it."""

    file: str
    program: str
    about: str = ""
    """Of what it is, beside its file."""
    columns: tuple[str, ...]
    """Units in the names, as in JSON."""
    rows: tuple[tuple[Cell, ...], ...]
    ranks: tuple[int, ...] = ()
    """Those of a test."""
    messages: tuple[Message, ...] = ()
    joins: Mapping[Hop, str] = field(default_factory=dict)
    """How each two devices of a host are joined, in the words of `nvidia-smi topo -m`."""
    of_wires: bool = False
    """It tells how devices are joined, or what went wrong between them."""
    doubts: tuple[Gap, ...] = ()


class LogReader(NamedTuple):
    """Knows the logs of one program by their text, or by what JSON they are; and reads them."""

    tells: Callable[[str, Any], bool]
    read: Callable[[str, Any, str], Log]
    """From text, JSON and the file's name."""


RERUN = "run the test again, or give the whole log"
_NOT_AVAILABLE = frozenset({"N/A", "n/a", "NA", "nan", "-nan"})
ROUNDED = 0.0051
"""Rates are printed with two digits after the point."""


def damaged(message: str, file: str, hint: str = RERUN) -> LogError:
    """Return the error of a log that cannot be read as it is."""
    return LogError(message, hint=hint, file=file)


def doubts_about(file: str, *cases: tuple[object, Code, str, str]) -> tuple[Gap, ...]:
    """Say what must not be read into a log: whether it is so, its code, what is said, the cure."""
    return tuple(
        Gap(code=code, message=message, hint=hint, file=file)
        for so, code, message, hint in cases
        if so
    )


def number(word: str, file: str, where: str) -> float:
    """Read a number."""
    try:
        value = float(word)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise damaged(f"{where}: {word!r} is no number", file)
    return value


def whole(word: str, file: str, where: str) -> int:
    """Read a whole number, 0 or more."""
    if not word.isdecimal():
        raise damaged(f"{where}: {word!r} is no whole number", file)
    return int(word)


def number_or_none(word: str, file: str, where: str) -> float | None:
    """Read a number, or nothing where the program says that it has none."""
    return None if word in _NOT_AVAILABLE else number(word, file, where)


def checked_sum(figures: Sequence[float], told: float, count: int, what: str, file: str) -> None:
    """Hold figures against the sum or mean that the log tells: what is missing does not add up."""
    total = sum(figures)
    if abs(total - told * count) > ROUNDED * (len(figures) + 1) + 1e-3 * abs(total):
        raise damaged(
            f"{what} {total / count:.2f}, and the log says {told:g}",
            file,
            "figures are missing or altered; give the log as it was written",
        )
