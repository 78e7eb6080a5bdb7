"""What a format is: how a file is known by its first bytes, and what is read from it.

Beside a trace may lie a sidecar, `rankN.debubble.json`: what the job said of itself. Damage is
tolerated: a field of another type than it should have is named and as good as missing, and fields
that a later version adds are left alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar

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
        data = json.loads(text, parse_constant=str)
    except (ValueError, RecursionError):
        return None, _unreadable(file, "is no whole JSON")
    schema = data.get("schema") if isinstance(data, dict) else None
    if schema != SCHEMA:
        return None, _unreadable(file, f"is no sidecar of this version (schema {schema!r})")
    wrong: list[str] = []
    sections = {"": data}
    for name in ("pipeline", "workload", "memory", "steps", "power", "environment", "tags"):
        sections[name] = _take(data, name, dict[str, Any], wrong) or {}
    fields: dict[str, Any] = {}
    for path, kind in _FIELDS.items():
        section, _, name = path.rpartition(".")
        fields[path] = _take(sections[section], name, kind, wrong, f"{section}." * bool(section))
    for name in ("before_s", "profiled_s", "after_s"):  # the others may be missing
        times = dict(enumerate(sections["steps"].get(name) or ()))
        amounts = (_take(times, number, _Amount, []) for number in times)
        fields[f"steps.{name}"] = tuple(time for time in amounts if time)
    words: dict[str, dict[str, str]] = {"environment": {}, "tags": {}}
    for name, known in words.items():
        for key in sections[name]:
            text_of = _take(sections[name], key, str, wrong, f"{name}.")
            known.update({} if text_of is None else {key: text_of})
    steps = {path.removeprefix("steps."): value for path, value in fields.items()
             if path.startswith("steps.") and value}  # fmt: skip
    others = {path.rpartition(".")[2]: value for path, value in fields.items()
              if not path.startswith("steps.") and value is not None}  # fmt: skip
    power_w = others.pop("draw_w", None) or None
    sidecar = Sidecar(
        file=file,
        steps=StepTimes(**steps),
        power_w=power_w,
        **others,
        environment=words["environment"],
        tags=words["tags"],
    )
    return sidecar, _wrong_fields(file, wrong) if wrong else None


_Count = Annotated[int, msgspec.Meta(ge=0)]
_Amount = Annotated[float, msgspec.Meta(ge=0)]
# Where each field of a sidecar lies, and its type.
_FIELDS: dict[str, Any] = {
    "rank": _Count,
    "world_size": _Count,
    "capture": str,
    "first_step": _Count,
    "pipeline.schedule": str,
    "pipeline.microbatches": _Count,
    "pipeline.stages": _Count,
    "pipeline.held_stages": tuple[_Count, ...],
    "pipeline.split": tuple[_Count, ...],
    "workload.tokens": _Count,
    "workload.context_lengths": tuple[_Count, ...],
    "steps.before_s": tuple[_Amount, ...],
    "steps.profiled_s": tuple[_Amount, ...],
    "steps.after_s": tuple[_Amount, ...],
    "steps.unprofiled_median_s": _Amount,
    "steps.profiled_median_s": _Amount,
    "steps.overhead_fraction": float,
    "memory.max_allocated_bytes": _Count,
    "memory.max_reserved_bytes": _Count,
    "memory.reserved_bytes": _Count,
    "memory.free_bytes": _Count,
    "memory.total_bytes": _Count,
    "power.draw_w": _Amount,
}
_EXPECTED = {
    _Count: "a whole number from 0",
    tuple[_Count, ...]: "a list of whole numbers from 0",
    _Amount: "a number from 0",
    tuple[_Amount, ...]: "a list of numbers from 0",
    float: "a number",
    str: "text",
    dict[str, Any]: "an object",
}


def _take(
    section: Mapping[Any, Any], name: object, kind: Any, wrong: list[str], path: str = ""
) -> Any:
    """Return a field of its type; what is of another one is missing, and named in `wrong`."""
    value = section.get(name)
    if value is None:
        return None
    try:
        return msgspec.convert(value, kind)
    except (msgspec.ValidationError, OverflowError):
        shown = _SHAPES.get(type(value)) or json.dumps(value)
        shown = shown if len(shown) <= _MOST_SHOWN else f"{shown[:_MOST_SHOWN]}…"
        wrong.append(f"{path}{name} is {shown} and should be {_EXPECTED[kind]}")
        return None


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
