"""What a person types, reads or is given: sizes, times, shares, harmless names; whole files."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from errno import ENOENT
from glob import escape
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

from debubble.errors import UsageError, mask_secrets

# C0 and C1 control characters, among them the escape that starts a terminal's commands; those that
# break lines or turn the direction of writing, so that a name reads as another; and the invisible.
_TURNING = "\\u061c\\u200b\\u200e\\u200f\\u2028-\\u202e\\u2060-\\u206f\\ufeff\\ufff9-\\ufffb"
_CONTROL = re.compile(f"[\\x00-\\x1f\\x7f-\\x9f{_TURNING}]")
_CONTROL_BUT_BREAK = re.compile(f"[\\x00-\\x09\\x0b-\\x1f\\x7f-\\x9f{_TURNING}]")


def printable(text: str, *, breaks: bool = False) -> str:
    """Show control characters instead of obeying them, and no secrets; `breaks`: lines may end."""
    control = _CONTROL_BUT_BREAK if breaks else _CONTROL
    shown = control.sub(
        lambda match: match[0].encode("unicode_escape").decode(), mask_secrets(text)
    )
    return shown.encode("utf-8", "replace").decode()


_T = TypeVar("_T")
_Number = TypeVar("_Number", int, float)
# Stands for a figure that is not known, in every table.
UNKNOWN = "–"

NS_PER_S = 1_000_000_000
NS_PER_MS = 1_000_000
NS_PER_US = 1_000

# A number without a unit, as a pattern. Floats hold what has two digits of exponent and 64 in all.
PLAIN_NUMBER = r"(?=.{1,64}$)([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]{1,2})?)"
_SIZE = re.compile(r"^\s*([0-9]*\.?[0-9]+)\s*([kmgtp]?)(i?)b?\s*$", re.IGNORECASE)
_TIME = re.compile(r"^\s*([0-9]*\.?[0-9]+)\s*(ns|us|µs|ms|s|min|h|d)\s*$", re.IGNORECASE)
_PRICE = re.compile(r"^\s*([$€£¥]|[A-Z]{3})?\s*([0-9]{0,9}\.?[0-9]{1,9})\s*([$€£¥]|[A-Z]{3})?\s*$")
_LENGTH = re.compile(r"^(\d{1,9})(?::([0-9]{0,9}\.?[0-9]{1,9}))?$")
_S_PER = {"s": 1, "min": 60, "h": 3600, "d": 86400}
_NS_PER = {"ns": 1, "us": NS_PER_US, "µs": NS_PER_US, "ms": NS_PER_MS}
_NS_PER |= {unit: seconds * NS_PER_S for unit, seconds in _S_PER.items()}
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5}


def parse_bytes(text: str) -> int:
    """Read `80GiB`, `1.5 GB`, `4096`: binary with an i, decimal without."""
    match = _SIZE.match(text)
    if match is None:
        raise UsageError(f"{text!r} is no size", hint="write it as 80GiB, 1.5GB or 4096")
    number, power, binary = match.groups()
    base = 1024 if binary else 1000
    return round(float(number) * float(base ** _POWERS[power.lower()]))


def parse_memory(text: str) -> int:
    """Read a limit of memory: with a unit, for nobody means 80 bytes."""
    size = parse_bytes(text)
    if text.strip()[-1:].isdigit():
        raise UsageError(f"{text!r} has no unit", hint=f"write it as {text.strip()}GiB")
    return size


def parse_rate(text: str) -> float:
    """Read `5GB/s`, `800 MiB/s` as bytes per second."""
    size, per, second = text.strip().partition("/")
    if (
        _SIZE.match(size) is None
        or (per + second).lower() not in {"", "/s"}
        or not parse_bytes(size)
    ):
        raise UsageError(f"{text!r} is no rate", hint="write it as 5GB/s or 800MiB/s")
    return float(parse_bytes(size))


def parse_duration(text: str) -> float:
    """Read `18.5ms`, `600 us`, `1.2s`, `5min`, `7d` as nanoseconds."""
    match = _TIME.match(text)
    if match is None:
        raise UsageError(f"{text!r} is no time", hint="write it as 18.5ms, 600us, 1.2s or 5min")
    return float(match[1]) * _NS_PER[match[2].lower()]


def parse_period(text: str) -> float:
    """Read the same as seconds."""
    return parse_duration(text) / NS_PER_S


def parse_price(text: str) -> tuple[float, str]:
    """Read `2.50`, `$2.50`, `2.50 EUR` as an amount and its currency."""
    match = _PRICE.match(text)
    if match is None or (match[1] and match[3]):
        raise UsageError(f"{text!r} is no price", hint="write it as 2.50, $2.50 or 2.50EUR")
    return float(match[2]), match[1] or match[3] or ""


def parse_share(text: str) -> float:
    """Read `20%`, `20 %` or `0.2` as a fraction."""
    number = text.strip().removesuffix("%").strip()
    try:
        share = float(number) / (100 if text.strip().endswith("%") else 1)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise UsageError(f"{text!r} is no share", hint="write it as 20% or 0.2")
    return share


def parse_lengths(text: str) -> tuple[tuple[int, float], ...]:
    """Read `512`, or `512:0.8,2048:0.2`: lengths, and the share that each has of all."""
    parts = [_LENGTH.match(part.strip()) for part in text.split(",")]
    lengths = [(int(part[1]), float(part[2] or 1.0)) for part in parts if part]
    if len(lengths) < len(parts) or any(length < 1 or share <= 0 for length, share in lengths):
        raise UsageError(f"{text!r} is no mix of lengths", hint="write 512, or 512:0.8,2048:0.2")
    total = sum(share for _, share in lengths)
    return tuple((length, share / total) for length, share in lengths)


def show_bytes(count: float) -> str:
    """Write a size with three digits: `3.66 GiB`."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{_three(size)} {unit}"
        size /= 1024
    return f"{_three(size)} TiB"


