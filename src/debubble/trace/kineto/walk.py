"""Inflated pieces in → where events begin and end, by a quick way and by a patient one.

`sift` is the quick way. Two thirds of a GPU trace are CPU operators, arrows between events and
calls such as `cudaEventQuery`, which no table keeps. Where a file has Kineto's own layout, numpy
finds the events' starts and the letters that tell them apart; the rest is decoded kind by kind,
into just the fields it has:

    {⏎    "ph": "X", "cat": "cpu_op", "name": "aten::mm", …    stepped over, never decoded
    {⏎    "ph": "X", "cat": "kernel", "name": "ampere_…", …    one of the kernels

An event is stepped over only when it is positively known; any other layout, and any doubt, is left
to the general decoder.

`walk_events` is used only where the fast, typed decoder says no: the end of the event list, odd
values, broken text.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import islice

import msgspec
import numpy as np
from msgspec import Raw
from numpy.typing import NDArray

from debubble.trace.kineto.events import (
    Event,
    decode_event,
    mend_text,
    salvage,
    scan_json,
)

Positions = NDArray[np.intp]
Letters = NDArray[np.uint8]
Flags = NDArray[np.bool_]

# An event as Kineto writes it, positions counted from its brace:
#   {⏎    "ph": "X", "cat": "cpu_op", "name": "aten::mm", …
# A line break cannot stand inside a JSON string, so this is never part of a name.
_BREAK, _SPACE, _BRACE, _COMMA, _COLON = b"\n {,:"
_BEFORE = len("\n  ")
_FIRST_KEY = 7
_PHASE = 13
_CATEGORY = 25
_OPERATOR = _CATEGORY + len('cpu_op", "name": "')
_KERNEL = _CATEGORY + len('kernel", "name": "')
_CALL = _CATEGORY + len('cuda_runtime", "name": "')
_INSTANT = _CATEGORY + len('cpu_instant_event", "s": "t", "name": "')
_LOOKED_AT = _INSTANT + 8

# Where one event may end and the next begin. Inside strings and nested lists this also matches, so
# a cut here is only believed when the decoder accepts the stretch before it.
BORDER = re.compile(rb"\}\s*(,)\s*\{")

# Nothing of use is in a file that has more; stepping over so many takes a second.
MOST_MALFORMED = 100_000

_SKIPPED = re.compile(rb"[\s,]*")

# Where an event may end, and where the next may begin. Most events close two braces, and are some
# 300 bytes long: looking no further, work grows with the text and never faster.
_END = re.compile(rb"\}(?=\s*(?:[,\]]|\Z))")
_NEXT = re.compile(rb",\s*(?=\{)")
_MOST_ENDS = 16
_LONG_EVENT_BYTES = 65_536


class Kind(IntEnum):
    """What is done with an event."""

    SKIPPED = 0
    OTHER = 1
    DEVICE = 2
    LAUNCH = 3
    MEMORY = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """A stretch of events, sorted. Each kind is a JSON list that ends in an empty object."""

    device: bytes
    launches: bytes
    memory: bytes
    others: bytes
    skipped: int
    rest: bytes
    """From the last event on: it may not be complete yet."""


def sift(held: bytes, piece: bytes) -> Stretch | None:
    """Sort the events of a piece; None where the layout is not Kineto's.

    `held` is the beginning of the event that the piece before ended in.
    """
    text = np.frombuffer(piece, dtype=np.uint8)
    starts = _find_events(text)
    if starts is None or len(starts) < 2:
        return None
    kinds = _tell_kinds(text, starts[:-1])
    carried = held + piece[: starts[0]]
    return Stretch(
        device=_collect(piece, starts, kinds == Kind.DEVICE),
        launches=_collect(piece, starts, kinds == Kind.LAUNCH),
        memory=_collect(piece, starts, kinds == Kind.MEMORY),
        others=_collect(piece, starts, kinds == Kind.OTHER, carried if carried.strip() else b""),
        skipped=int((kinds == Kind.SKIPPED).sum()),
        rest=piece[starts[-1] :],
    )


def _find_events(text: Letters) -> Positions | None:
    """Return the positions of the braces that open an event in Kineto's layout.

    None where an event may begin in another way, which would then be taken for a part of the one
    before it: after a comma, or after a blank that follows no colon. Names hold braces as well,
    such as `{lambda()#1}`, after colons.
    """
    braces: Positions = np.flatnonzero(text == _BRACE)
    first, last = np.searchsorted(braces, (_BEFORE, len(text) - _LOOKED_AT))
    braces = braces[first:last]
    ahead, before_that = text[braces - 1], text[braces - 2]
    opens = (text[braces - _BEFORE] == _BREAK) & (ahead == _SPACE) & (text[braces + 1] == _BREAK)
    strange = (ahead == _COMMA) | ((ahead <= _SPACE) & (before_that != _COLON))
    if (strange & ~opens).any():
        return None
    found: Positions = braces[opens]
    return found


def _tell_kinds(text: Letters, starts: Positions) -> NDArray[np.uint8]:
    """Say what to do with each event, by a few letters at fixed places.

    Of the categories that Kineto knows, each is told by the letters it is asked for here.
    """
    kinds = np.full(len(starts), Kind.OTHER, dtype=np.uint8)
    phase = np.where(text[starts + _FIRST_KEY] == ord("p"), text[starts + _PHASE], 0)
    kinds[(phase == ord("s")) | (phase == ord("f"))] = Kind.SKIPPED
    instants = np.flatnonzero(phase == ord("i"))
    kinds[_where(text, starts + _INSTANT, instants, {0: "[", 1: "m", 7: "]"})] = Kind.MEMORY
    complete = np.flatnonzero(phase == ord("X"))
    category = starts + _CATEGORY
    # Operators of the CPU are stepped over, but for communication: c10d::…, record_param_comms.
    operators, names = (
        _where(text, category, complete, {0: "c", 1: "p", 6: '"'}),
        starts + _OPERATOR,
    )
    kinds[operators] = Kind.SKIPPED
    kinds[_where(text, names, operators, {0: "c", 1: "1", 3: "d"})] = Kind.OTHER
    kinds[_where(text, names, operators, {0: "r", 1: "e", 6: "_"})] = Kind.OTHER
    # So are calls that neither queue nor wait: cudaEventQuery, cudaEventRecord,
    # cudaStreamIsCapturing, and cudaStreamWaitEvent, which makes a stream wait and not the host.
    names = starts + _CALL
    calls = _where(text, category, complete, {0: "c", 5: "r", 12: '"'})
    kinds[calls] = Kind.LAUNCH
    events = _where(text, names, calls, {4: "E", 8: "t"})
    streams = _where(text, names, calls, {4: "S", 9: "m"})
    for letter in "QR":
        kinds[_where(text, names, events, {9: letter})] = Kind.SKIPPED
    for letter in "IW":
        kinds[_where(text, names, streams, {10: letter})] = Kind.SKIPPED
    kernels = _where(text, category, complete, {0: "k", 5: "l", 6: '"'})
    nccl = _where(text, starts + _KERNEL, kernels, {0: "n", 1: "c"})
    kinds[kernels] = Kind.DEVICE
    kinds[nccl] = Kind.OTHER  # they may describe themselves, at length
    kinds[_where(text, category, complete, {0: "p", 1: "y", 7: "f"})] = Kind.SKIPPED
    return kinds


def _where(text: Letters, bases: Positions, rows: Positions, letters: dict[int, str]) -> Positions:
    """Return those of the rows that have the letters, counted from their base."""
    for offset, letter in letters.items():
        rows = rows[text[bases[rows] + offset] == ord(letter)]
    return rows


def _collect(piece: bytes, starts: Positions, wanted: Flags, first: bytes = b"") -> bytes:
    """Join the wanted events into one JSON list; nothing where there are none."""
    rows = np.flatnonzero(wanted)
    if not len(rows) and not first:
        return b""
    bounds = zip(starts[rows].tolist(), starts[rows + 1].tolist(), strict=True)
    return b"".join([b"[", first, *[piece[begin:end] for begin, end in bounds], b"{}]"])


@dataclass(slots=True)
class Damage:
    """What had to be stepped over in a file, and what is not as it should be."""

    malformed: int = 0
    first_malformed: str = ""
    bad_text: int = 0
    wrong: int = 0
    """Events with a field of another type than it has."""

    def note(self, sample: bytes) -> None:
        """Take note of a malformed event."""
        self.malformed += 1
        self.first_malformed = self.first_malformed or sample.decode("utf-8", "replace")


@dataclass(slots=True)
class Walk:
    """What was found, and how far the walk came."""

    events: list[Event] = field(default_factory=list)
    consumed: int = 0
    closed: bool = False
    """The list's closing bracket was reached."""


