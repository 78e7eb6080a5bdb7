"""What a format is: how a file is known by its first bytes, and what is read from it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec

from debubble.errors import Gap, TraceError
from debubble.trace.columns import OpTable, RankTrace
from debubble.trace.source import Limits

_Kind = TypeVar("_Kind")

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
    """CRC-32 of all of a file on this machine that is not packed."""


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
    digest_of: str = ""
    """The trace that a digest was made of, as it was named then."""
    stamp: Stamp | None = None
    """What a digest says of its trace."""

    @property
    def named(self) -> str:
        """What tells rank and capture: a digest bears the name of its trace, in its own folder."""
        if not self.digest_of:
            return self.file
        folder = self.file.removesuffix(re.split(r"[/\\]", self.file)[-1])
        return folder + re.split(r"[/\\]", self.digest_of)[-1]

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
    gaps: tuple[Gap, ...] = ()
    """Digests that could not be written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """One way to write traces down. A package of `trace/` that has one as `FORMAT` is a format."""

    name: str
    position: int
    """Its place in lists; formats are asked in this order whether a file is theirs."""
    in_names: tuple[str, ...] = ()
    """What names of such files hold: one that cannot be read is then missed, not passed over."""
    recognise: Callable[[str, bytes], TraceFile | None]
    """Tells by a file's name and first bytes what it is: by content, never by extension."""
    read: Callable[[TraceFile, Limits], Reading]
    one_a_rank: bool = True
    """Whether a file holds one rank: of several files of one rank nothing tells which is meant."""


def decode_json(data: bytes, kind: type[_Kind], file: str, *, problem: str, hint: str) -> _Kind:
    """Decode a whole file, typed; numbers may be written as text."""
    try:
        return msgspec.json.decode(data, type=kind, strict=False)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise TraceError(f"{problem}: {error}", file=file, hint=hint) from error


class _Document(msgspec.Struct, Generic[_Kind]):
    """The object form of a Chrome trace."""

    events: list[_Kind] = msgspec.field(name="traceEvents")


def decode_events(
    data: bytes, kind: type[_Kind], file: str, *, problem: str, hint: str
) -> list[_Kind]:
    """Decode the events of a whole Chrome trace: a bare list, or one among other fields."""
    if data.lstrip()[:1] == b"[":
        return decode_json(data, list[kind], file, problem=problem, hint=hint)  # type: ignore[valid-type]
    return decode_json(data, _Document[kind], file, problem=problem, hint=hint).events  # type: ignore[valid-type]


def rank_from_name(file: str) -> int | None:
    """Find the rank in a path: `rank3.json`, `…_rank-3…`, `rank_3/trace.json`, SGLang's `-TP-3`."""
    for part in reversed(re.split(r"[/\\]", file)):
        found = _RANK_IN_NAME.findall(part)
        if found:
            return int(found[-1])
    name = re.split(r"[/\\]", file)[-1]
    found = _PARALLEL_IN_NAME.findall(name)
    return int(found[0]) if len(found) == 1 else None