def show_rate(bytes_per_s: float) -> str:
    """Write bytes per second with three digits, decimal as vendors do: `7.03 GB/s`."""
    size = float(bytes_per_s)
    for unit in ("B/s", "kB/s", "MB/s"):
        if abs(size) < 999.5:
            return f"{_three(size)} {unit}"
        size /= 1000
    return f"{_three(size)} GB/s"


def show_duration(nanoseconds: float) -> str:
    """Write a time with three digits in the unit that fits: `302 ms`, `1.94 s`, `38.6 us`."""
    size = float(nanoseconds)
    for unit in ("ns", "us", "ms"):
        if abs(size) < 999.5:
            return f"{size:.0f} ns" if unit == "ns" else f"{_three(size)} {unit}"
        size /= 1000
    return f"{_three(size)} s"


def show_period(seconds: float) -> str:
    """Write a period as it would be typed: `1h`, `5min`, `1.5s`."""
    for unit in ("d", "h", "min"):
        if seconds >= _S_PER[unit] and not seconds % _S_PER[unit]:
            return f"{seconds / _S_PER[unit]:g}{unit}"
    return f"{seconds:g}s"


def show_share(fraction: float | None) -> str:
    """Write a fraction as percent: `61.2 %`; a dash where it is not known."""
    return UNKNOWN if fraction is None else f"{100 * fraction:.1f} %"


def show_percent(fraction: float | None) -> str:
    """Write a fraction as a sentence does: `61 %`, and `0.4 %` where that would be nothing."""
    return UNKNOWN if fraction is None else _percent(fraction, "")


def show_change(fraction: float) -> str:
    """Write a change as a table does: `+34.2 %`."""
    return f"{round(100 * fraction, 1) + 0.0:+.1f} %"


def show_gain(fraction: float, low: float | None = None, high: float | None = None) -> str:
    """Write a change as a sentence does: `+34 %`, or `+34 % (+20 to +45 %)`.

    Where that would be nothing it has a digit more: `-0.4 %`.
    """
    gain = _percent(fraction, "+")
    return gain if low is None or high is None else f"{gain} ({show_gains(low, high)})"


def show_gains(low: float, high: float) -> str:
    """Write what a change lies between: `+20 to +45 %`."""
    return show_between(_percent(low, "+"), _percent(high, "+"))


def _percent(fraction: float, sign: str) -> str:
    percent = 100 * fraction
    if abs(percent) < 0.05:
        return "0 %"
    digits = 1 if abs(percent) < 1 else 0
    return f"{percent:{sign}.{digits}f} %"


def show_times(ratio: float) -> str:
    """Write how many times as much: `2.4 times`, and `1.04 times` where `1.0` says nothing."""
    return f"{ratio:.{1 if ratio >= 1.095 else 2}f} times"


def show_number(number: float) -> str:
    """Write a rate or another plain number with three digits: `5.42`, `1,099`."""
    return f"{number:,.0f}" if abs(number) >= 99.95 else _three(number)


