"""The careful way through a stretch of events: one by one, past anything that is damaged.

Used only where the fast, typed decoder says no: the end of the event list, odd values, broken text.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import Raw

from debubble.trace.kineto.events import NO_ARGS, AnyEvent, decode_any_event

# Where one event may end and the next begin. Inside strings and nested lists this also matches, so
# a cut here is only believed when the decoder accepts the stretch before it.
BORDER = re.compile(rb"\}\s*(,)\s*\{")

_scan = json.JSONDecoder().raw_decode
_SKIPPED = re.compile(r"[\s,]*")

# A token cut in two (`tru`, `1.5e`) is reported where it starts, a few characters before the end.
_CUT_TOKEN = 8


@dataclass(slots=True)
class Walk:
    """What was found, how far the walk came, and what it had to step over."""

    events: list[AnyEvent] = field(default_factory=list)
    consumed: int = 0
    closed: bool = False
    """The list's closing bracket was reached."""
    unfinished: bool = False
    """The text ends inside an event."""
    malformed: int = 0
    first_malformed: str = ""
    bad_text: int = 0


def walk_events(data: bytes, *, final: bool) -> Walk:
    """Read events one by one; with `final`, an unfinished last event is not waited for."""
    # One character a byte: positions in the text are positions in the data.
    text = data.decode("latin-1")
    walk = Walk()
    position = _skip(text, 0)
    while position < len(text):
        if text[position] == "]":
            walk.closed = True
            walk.consumed = position + 1
            return walk
        try:
            value, end = _scan(text, position)
        except (ValueError, RecursionError) as error:
            if _may_be_unfinished(error, text):
                walk.unfinished = True
                walk.consumed = position
                return walk
            border = BORDER.search(data, position + 1)
            if border is None and not final:
                walk.unfinished = True
                walk.consumed = position
                return walk
            _note(walk, data[position : position + 80])
            position = len(text) if border is None else _skip(text, border.end(1))
            continue
        if isinstance(value, dict):
            walk.events.append(_to_event(data[position:end], value, walk))
        else:
            _note(walk, data[position:end])
        position = _skip(text, end)
    walk.consumed = len(data)
    return walk


def _skip(text: str, position: int) -> int:
    found = _SKIPPED.match(text, position)
    return found.end() if found else position


def _may_be_unfinished(error: Exception, text: str) -> bool:
    if not isinstance(error, json.JSONDecodeError):
        return False
    return error.pos >= len(text) - _CUT_TOKEN or error.msg.startswith("Unterminated string")


def _note(walk: Walk, sample: bytes) -> None:
    walk.malformed += 1
    walk.first_malformed = walk.first_malformed or sample[:80].decode("utf-8", "replace")


def _to_event(data: bytes, value: dict[str, Any], walk: Walk) -> AnyEvent:
    try:
        return decode_any_event(data)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        pass
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        walk.bad_text += 1
        value = json.loads(data.decode("utf-8", "replace"))
    thread = value.get("tid", 0)
    return AnyEvent(
        cat=_text(value.get("cat")),
        name=_text(value.get("name")),
        tid=thread if isinstance(thread, int | str) else str(thread),
        ts=_number(value.get("ts")),
        dur=_number(value.get("dur")),
        args=_raw(value.get("args")),
    )


def _text(value: object) -> str:
    return value if isinstance(value, str) else "" if value is None else str(value)


def _number(value: object) -> float:
    """Read a number, also one written as text; what is none becomes NaN and is reported."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return math.nan
    try:
        return float(value)
    except (ValueError, OverflowError):
        return math.nan


def _raw(value: object) -> Raw:
    if not isinstance(value, dict):
        return NO_ARGS
    try:
        return Raw(json.dumps(value).encode())
    except (ValueError, RecursionError):
        return NO_ARGS
