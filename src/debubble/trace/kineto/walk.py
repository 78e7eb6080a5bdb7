"""The careful way through a stretch of events: one by one, past anything that is damaged.

Used only where the fast, typed decoder says no: the end of the event list, odd values, broken text.
Its work grows with the text and never faster, however the text is broken.
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
from debubble.trace.kineto.lenient import load_json, mend_text, scan_json

# Where one event may end and the next begin. Inside strings and nested lists this also matches, so
# a cut here is only believed when the decoder accepts the stretch before it.
BORDER = re.compile(rb"\}\s*(,)\s*\{")

# Nothing of use is in a file that has more; stepping over so many takes a second.
MOST_MALFORMED = 100_000

_SKIPPED = re.compile(r"[\s,]*")

# A token cut in two (`tru`, `1.5e`) is reported where it starts, a few characters before the end.
_CUT_TOKEN = 8

# An event is some 300 characters long. The decoder is given a window, because a failure costs it
# as much time as it was given text; where an event is longer, the window grows.
_WINDOW = 4096
_GROWTH = 8

# Events nest a few levels deep, Python's decoder gives up at about a thousand.
_DEEP = 500
_BRACKETS = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"?|([\[{])|[\]}]', re.DOTALL)


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


class _Broken(Exception):
    """Where a value stops making sense, or that the text ends inside it."""

    def __init__(self, at: int, *, unfinished: bool = False) -> None:
        super().__init__()
        self.at = at
        self.unfinished = unfinished


def walk_events(data: bytes, *, final: bool) -> Walk:
    """Read events one by one; with `final`, an unfinished last event is not waited for."""
    # One character a byte: positions in the text are positions in the data.
    text = data.decode("latin-1")
    walk = Walk()
    position = _skip(text, 0)
    while position < len(text) and walk.malformed <= MOST_MALFORMED:
        if text[position] == "]":
            walk.closed = True
            walk.consumed = position + 1
            return walk
        try:
            value, end = _read_value(text, position)
        except _Broken as broken:
            border = None if broken.unfinished else _next_border(data, position, broken.at)
            if broken.unfinished or (border is None and not final):
                walk.unfinished = True
                walk.consumed = position
                return walk
            _note(walk, data[position : position + 80])
            position = len(text) if border is None else _skip(text, border.end(1))
            continue
        _take(walk, data[position:end], value)
        position = _skip(text, end)
    walk.consumed = position
    return walk


def _read_value(text: str, position: int) -> tuple[Any, int]:
    """Decode the value at a position; raise `_Broken` with the place where it fails."""
    size = _WINDOW
    while True:
        window = text[position : position + size]
        last = position + size >= len(text)
        try:
            value, end = scan_json(window)
        except json.JSONDecodeError as error:
            unfinished = _may_be_unfinished(error, window)
            if last or not unfinished:
                raise _Broken(position + error.pos, unfinished=unfinished) from None
        except RecursionError:
            raise _Broken(_where_deep(text, position)) from None
        else:
            if last or end < len(window):
                return value, position + end
        size *= _GROWTH


def _may_be_unfinished(error: json.JSONDecodeError, text: str) -> bool:
    return error.pos >= len(text) - _CUT_TOKEN or error.msg.startswith("Unterminated string")


def _where_deep(text: str, position: int) -> int:
    """Return where the brackets get too deep for any event."""
    depth = 0
    for token in _BRACKETS.finditer(text, position):
        if token[1]:
            depth += 1
        elif token[0][0] in "]}":
            depth -= 1
        if depth > _DEEP:
            return token.start()
    return len(text)


def _next_border(data: bytes, position: int, failed_at: int) -> re.Match[bytes] | None:
    """Find the border after a failure; it may be the very one that the decoder stumbled over."""
    brace = data.rfind(b"}", position + 1, failed_at)
    return BORDER.search(data, brace if brace >= 0 else max(failed_at, position + 1))


def _skip(text: str, position: int) -> int:
    found = _SKIPPED.match(text, position)
    return found.end() if found else position


def _note(walk: Walk, sample: bytes) -> None:
    walk.malformed += 1
    walk.first_malformed = walk.first_malformed or sample[:80].decode("utf-8", "replace")


def _take(walk: Walk, data: bytes, value: object) -> None:
    """Keep an event, or count what is none."""
    try:
        if isinstance(value, dict):
            walk.events.append(_to_event(data, value, walk))
            return
    except RecursionError:  # as deep as Python's decoder goes, but no deeper
        pass
    _note(walk, data)


def _to_event(data: bytes, value: dict[str, Any], walk: Walk) -> AnyEvent:
    try:
        return decode_any_event(data)
    except (msgspec.MsgspecError, RecursionError, ValueError):
        pass
    text = mend_text(data)
    if text.encode() != data:
        walk.bad_text += 1
    if not data.isascii() or "\\u" in text:
        value = load_json(text)
    thread = value.get("tid", 0)
    return AnyEvent(
        cat=_text(value.get("cat")),
        name=_text(value.get("name")),
        tid=thread if isinstance(thread, int | str) else _text(thread),
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