def show_price(amount: float, currency: str = "") -> str:
    """Write money as it is usual: `$51.20`, `51.20 EUR`, `1,204 EUR`."""
    figure = f"{abs(amount):,.{2 if abs(amount) < 100 else 0}f}"
    sign = "-" if amount < 0 and figure.strip("0.,") else ""
    if len(currency) > 1:
        return f"{sign}{figure} {currency}"
    return f"{sign}{currency}{figure}"


def show_count(count: int) -> str:
    """Write a whole number with separators: `1,301,930`."""
    return f"{count:,}"


def counted(count: int, noun: str, plural: str = "") -> str:
    """Write a count with its noun: `1 rank`, `4 ranks`, `2 processes`."""
    return f"{show_count(count)} {noun if count == 1 else plural or noun + 's'}"


def show_seconds(seconds: float) -> str:
    """Write a duration that is given in seconds, as answers do."""
    return show_duration(seconds * NS_PER_S)


def show_ranks(ranks: Sequence[int]) -> str:
    """Write ranks briefly: `0-3, 7`."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in spans)


def show_first(names: Sequence[str], most: int = 20) -> str:
    """List names; of many the first: thousands make no message clearer."""
    return ", ".join(names[:most]) + (", …" if len(names) > most else "")


def show_known(value: _T | None, show: Callable[[_T], str] = str, unknown: str = UNKNOWN) -> str:
    """Write a figure, or the sign for one that is not known."""
    return unknown if value is None else show(value)


def show_range(
    values: Iterable[_Number | None], show: Callable[[_Number], str], unknown: str = UNKNOWN
) -> str:
    """Write those that are known as `4.95 to 5.12 ms`, or one where all read the same."""
    known = [value for value in values if value is not None]
    return show_between(show(min(known)), show(max(known))) if known else unknown


def show_largest(values: Iterable[_Number | None], show: Callable[[_Number], str]) -> str:
    """Write the largest of those that are known."""
    return show_known(max((value for value in values if value is not None), default=None), show)


def show_between(least: str, most: str) -> str:
    """Write two figures as `4.95 to 5.12 ms`, `980 us to 1.20 ms`: a common unit once."""
    figure, _, unit = least.partition(" ")
    if least == most:
        return least
    return f"{figure if unit == most.partition(' ')[2] else least} to {most}"


def show_members(ranks: Sequence[int]) -> str:
    """Write ranks briefly, whether they follow each other or stand apart."""
    text = show_ranks(ranks)
    if text.count(",") < 2:
        return text
    steps = {later - earlier for earlier, later in pairwise(ranks)}
    if len(steps) == 1:
        return f"{ranks[0]}-{ranks[-1]}, every {_ordinal(steps.pop())}"
    return f"{ranks[0]}-{ranks[-1]}, {len(ranks)} of them"


def _ordinal(number: int) -> str:
    ends = {1: "st", 2: "nd", 3: "rd"}
    teens = 10 <= number % 100 <= 20
    return f"{number}{'th' if teens else ends.get(number % 10, 'th')}"


def _three(size: float) -> str:
    if abs(size) >= 99.95:
        return f"{size:.0f}"
    return f"{size:.1f}" if abs(size) >= 9.995 else f"{size:.2f}"


@contextmanager
def replacing(path: Path, *, sync: bool = True) -> Iterator[Path]:
    """Give a hidden name beside a file to write to, and put that in its place once it is whole.

    `sync` waits for the disk, for files that must outlive the machine.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield unfinished
        if sync:
            with unfinished.open("rb") as written:
                os.fsync(written.fileno())
        unfinished.replace(path)
    finally:
        with suppress(OSError):
            for rest in path.parent.glob(f"{escape(unfinished.name)}*"):
                rest.unlink()


def write_file(path: Path, data: bytes, *, force: bool = True) -> None:
    """Write a file beside its place and move it there; where there is one, only by force.

    A full disk leaves neither half of it nor nothing in place of an earlier one. What is no plain
    file, such as /dev/stdout, is written to as it is.
    """
    if path.exists() and not force:
        raise UsageError(
            f"{path} is there already", hint="give another name, or --force to replace it"
        )
    try:
        if path.exists() and not path.is_file():
            path.write_bytes(data)
            return
        target = path.resolve()
        if not target.parent.is_dir():
            raise FileNotFoundError(ENOENT, os.strerror(ENOENT))
        with replacing(target) as unfinished:
            unfinished.write_bytes(data)
            if target.exists():
                shutil.copymode(target, unfinished)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from error
