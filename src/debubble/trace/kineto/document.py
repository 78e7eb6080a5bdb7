"""Inflated pieces in → the header of a trace and its events.

The file is either an object with a `traceEvents` list among other fields or the bare list. Events
are cut into stretches at event borders and decoded typed; nothing is held longer than a stretch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Annotated, Any

import msgspec

from debubble.errors import NotATrace, TraceError
from debubble.trace.columns import LAST_NS, MOST_RANKS, Device, Group, Header
from debubble.trace.format import PICTURE, TraceFile, rank_from_name
from debubble.trace.kineto.events import (
    Batch,
    Event,
    decode_device_events,
    decode_events,
    decode_launch_events,
    decode_memory_events,
    load_json,
    mend_text,
    salvage,
    scan_json,
)
from debubble.trace.kineto.operators import Ranks
from debubble.trace.kineto.walk import (
    BORDER,
    MOST_MALFORMED,
    Damage,
    Stretch,
    sift,
    step_over,
    walk_events,
)
from debubble.trace.source import Source
from debubble.units import NS_PER_S, NS_PER_US, show_bytes, show_count, show_first

EVENTS_FIELD = "traceEvents"

# No field beside the events, and no single event, is larger in any trace we have seen (the largest
# header is 40 KB). The limit bounds memory when a file is not what it seems: lists of nothing take
# thirty times their text.
MAX_HELD_BYTES = 4 * 1024 * 1024

# Event borders are looked for in the last bytes of a piece; an event is some 300 bytes long.
_BORDER_WINDOWS = (2_048, 65_536, MAX_HELD_BYTES)

_BOM = "\u00ef\u00bb\u00bf"  # a byte order mark, read one character a byte

_VERSION_FIELDS = {
    "cuda_runtime_version": "cuda_runtime",
    "cuda_driver_version": "cuda_driver",
    "hip_runtime_version": "hip_runtime",
    "hip_driver_version": "hip_driver",
    "cupti_version": "cupti",
    "pytorch_version": "torch",
}

NAME = "kineto"
# Fields that only a Kineto file begins with, should its header be longer than the prefix.
_KINETO_FIELDS = frozenset({"schemaVersion", "deviceProperties", "distributedInfo", "traceName"})
# What `--perfetto` writes names us where a profiler names its file, and tells no rank or device.
_FIRST_TIME = re.compile(rb'"ts"\s*:\s*"?([0-9]{1,20}(?:\.[0-9]{1,9})?)')
# Without a base, times count from 1970 or from when the machine was started: never so long ago.
_SURELY_A_DATE_S = 1e9
_OUR_NAME = re.compile(r"debubble \d+\.\d")
_OF_A_JOB = frozenset({"deviceProperties", "distributedInfo"})


class Section(Enum):
    """Where in the document the reader stands."""

    BEFORE = auto()
    EVENTS = auto()
    AFTER = auto()


class Document:
    """Streams one file. After `batches` is exhausted, the attributes say what else was found."""

    def __init__(self, source: Source, *, cpu_operators: bool | None = None) -> None:
        self.source = source
        self.cpu_operators = cpu_operators
        """Whether operators of the CPU are wanted; None: where the header names no device."""
        self.skipped = 0
        """Events that were stepped over and are in no batch."""
        self.fields: dict[str, Any] = {}
        self.closed = False
        """The list of events was closed properly."""
        self.bare = False
        """The file is the list itself, with no fields around it."""
        self.tail_lost = False
        """What follows the events was not read to its end: damaged, or a second document."""
        self.damage = Damage()
        self._section = Section.BEFORE
        self._held = b""

    def batches(self) -> Iterator[Batch]:
        """Yield all events, a stretch at a time."""
        for piece in self.source.pieces():
            if self._section is Section.EVENTS:
                yield from self._take_events(piece)
                continue
            if self._section is Section.AFTER and len(self._held) > MAX_HELD_BYTES:
                continue  # whatever follows 4 MiB after the events, no field of ours does
            self._held += piece
            if self._section is Section.AFTER:
                continue
            if len(self._held) > MAX_HELD_BYTES:
                raise NotATrace(
                    f"has no `{EVENTS_FIELD}` in its first {show_bytes(MAX_HELD_BYTES)}",
                    hint="give files written by torch.profiler's export_chrome_trace",
                    file=self.source.file,
                )
            if self._open_events():
                rest, self._held = self._held, b""
                yield from self._take_events(rest)
        if self._section is Section.BEFORE:
            self._open_events(final=True)  # it may end right after `"traceEvents": [`
        if self._section is Section.EVENTS:
            yield from self._walk(self._held, final=True)
        if self._section is Section.AFTER:
            fields, complete = scan_trailing_fields(self._held, bare=self.bare)
            self.fields |= fields
            self.tail_lost = not complete
        self._held = b""

    def _open_events(self, *, final: bool = False) -> bool:
        """Read fields up to the first event; False while more text is needed."""
        opening = scan_opening(self._held)
        self.fields, self.bare = opening.fields, opening.bare
        if opening.events_at < 0:
            if opening.ended or (final and not self.source.damage):
                raise not_a_trace(self.fields, self.source.file)
            return False
        self._held = self._held[opening.events_at :]
        self._section = Section.EVENTS
        if self.cpu_operators is None:
            self.cpu_operators = not self.fields.get("deviceProperties")
        return True

    def _take_events(self, piece: bytes) -> Iterator[Batch]:
        sifted = None if self.cpu_operators else sift(self._held, piece)
        batch = _decode_stretch(sifted) if sifted else None
        if sifted is not None and batch is not None:
            self._held = sifted.rest
            self.skipped += sifted.skipped
            yield batch
            return
        cut = _last_border(piece)
        if cut < 0:
            self._held += piece
            if len(self._held) > MAX_HELD_BYTES:
                yield from self._walk(self._held, final=False)
            return
        stretch = b"".join((b"[", self._held, memoryview(piece)[:cut], b"]"))
        events = _decode(stretch)
        if events is not None:
            self._held = piece[cut + 1 :]
            yield Batch(others=events)
        else:
            yield from self._walk(self._held + piece, final=False)

    def _walk(self, data: bytes, *, final: bool) -> Iterator[Batch]:
        walk = walk_events(data, self.damage, final=final)
        if self.damage.malformed > MOST_MALFORMED:
            raise TraceError(
                f"holds more than {show_count(MOST_MALFORMED)} malformed events: no trace",
                hint="give files written by torch.profiler's export_chrome_trace",
                file=self.source.file,
            )
        self._held = data[walk.consumed :]
        if walk.closed:
            self._section = Section.AFTER
            self.closed = True
        elif len(self._held) > MAX_HELD_BYTES:
            raise TraceError(
                f"holds an event larger than {show_bytes(MAX_HELD_BYTES)}: damaged, or no trace",
                hint="record it again",
                file=self.source.file,
            )
        if walk.events:
            yield Batch(others=walk.events)


def _decode(stretch: bytes) -> Sequence[Event] | None:
    """Decode a stretch typed; None if it is not a plain list of well-formed events."""
    try:
        return decode_events(stretch)
    except (msgspec.MsgspecError, RecursionError, ValueError):
        return None


def _decode_stretch(sifted: Stretch) -> Batch | None:
    """Decode each kind into its own fields; None if any of it is not well-formed."""
    try:
        return Batch(
            device=decode_device_events(sifted.device)[:-1] if sifted.device else (),
            launches=decode_launch_events(sifted.launches)[:-1] if sifted.launches else (),
            memory=decode_memory_events(sifted.memory)[:-1] if sifted.memory else (),
            others=decode_events(sifted.others)[:-1] if sifted.others else (),
        )
    except (msgspec.MsgspecError, RecursionError, ValueError):
        return None


def _last_border(piece: bytes) -> int:
    """Return the position of the last comma between two events, or -1."""
    for window in _BORDER_WINDOWS:
        start = max(0, len(piece) - window)
        last = -1
        for match in BORDER.finditer(piece, start):
            last = match.start(1)
        if last >= 0 or start == 0:
            return last
    return -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """The beginning of a document: its fields up to the first event, and where that is."""

    fields: dict[str, Any]
    events_at: int = -1
    """Position of the first event; -1 where there is none, or not yet."""
    bare: bool = False
    ended: bool = False
    """Whether the text is enough to tell: without events, a complete text is no trace."""


def scan_opening(data: bytes) -> Opening:
    """Read the fields before the events from the first bytes of a document."""
    text = data.decode("latin-1")
    fields: dict[str, Any] = {}
    position = step_over(data, len(_BOM) if text.startswith(_BOM) else 0)
    if position == len(text):
        return Opening(fields=fields)
    if text[position] == "[":
        first = step_over(data, position + 1)
        holds_events = text[first : first + 1] in {"{", "]"}
        events_at = position + 1 if holds_events else -1
        return Opening(fields=fields, events_at=events_at, bare=True, ended=first < len(text))
    if text[position] != "{":
        return Opening(fields=fields, ended=True)
    try:
        position, found = _scan_members(data, text, position + 1, fields)
    except (ValueError, IndexError, RecursionError):
        return Opening(fields=fields)
    return Opening(fields=fields, events_at=position if found else -1, ended=True)


def _scan_members(
    data: bytes, text: str, position: int, fields: dict[str, Any]
) -> tuple[int, bool]:
    """Fill `fields` from `position` on; return where they end, and whether at a list of events."""
    while True:
        position = step_over(data, position)
        if text[position] == "}":
            return position + 1, False
        key, position = scan_json(text, position)
        position = step_over(data, position)
        if text[position] != ":" or not isinstance(key, str):
            raise ValueError("not an object")
        position = step_over(data, position + 1)
        if key == EVENTS_FIELD and text[position] == "[":
            return position + 1, True
        start = position
        _, position = scan_json(text, position)
        if position == len(text):
            raise IndexError("the value may go on")
        fields[key] = load_json(mend_text(data[start:position]))


def scan_trailing_fields(data: bytes, *, bare: bool = False) -> tuple[dict[str, Any], bool]:
    """Read the fields after the events, and tell whether the document ends properly there."""
    fields: dict[str, Any] = {}
    text = data.decode("latin-1")
    position, events_again = 0, False
    try:
        if not bare:
            position, events_again = _scan_members(data, text, 0, fields)
    except (ValueError, IndexError, RecursionError):
        return fields, False
    return fields, not events_again and step_over(data, position) == len(text)


def recognise(file: str, prefix: bytes) -> TraceFile | None:
    """Tell a trace by its list of events or by its header, and what we drew ourselves."""
    opening = scan_opening(prefix)
    if _is_picture(opening):
        picture = TraceError(
            "is a picture that `--perfetto` wrote, not a trace",
            hint="give the traces that it was made of",
            file=file,
        )
        return TraceFile(file=file, format=PICTURE, why_not=picture)
    cut_off = not opening.ended and _KINETO_FIELDS & opening.fields.keys()
    rows = opening.bare and b"{" in prefix and b'"ph"' not in prefix  # of a table, no events
    if rows or (opening.events_at < 0 and not cut_off):
        return None
    header, _ = parse_header(opening.fields)
    rank = rank_from_name(file) if header.rank is None else header.rank
    return TraceFile(
        file=file,
        format=NAME,
        rank=rank,
        world_size=header.world_size,
        recorded_s=_first_event_s(prefix[opening.events_at :], header.base_time_ns),
    )


def _first_event_s(events: bytes, base_time_ns: int) -> float | None:
    """Return when the first event began, if that is a time since 1970: older files have no base."""
    first = _FIRST_TIME.search(events)
    if first is None:
        return None
    seconds = (float(first[1]) * NS_PER_US + base_time_ns) / NS_PER_S
    return seconds if base_time_ns or seconds > _SURELY_A_DATE_S else None


def _is_picture(opening: Opening) -> bool:
    """Tell what we drew ourselves, which may lie beside the traces that it shows."""
    name = opening.fields.get("traceName")
    ours = isinstance(name, str) and _OUR_NAME.match(name) is not None
    return ours and not _OF_A_JOB & opening.fields.keys()


def not_a_trace(fields: dict[str, Any], file: str) -> NotATrace:
    """Say what a file without events is, if its fields tell."""
    if {"schema", "nodes"} <= fields.keys():
        return NotATrace(
            "is an execution trace (a graph of operators), not a profiler trace",
            hint="export with torch.profiler's export_chrome_trace",
            file=file,
        )
    named = show_first([name[:40] for name in fields], 5)
    return NotATrace(
        f"is no trace: no `{EVENTS_FIELD}` in it" + (f" (its fields: {named})" if named else ""),
        hint="give files written by torch.profiler's export_chrome_trace",
        file=file,
    )


_Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_Rank = Annotated[int, msgspec.Meta(ge=0, lt=MOST_RANKS)]
_Nanoseconds = Annotated[int, msgspec.Meta(ge=0, lt=LAST_NS)]


class _Fields(msgspec.Struct):
    """What is used of a header."""

    base_ns: _Nanoseconds | None = msgspec.field(name="baseTimeNanoseconds", default=None)
    host: str | None = msgspec.field(name="host_name", default=None)
    devices: list[Any] = msgspec.field(name="deviceProperties", default_factory=list)
    job: dict[str, Any] = msgspec.field(name="distributedInfo", default_factory=dict)


class _Job(msgspec.Struct):
    """Its `distributedInfo`."""

    rank: _Rank | None = None
    world_size: _Rank | None = None
    backend: str = ""
    nccl_version: Any = None
    groups: list[Any] = msgspec.field(name="pg_config", default_factory=list)


class _Device(msgspec.Struct):
    """One of its `deviceProperties`."""

    index: _Count | None = msgspec.field(name="id", default=None)
    name: str = ""
    memory_bytes: _Count | None = msgspec.field(name="totalGlobalMem", default=None)
    multiprocessors: _Count | None = msgspec.field(name="numSms", default=None)


class _ProcessGroup(msgspec.Struct):
    """One of its `pg_config`."""

    name: int | str | None = msgspec.field(name="pg_name", default=None)
    number: int | str = msgspec.field(name="pg_id", default="")
    description: str = msgspec.field(name="pg_desc", default="")
    ranks: Ranks = ()


def parse_header(fields: Mapping[str, Any]) -> tuple[Header, list[str]]:
    """Read what is there, and name what is not what it should be: that counts as absent."""
    known, wrong = salvage(_Fields, dict(fields))
    job, odd = salvage(_Job, known.job)
    wrong += [f"distributedInfo.{name}" for name in odd]
    devices = []
    for entry in known.devices:
        device, odd = salvage(_Device, entry)
        wrong += ["deviceProperties"] * len(odd)
        if device.index is not None:
            devices.append(Device(**{**msgspec.structs.asdict(device), "index": device.index}))
    groups = []
    for entry in job.groups:
        group, odd = salvage(_ProcessGroup, entry)
        wrong += ["distributedInfo.pg_config"] * len(odd)
        name = str(group.number if group.name is None else group.name)
        groups.append(Group(name=name, description=group.description, ranks=group.ranks))
    versions = {
        ours: str(fields[theirs]) for theirs, ours in _VERSION_FIELDS.items() if theirs in fields
    }
    if job.nccl_version:
        versions["nccl"] = str(job.nccl_version)
    if job.world_size == 0:
        wrong.append("distributedInfo.world_size")
    header = Header(
        rank=job.rank,
        world_size=job.world_size,
        backend=job.backend,
        groups=tuple(groups),
        devices=tuple(devices),
        host=known.host or "",
        base_time_ns=known.base_ns or 0,
        record_shapes=_flag(fields, "record_shapes"),
        profile_memory=_flag(fields, "profile_memory"),
        with_stack=_flag(fields, "with_stack"),
        versions=tuple(sorted(versions.items())),
    )
    return header, list(dict.fromkeys(wrong))


def _flag(fields: Mapping[str, Any], name: str) -> bool | None:
    """Torch writes a setting as 1 when it was on, and leaves it out when it was off."""
    if name in fields:
        return bool(fields[name])
    return False if "schemaVersion" in fields else None
