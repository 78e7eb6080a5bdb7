"""Traces of several ranks merged into one file in → as many `RankTrace`s out.

SGLang's merger, and others after it, put all events into one list and write before each process
whose it is: `"pid": "[TP00-PP01] 4711"`. Each rank's events are put into a trace of their own
again, and that is read as any other. Ranks are counted by data, pipeline and tensor parallelism.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec

from debubble.errors import NotATrace
from debubble.trace.columns import RankTrace
from debubble.trace.format import Format, Reading, TraceFile, decode_events
from debubble.trace.kineto import read_kineto
from debubble.trace.source import HELD_BYTES, Limits, inflate

NAME = "merged traces"
_OWNER = re.compile(
    rb'"pid"\s*:\s*"(\[[A-Z]{2}\d+(?:-[A-Z]{2}\d+)*\]|rank[ _-]?\d+[ :/_-])\s*([^"]*)"'
)
_OF_ONE_RANK = {"traceEvents", "distributedInfo"}
_PARTS = re.compile(r"([A-Za-z]{2,4})[ _-]?(\d+)")
_ORDER = ("DP", "EP", "PP", "TP", "RANK")


def recognise(file: str, prefix: bytes) -> TraceFile | None:
    """Tell it by processes that carry the name of a rank."""
    tagged = b'"traceEvents"' in prefix and _OWNER.search(prefix)
    return TraceFile(file=file, format=NAME) if tagged else None


def read(known: TraceFile, limits: Limits) -> Reading:
    """Take the ranks apart, and read each."""
    data = inflate(known.file, limits, HELD_BYTES)
    problem = "holds several ranks, and cannot be taken apart"
    hint = "give the files that it was merged from"
    events = decode_events(data, msgspec.Raw, known.file, problem=problem, hint=hint)
    header = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
    del data
    owned: dict[bytes, list[bytes]] = {}
    for event in map(bytes, events):
        if found := _OWNER.search(event):
            plain = found[2] if found[2].isdigit() else b'"%b"' % found[2]
            named = b'%b"pid": %b%b' % (event[: found.start()], plain, event[found.end() :])
            owned.setdefault(found[1], []).append(named)
    tags = sorted(owned, key=_place)
    kept = {name: raw for name, raw in header.items() if name not in _OF_ONE_RANK}
    traces = [
        _read_rank(known.file, kept, owned[tag], (rank, len(tags)), limits)
        for rank, tag in enumerate(tags)
    ]
    if not any(len(trace.kernels) or len(trace.cpu_operators) for trace in traces):
        raise NotATrace("holds no events of any rank", file=known.file)
    return Reading(traces=tuple(traces))


def _place(tag: bytes) -> tuple[int, ...]:
    """Return where a rank stands among the others, by what its tag says."""
    said = {name.upper(): int(number) for name, number in _PARTS.findall(tag.decode())}
    return tuple(said.get(name, 0) for name in _ORDER)


def _read_rank(
    file: str,
    header: dict[str, Any],
    events: Sequence[bytes],
    whose: tuple[int, int],
    limits: Limits,
) -> RankTrace:
    rank, world = whose
    about = {**header, "distributedInfo": {"rank": rank, "world_size": world}}
    opening = msgspec.json.encode(about)[:-1]
    text = b'%b, "traceEvents": [%b]}' % (opening, b",\n".join(events))
    return replace(read_kineto(file, limits, text), format=NAME, rank=rank)


FORMAT = Format(
    name=NAME,
    position=4,
    recognise=recognise,
    read=read,
    one_a_rank=False,
)
