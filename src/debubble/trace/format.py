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
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

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

Count = Annotated[int, msgspec.Meta(ge=0)]
Amount = Annotated[float, msgspec.Meta(gt=0, le=1e300)]
Share = Annotated[float, msgspec.Meta(ge=-1e300, le=1e300)]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Steps in seconds, from one to the next: timed without the profiler, and under it."""

    before_s: tuple[Amount, ...] = ()
    profiled_s: tuple[Amount, ...] = ()
    after_s: tuple[Amount, ...] = ()
    unprofiled_median_s: Amount | None = None
    profiled_median_s: Amount | None = None
    overhead_fraction: Share | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sidecar:
    """What the profiler cannot see; None or empty where the job did not say."""

    file: str
    rank: Count | None = None
    world_size: Count | None = None
    capture: str | None = None
    first_step: Count | None = None
    schedule: str | None = None
    microbatches: Count | None = None
    stages: Count | None = None
    held_stages: tuple[Count, ...] = ()
    split: tuple[Count, ...] = ()
    tokens: Count | None = None
    context_lengths: tuple[Count, ...] = ()
    steps: StepTimes = StepTimes()
    max_allocated_bytes: Count | None = None
    max_reserved_bytes: Count | None = None
    reserved_bytes: Count | None = None
    """At the time that `free_bytes` was asked for."""
    free_bytes: Count | None = None
    total_bytes: Count | None = None
    power_w: Amount | None = None
    """That the device drew in steps without the profiler."""
    environment: Mapping[str, str] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)


# The fields in each section of a sidecar.
_SECTIONS = {
    "": ("rank", "world_size", "capture", "first_step"),
    "pipeline": ("schedule", "microbatches", "stages", "held_stages", "split"),
    "workload": ("tokens", "context_lengths"),
    "memory": (
        *("max_allocated_bytes", "max_reserved_bytes"),
        *("reserved_bytes", "free_bytes", "total_bytes"),
    ),
}
# What is said of a field that should be of another kind.
_EXPECTED: dict[Any, str] = {
    Count | None: "a whole number from 0",
    tuple[Count, ...]: "a list of whole numbers from 0",
    Amount | None: "a number above 0",
    tuple[Amount, ...]: "a list of numbers above 0",
    Share | None: "a number",
    str | None: "text",
    str: "text",
    dict[str, Any]: "an object",
}


def is_sidecar(file: str) -> bool:
    """Tell a sidecar by its name: it is never a trace."""
    return file.endswith(SUFFIX)


def sidecar_of(trace: str) -> str:
    """Return where the sidecar of a trace lies, should it have one."""
    return _TRACE_EXTENSIONS.sub("", trace) + SUFFIX


def read_sidecar(trace: str) -> tuple[Sidecar | None, Gap | None]:
    """Return what lies beside a trace; nothing where there is none, a gap where it is bad."""
    file = sidecar_of(trace)
    problem, data = "", None
    try:
        text = read_whole(file) if is_url(file) else Path(file).read_bytes()
    except FileNotFoundError:
        return None, None
    except (OSError, ValueError, ImportError) as error:
        problem = f"cannot be read: {error}"
    else:
        try:
            data = json.loads(text, parse_constant=str)
        except (ValueError, RecursionError):
            problem = "is no whole JSON"
    schema = data.get("schema") if isinstance(data, dict) else None
    if schema != SCHEMA or not isinstance(data, dict):
        gap = Gap(
            code=Code.UNREADABLE,
            message=f"{problem or f'is no sidecar of this version (schema {schema!r})'}; "
            "what it said of the job is missing",
            hint="the trace beside it is read all the same",
            file=file,
        )
        return None, gap
    wrong: list[str] = []
    fields_of = partial(_take_fields, data, wrong)
    hints = get_type_hints(Sidecar, include_extras=True)
    known: dict[str, Any] = {}
    for section, names in _SECTIONS.items():
        known |= fields_of(section, {name: hints[name] for name in names})
    steps = fields_of("steps", get_type_hints(StepTimes, include_extras=True))
    power = fields_of("power", {"draw_w": hints["power_w"]})
    sidecar = Sidecar(
        file=file,
        steps=StepTimes(**steps),
        power_w=power.get("draw_w"),
        **known,
        environment=fields_of("environment", None),
        tags=fields_of("tags", None),
    )
    if not wrong:
        return sidecar, None
    more = f", and {len(wrong) - _MOST_NAMED} more" if len(wrong) > _MOST_NAMED else ""
    gap = Gap(
        code=Code.SIDECAR_DIFFERS,
        message=f"{'; '.join(wrong[:_MOST_NAMED])}{more}: taken as not said",
        hint="docs/reference/sidecar.md has every field",
        file=file,
    )
    return sidecar, gap


def _take_fields(
    data: Mapping[str, Any], wrong: list[str], section: str, kinds: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return the fields of a section; one of another kind is missing, and named in `wrong`.

    Without kinds it holds any fields, all of them text.
    """
    values: Any = data
    if section:
        values = _take(data, section, dict[str, Any], "", wrong) or {}
    kinds = dict.fromkeys(values, str) if kinds is None else kinds
    path = f"{section}." * bool(section)
    taken = {name: _take(values, name, kind, path, wrong) for name, kind in kinds.items()}
    return {name: value for name, value in taken.items() if value is not None}


def _take(values: Mapping[str, Any], name: str, kind: Any, path: str, wrong: list[str]) -> Any:
    value = values.get(name)
    if value is None or (value == 0 and kind == Amount | None):  # nothing was measured
        return None
    try:
        return msgspec.convert(value, kind)
    except (msgspec.ValidationError, OverflowError):
        shown = _SHAPES.get(type(value)) or json.dumps(value)
        shown = shown if len(shown) <= _MOST_SHOWN else f"{shown[:_MOST_SHOWN]}…"
        wrong.append(f"{path}{name} is {shown} and should be {_EXPECTED[kind]}")
        return None


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
