"""What a format is: how a file is known by its first bytes, and what is read from it.

Beside a trace may lie a sidecar, `rankN.debubble.json`: what the job said of itself. Damage is
tolerated: a field of another type than it should have is named and as good as missing, and fields
that a later version adds are left alone.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from debubble.errors import Code, Gap, TraceError
from debubble.trace.columns import OpTable, RankTrace
from debubble.trace.source import Limits, is_url, read_whole

SUFFIX = ".debubble.json"
SCHEMA = "debubble.sidecar/1"

_TRACE_EXTENSIONS = re.compile(r"(?:\.pt)?(?:\.trace)?\.json(?:\.gz)?$")
_Kind = TypeVar("_Kind")
# Of what a sidecar has wrong, so many fields are named, with so many letters of what they hold.
_MOST_NAMED, _MOST_SHOWN = 3, 40
_SHAPES: dict[type, str] = {dict: "an object", list: "a list"}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Steps in seconds, from one to the next: timed without the profiler, and under it."""

    before_s: tuple[float, ...] = ()
    profiled_s: tuple[float, ...] = ()
    after_s: tuple[float, ...] = ()
    unprofiled_median_s: float | None = None
    profiled_median_s: float | None = None
    overhead_fraction: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sidecar:
    """What the profiler cannot see; None or empty where the job did not say."""

    file: str
    rank: int | None = None
    world_size: int | None = None
    capture: str | None = None
    first_step: int | None = None
    schedule: str | None = None
    microbatches: int | None = None
    stages: int | None = None
    held_stages: tuple[int, ...] = ()
    split: tuple[int, ...] = ()
    tokens: int | None = None
    context_lengths: tuple[int, ...] = ()
    steps: StepTimes = StepTimes()
    max_allocated_bytes: int | None = None
    max_reserved_bytes: int | None = None
    reserved_bytes: int | None = None
    """At the time that `free_bytes` was asked for."""
    free_bytes: int | None = None
    total_bytes: int | None = None
    power_w: float | None = None
    """That the device drew in steps without the profiler."""
    environment: Mapping[str, str] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)


def is_sidecar(file: str) -> bool:
    """Tell a sidecar by its name: it is never a trace."""
    return file.endswith(SUFFIX)


def sidecar_of(trace: str) -> str:
    """Return where the sidecar of a trace lies, should it have one."""
    return _TRACE_EXTENSIONS.sub("", trace) + SUFFIX


def read_sidecar(trace: str) -> tuple[Sidecar | None, Gap | None]:
    """Return what lies beside a trace; nothing where there is none, a gap where it is bad."""
    file = sidecar_of(trace)
    try:
        text = read_whole(file) if is_url(file) else Path(file).read_bytes()
    except FileNotFoundError:
        return None, None
    except (OSError, ValueError, ImportError) as error:
        return None, _unreadable(file, f"cannot be read: {error}")
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return None, _unreadable(file, "is no whole JSON")
    schema = data.get("schema") if isinstance(data, dict) else None
    if schema != SCHEMA:
        return None, _unreadable(file, f"is no sidecar of this version (schema {schema!r})")
    fields = _Fields(data, "", [])
    sidecar = _as_sidecar(file, fields)
    return sidecar, _wrong_fields(file, fields.wrong) if fields.wrong else None


def _as_sidecar(file: str, data: _Fields) -> Sidecar:
    pipeline, workload, memory, steps, power = map(
        data.part, ("pipeline", "workload", "memory", "steps", "power")
    )
    return Sidecar(
        file=file,
        rank=data.count("rank"),
        world_size=data.count("world_size"),
        capture=data.text("capture"),
        first_step=data.count("first_step"),
        schedule=pipeline.text("schedule"),
        microbatches=pipeline.count("microbatches"),
        stages=pipeline.count("stages"),
        held_stages=pipeline.counts("held_stages"),
        split=pipeline.counts("split"),
        tokens=workload.count("tokens"),
        context_lengths=workload.counts("context_lengths"),
        steps=StepTimes(
            before_s=steps.times("before_s"),
            profiled_s=steps.times("profiled_s"),
            after_s=steps.times("after_s"),
            unprofiled_median_s=steps.amount("unprofiled_median_s"),
            profiled_median_s=steps.amount("profiled_median_s"),
            overhead_fraction=steps.number("overhead_fraction"),
        ),
        max_allocated_bytes=memory.count("max_allocated_bytes"),
        max_reserved_bytes=memory.count("max_reserved_bytes"),
        reserved_bytes=memory.count("reserved_bytes"),
        free_bytes=memory.count("free_bytes"),
        total_bytes=memory.count("total_bytes"),
        power_w=power.amount("draw_w"),
        environment=data.words("environment"),
        tags=data.words("tags"),
    )