def walk_events(data: bytes, damage: Damage, *, final: bool) -> Walk:
    """Read events one by one, as far as they are whole; with `final`, no more text comes.

    An event goes to the first end with which it makes sense. Where none does, it is malformed, and
    the next one begins behind a comma and with a brace.
    """
    walk = Walk()
    while damage.malformed <= MOST_MALFORMED:
        walk.consumed = begin = step_over(data, walk.consumed)
        if data[begin : begin + 1] == b"]":
            walk.closed = True
            walk.consumed += 1
            break
        following = _NEXT.search(data, begin + 1)
        far = following is None or following.start() > begin + _LONG_EVENT_BYTES
        last = len(data) if far else min(len(data), begin + _LONG_EVENT_BYTES)
        ends = [m.end() for m in islice(_END.finditer(data, begin, last), _MOST_ENDS)]
        for end in ends:
            event = _to_event(data[begin:end], damage)
            if event is not None:
                walk.events.append(event)
                walk.consumed = end
                break
        else:
            more_to_come = len(ends) < _MOST_ENDS and last == len(data) and not final
            if more_to_come or (following is None and not ends):
                break
            damage.note(data[begin : begin + 80])
            walk.consumed = ends[-1] if following is None else following.end()
    return walk


def step_over(text: bytes, position: int) -> int:
    """Return where the next value begins, beyond blanks and commas."""
    found = _SKIPPED.match(text, position)
    return found.end() if found else position


def _to_event(data: bytes, damage: Damage) -> Event | None:
    """Make an event of its text, forgiving; None where it is no object."""
    try:
        return decode_event(data)
    except (msgspec.MsgspecError, RecursionError, ValueError):
        if data.count(b"{") != data.count(b"}"):  # most ends that are none: not worth the patience
            return None
    try:
        text = mend_text(data)
        value, end = scan_json(text)
        if end < len(text):
            return None
        args = value.pop("args", {})
        event, wrong = salvage(Event, value)
        if isinstance(args, dict):
            event.args = Raw(json.dumps(args).encode())
    except (ValueError, RecursionError, AttributeError):
        return None
    damage.bad_text += text.encode() != data
    # Times are judged later, where all of them are.
    damage.wrong += not {*wrong} <= {"ts", "dur"} or not isinstance(args, dict)
    return event
