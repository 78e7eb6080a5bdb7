"""First bytes of a file in → what it is, told by content and never by extension."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from enum import StrEnum

from debubble.errors import TraceError
from debubble.trace.digest.archive import Head, looks_like_digest, peek_head
from debubble.trace.kineto.document import Opening, not_a_trace, parse_header, scan_opening
from debubble.trace.optable import sniff_op_table
from debubble.trace.source import DEFAULT_LIMITS, Limits, Source

# Kineto's header is at most 40 KB in the traces we have seen; the rank is in it.
_PREFIX_BYTES = 256 * 1024

_SQLITE_MAGIC = b"SQLite format 3\0"

# Fields that only a Kineto file begins with, should its header be longer than the prefix.
_KINETO_FIELDS = frozenset({"schemaVersion", "deviceProperties", "distributedInfo", "traceName"})

# What `--perfetto` writes names us where a profiler names its file, and tells no rank or device.
_OUR_NAME = re.compile(r"debubble \d+\.\d")
_OF_A_JOB = frozenset({"deviceProperties", "distributedInfo"})

_RANK_IN_NAME = re.compile(r"(?:^|[^a-z])rank[-_.]?(\d{1,7})(?!\d)", re.IGNORECASE)
_PARALLEL_IN_NAME = re.compile(r"(?:^|[-_.])(?:tp|pp)[-_]?(\d{1,5})(?=[-_.]|$)", re.IGNORECASE)


class Format(StrEnum):
    """What a file can be."""

    KINETO = "kineto"
    NSIGHT = "nsight"
    OP_TABLE = "op table"
    DIGEST = "digest"
    PICTURE = "debubble's picture"
    OTHER_JSON = "other JSON"
    OTHER = "other"


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceFile:
    """A file, what it is, and whose it is as far as its first bytes and its name tell."""

    file: str
    format: Format
    rank: int | None = None
    world_size: int | None = None
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
        return self.file.removesuffix(own) + re.split(r"[/\\]", self.head.file)[-1]

    @property
    def is_trace(self) -> bool:
        """True for the formats that can be read."""
        return self.format not in {Format.PICTURE, Format.OTHER_JSON, Format.OTHER}


def recognise(file: str, limits: Limits = DEFAULT_LIMITS) -> TraceFile:
    """Say what a file is. Raises `TraceError` where it cannot be opened or is empty."""
    source = Source(file, limits)
    prefix = source.prefix(_PREFIX_BYTES)
    if not prefix:
        problem = source.damage or "is empty"
        raise TraceError(problem, hint="record the trace again", file=file)
    if prefix.startswith(_SQLITE_MAGIC):
        return TraceFile(file=file, format=Format.NSIGHT, rank=rank_from_name(file))
    if looks_like_digest(prefix):
        head = peek_head(prefix, file)
        known = TraceFile(file=file, format=Format.DIGEST, world_size=head.world_size, head=head)
        rank = rank_from_name(known.named) if head.rank is None else head.rank
        return known if head.table else replace(known, rank=rank)
    opening = scan_opening(prefix)
    if _is_picture(opening):
        picture = TraceError(
            "is a picture that `--perfetto` wrote, not a trace",
            hint="give the traces that it was made of",
            file=file,
        )
        return TraceFile(file=file, format=Format.PICTURE, why_not=picture)
    cut_off = not opening.ended and _KINETO_FIELDS & opening.fields.keys()
    if opening.events_at >= 0 or cut_off:
        header = parse_header(opening.fields)
        rank = rank_from_name(file) if header.rank is None else header.rank
        return TraceFile(file=file, format=Format.KINETO, rank=rank, world_size=header.world_size)
    if sniff_op_table(prefix):
        return TraceFile(file=file, format=Format.OP_TABLE)
    is_json = _is_json(prefix, opening)
    why_not = TraceError(
        "is neither a Kineto trace nor an Nsight export nor an op table nor a digest",
        hint="give torch.profiler's Chrome traces, `nsys export --type sqlite` files, or op tables",
        file=file,
    )
    if prefix[:1] in {b"{", b"["} or is_json:
        why_not = not_a_trace(opening.fields, file)
    kind = Format.OTHER_JSON if is_json else Format.OTHER
    return TraceFile(file=file, format=kind, why_not=why_not)


def rank_from_name(file: str) -> int | None:
    """Find the rank in a path: `rank3.json`, `…_rank-3…`, `rank_3/trace.json`, SGLang's `-TP-3`."""
    for part in reversed(re.split(r"[/\\]", file)):
        found = _RANK_IN_NAME.findall(part)
        if found:
            return int(found[-1])
    name = re.split(r"[/\\]", file)[-1]
    found = _PARALLEL_IN_NAME.findall(name)
    return int(found[0]) if len(found) == 1 else None


def _is_picture(opening: Opening) -> bool:
    """Tell what we drew ourselves, which may lie beside the traces that it shows."""
    name = opening.fields.get("traceName")
    ours = isinstance(name, str) and _OUR_NAME.match(name) is not None
    return ours and not _OF_A_JOB & opening.fields.keys()


def _is_json(prefix: bytes, opening: Opening) -> bool:
    """Tell JSON of another kind from garbage, also where the prefix cuts it off."""
    if opening.ended and (opening.fields or opening.bare):
        return True
    try:
        json.loads(prefix)
    except (ValueError, RecursionError):
        return bool(opening.fields)
    return True