class _Fields:
    """Fields by name, each of the type that it should have, or missing; `wrong` names the rest."""

    def __init__(self, data: dict[str, Any], path: str, wrong: list[str]) -> None:
        self.data = data
        self.path = path
        self.wrong = wrong

    def _take(self, name: str, expected: str, read: Callable[[Any], _Kind | None]) -> _Kind | None:
        value = self.data.get(name)
        taken = None if value is None else read(value)
        if taken is None and value is not None:
            shown = _SHAPES.get(type(value)) or json.dumps(value)
            shown = shown if len(shown) <= _MOST_SHOWN else f"{shown[:_MOST_SHOWN]}…"
            self.wrong.append(f"{self.path}{name} is {shown} and should be {expected}")
        return taken

    def part(self, name: str) -> _Fields:
        inside = self._take(name, "an object", lambda value: _of(value, dict)) or {}
        return _Fields(inside, f"{self.path}{name}.", self.wrong)

    def text(self, name: str) -> str | None:
        return self._take(name, "text", lambda value: _of(value, str))

    def count(self, name: str) -> int | None:
        return self._take(name, "a whole number from 0", _count)

    def counts(self, name: str) -> tuple[int, ...]:
        return self._take(name, "a list of whole numbers from 0", _list_of(_count)) or ()

    def number(self, name: str) -> float | None:
        return self._take(name, "a number", _number)

    def amount(self, name: str) -> float | None:
        """Return a number above 0; nothing lasts or draws 0."""
        return self._take(name, "a number from 0", _amount) or None

    def times(self, name: str) -> tuple[float, ...]:
        """Return the times that are times: each stands for itself, so the others may be missing."""
        self._take(name, "a list of numbers from 0", _list_of(_amount))
        times = map(_amount, _of(self.data.get(name), list) or [])
        return tuple(time for time in times if time)

    def words(self, name: str) -> dict[str, str]:
        inside = self.part(name)
        known = ((key, inside.text(key)) for key in inside.data)
        return {key: value for key, value in known if value is not None}


def _of(value: Any, kind: type[_Kind]) -> _Kind | None:
    return value if isinstance(value, kind) and not isinstance(value, bool) else None


def _count(value: Any) -> int | None:
    count = _of(value, int)
    return count if count is not None and count >= 0 else None


def _number(value: Any) -> float | None:
    fits = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if fits and math.isfinite(value) else None


def _amount(value: Any) -> float | None:
    amount = _number(value)
    return amount if amount is not None and amount >= 0 else None


def _list_of(read: Callable[[Any], _Kind | None]) -> Callable[[Any], tuple[_Kind, ...] | None]:
    def read_all(values: Any) -> tuple[_Kind, ...] | None:
        taken = [read(value) for value in values] if isinstance(values, list) else [None]
        return None if None in taken else tuple(value for value in taken if value is not None)

    return read_all


def _wrong_fields(file: str, wrong: list[str]) -> Gap:
    more = f", and {len(wrong) - _MOST_NAMED} more" if len(wrong) > _MOST_NAMED else ""
    return Gap(
        code=Code.SIDECAR_DIFFERS,
        message=f"{'; '.join(wrong[:_MOST_NAMED])}{more}: taken as not said",
        hint="docs/reference/sidecar.md has every field",
        file=file,
    )


def _unreadable(file: str, problem: str) -> Gap:
    return Gap(
        code=Code.UNREADABLE,
        message=f"{problem}; what it said of the job is missing",
        hint="the trace beside it is read all the same",
        file=file,
    )


# What a file can be that is no trace.
PICTURE, OTHER_JSON, OTHER = "debubble's picture", "other JSON", "other"

