"""Sorts events before they are decoded, and steps over those that nobody will look at.

Two thirds of a GPU trace are CPU operators, arrows between events and calls such as
`cudaEventQuery`. Where a file has Kineto's own layout, numpy finds the events' starts and the
letters that tell them apart; the rest is decoded kind by kind, into just the fields it has. An
event is stepped over only when it is positively known; any other layout, and any doubt, is left to
the general decoder.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

Positions = NDArray[np.intp]
Letters = NDArray[np.uint8]
Flags = NDArray[np.bool_]
Kinds = NDArray[np.uint8]

# An event as Kineto writes it, positions counted from its brace:
#   {⏎    "ph": "X", "cat": "cpu_op", "name": "aten::mm", …
# A line break cannot stand inside a JSON string, so this is never part of a name.
_BREAK, _SPACE, _BRACE = b"\n {"
_BEFORE = len("\n  ")
_FIRST_KEY = 7
_PHASE = 13
_CATEGORY = 25
_OPERATOR = _CATEGORY + len('cpu_op", "name": "')
_KERNEL = _CATEGORY + len('kernel", "name": "')
_CALL = _CATEGORY + len('cuda_runtime", "name": "')
_INSTANT = _CATEGORY + len('cpu_instant_event", "s": "t", "name": "')
_LOOKED_AT = _INSTANT + 8


class Kind(IntEnum):
    """What is done with an event."""

    SKIPPED = 0
    OTHER = 1
    DEVICE = 2
    LAUNCH = 3
    MEMORY = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Sifted:
    """A stretch of events, sorted. Each kind is a JSON list that ends in an empty object."""

    device: bytes
    launches: bytes
    memory: bytes
    others: bytes
    skipped: int
    rest: bytes
    """From the last event on: it may not be complete yet."""


def sift(held: bytes, piece: bytes) -> Sifted | None:
    """Sort the events of a piece; None where the layout is not Kineto's.

    `held` is the beginning of the event that the piece before ended in.
    """
    text = np.frombuffer(piece, dtype=np.uint8)
    starts = _find_events(text)
    if len(starts) < 2:
        return None
    kinds = _tell_kinds(text, starts[:-1])
    carried = held + piece[: starts[0]]
    return Sifted(
        device=_collect(piece, starts, kinds == Kind.DEVICE),
        launches=_collect(piece, starts, kinds == Kind.LAUNCH),
        memory=_collect(piece, starts, kinds == Kind.MEMORY),
        others=_collect(piece, starts, kinds == Kind.OTHER, carried if carried.strip() else b""),
        skipped=int((kinds == Kind.SKIPPED).sum()),
        rest=piece[starts[-1] :],
    )


def _find_events(text: Letters) -> Positions:
    """Return the positions of the braces that open an event in Kineto's layout."""
    braces: Positions = np.flatnonzero(text == _BRACE)
    first, last = np.searchsorted(braces, (_BEFORE, len(text) - _LOOKED_AT))
    braces = braces[first:last]
    braces = braces[text[braces - _BEFORE] == _BREAK]
    opens = (text[braces - 1] == _SPACE) & (text[braces + 1] == _BREAK)
    key = text[braces + _FIRST_KEY]
    opens &= (key == ord("p")) | (key == ord("n"))
    found: Positions = braces[opens]
    return found


def _tell_kinds(text: Letters, starts: Positions) -> Kinds:
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
    operators = _where(text, category, complete, {0: "c", 1: "p", 6: '"'})
    _tell_operators(text, starts + _OPERATOR, operators, kinds)
    calls = _where(text, category, complete, {0: "c", 5: "r", 12: '"'})
    _tell_calls(text, starts + _CALL, calls, kinds)
    kernels = _where(text, category, complete, {0: "k", 5: "l", 6: '"'})
    nccl = _where(text, starts + _KERNEL, kernels, {0: "n", 1: "c"})
    kinds[kernels] = Kind.DEVICE
    kinds[nccl] = Kind.OTHER  # they may describe themselves, at length
    kinds[_where(text, category, complete, {0: "p", 1: "y", 7: "f"})] = Kind.SKIPPED
    return kinds


def _tell_operators(text: Letters, names: Positions, rows: Positions, kinds: Kinds) -> None:
    """Step over operators of the CPU, but for communication: `c10d::…`, `record_param_comms`."""
    kinds[rows] = Kind.SKIPPED
    kinds[_where(text, names, rows, {0: "c", 1: "1", 3: "d"})] = Kind.OTHER
    kinds[_where(text, names, rows, {0: "r", 1: "e", 6: "_"})] = Kind.OTHER


def _tell_calls(text: Letters, names: Positions, rows: Positions, kinds: Kinds) -> None:
    """Step over calls that neither queue nor wait.

    They are cudaEventQuery, cudaEventRecord, cudaStreamIsCapturing and cudaStreamWaitEvent, which
    makes a stream wait and not the host.
    """
    kinds[rows] = Kind.LAUNCH
    events = _where(text, names, rows, {4: "E", 8: "t"})
    streams = _where(text, names, rows, {4: "S", 9: "m"})
    for letter in "QR":
        kinds[_where(text, names, events, {9: letter})] = Kind.SKIPPED
    for letter in "IW":
        kinds[_where(text, names, streams, {10: letter})] = Kind.SKIPPED


def _where(text: Letters, places: Positions, rows: Positions, letters: dict[int, str]) -> Positions:
    """Return those of the rows that have the letters, counted from their place."""
    for offset, letter in letters.items():
        rows = rows[text[places[rows] + offset] == ord(letter)]
    return rows


def _collect(piece: bytes, starts: Positions, wanted: Flags, first: bytes = b"") -> bytes:
    """Join the wanted events into one JSON list; nothing where there are none."""
    rows = np.flatnonzero(wanted)
    if not len(rows) and not first:
        return b""
    bounds = zip(starts[rows].tolist(), starts[rows + 1].tolist(), strict=True)
    return b"".join([b"[", first, *[piece[begin:end] for begin, end in bounds], b"{}]"])