_RANK_IN_NAME = re.compile(r"(?:^|[^a-z])rank[-_.]?(\d{1,7})(?!\d)", re.IGNORECASE)
_PARALLEL_IN_NAME = re.compile(r"(?:^|[-_.])(?:tp|pp)[-_]?(\d{1,5})(?=[-_.]|$)", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stamp:
    """What tells one recording from another of the same name."""

    bytes: int
    """Size of the trace as it lies there."""
    tail: int
    """CRC-32 of its last 4 KiB: the end of a gzip file holds the checksum of all of it."""
    whole: int | None = None
    """CRC-32 of all of a file that is not packed; older digests do not tell it."""

    def is_of(self, other: Stamp) -> bool:
        """Tell whether two files are the same, as far as both tell."""
        known = self.whole is not None and other.whole is not None
        same = (self.bytes, self.tail) == (other.bytes, other.tail)
        return same and (not known or self.whole == other.whole)


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """Whose digest it is, told by the first bytes."""

    file: str
    """The trace, as it was named when it was read."""
    rank: int | None = None
    world_size: int | None = None
    stamp: Stamp | None = None
    part: int = 0
    parts: int = 1
    """Of a trace with several ranks, each has its digest."""
    table: bool = False
    """True for an op table, which holds all its ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFile:
    """A file, what it is, and whose it is as far as its first bytes and its name tell."""

    file: str
    format: str
    """The name of its format; what is none, by what it is."""
    rank: int | None = None
    world_size: int | None = None
    recorded_s: float | None = None
    """When its first event began, in seconds since 1970."""
    why_not: TraceError | None = None
    """For what is no trace: how to say so."""
    head: Head | None = None
    """What a digest says of its trace."""
    instead: str = ""
    """The trace that a digest lies beside, should the digest turn out to be damaged."""

    @property
    def named(self) -> str:
        """What tells rank and capture: a digest bears the name of its trace, in its own place."""
        if self.head is None:
            return self.file
        own = re.split(r"[/\\]", self.file)[-1]
        trace = re.split(r"[/\\]", self.head.file)[-1]
        # A digest may hold what no file is called by, and no terminal prints.
        return self.file.removesuffix(own) + trace.encode("utf-8", "replace").decode()

    @property
    def is_trace(self) -> bool:
        """True for what can be read."""
        return self.why_not is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What came of one file: the traces in it, or a table, or the reason why not."""

    traces: tuple[RankTrace, ...] = ()
    table: OpTable | None = None
    error: TraceError | None = None
    beside: str = ""
    """The trace that a sidecar would lie beside."""
    sidecar: Sidecar | None = None
    """What a digest kept of the sidecar."""
    gaps: tuple[Gap, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """One way to write traces down. A package of `trace/` that has one as `FORMAT` is a format."""

    name: str
    a_file: str
    """What one file of it is called in a sentence: "an op table"; empty for what is only refused.
    """
    ask_for: str = ""
    """How it is called where somebody is asked for traces; empty where it is not asked for."""
    position: int
    """Its place in lists; formats are asked in this order whether a file is theirs."""
    in_names: tuple[str, ...]
    """What names of such files hold: one that cannot be read is then missed, not passed over."""
    recognise: Callable[[str, bytes], TraceFile | None]
    """Tells by a file's name and first bytes what it is: by content, never by extension."""
    read: Callable[[TraceFile, Limits], Reading]
    sign: tuple[re.Pattern[bytes], ...] = ()
    """What its first bytes hold: without any, and without such a name, it is not asked. Several
    instead of one that has them as alternatives: what begins with plain text is found at once."""
    one_a_rank: bool = True
    """Whether a file holds one rank: of several files of one rank nothing tells which is meant."""

    def may_name(self, file: str) -> bool:
        """Tell a file that should be of this format by its name, whatever is in it."""
        name = file.lower()
        return any(word in name for word in self.in_names)


def decode_json(data: bytes, kind: type[_Kind], file: str, *, problem: str, hint: str) -> _Kind:
    """Decode a whole file, typed; numbers may be written as text."""
    try:
        return msgspec.json.decode(data, type=kind, strict=False)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise TraceError(f"{problem}: {error}", file=file, hint=hint) from error


def rank_from_name(file: str) -> int | None:
    """Find the rank in a path: `rank3.json`, `…_rank-3…`, `rank_3/trace.json`, SGLang's `-TP-3`."""
    for part in reversed(re.split(r"[/\\]", file)):
        found = _RANK_IN_NAME.findall(part)
        if found:
            return int(found[-1])
    name = re.split(r"[/\\]", file)[-1]
    found = _PARALLEL_IN_NAME.findall(name)
    return int(found[0]) if len(found) == 1 else None
