"""A `Timeline` in → a trace that Perfetto opens.

A process a rank; tracks for its passes, waits, sends and receives; an arrow for each transfer; a
counter of microbatches in flight. Trace viewers nest what overlaps on a track, so things that
overlap without being nested get tracks of their own.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from debubble import __version__
from debubble.ledger.account import Wait
from debubble.timeline.model import I64, Passes, PassKind, RankTimeline, Timeline, Transfers
from debubble.units import NS_PER_US, show_bytes, write_file


def assign_tracks(start: I64, end: I64) -> list[int]:
    """Give each interval, in the order of starts, the first track that is free by then."""
    free_from: list[int] = []
    chosen = np.zeros(len(start), dtype=np.int64)
    for row in np.lexsort((end, start)).tolist():
        track = next((n for n, free in enumerate(free_from) if free <= start[row]), len(free_from))
        free_from[track : track + 1] = [max(int(end[row]), int(start[row]) + 1)]
        chosen[row] = track
    return chosen.tolist()


Event = dict[str, Any]

# Numbers of tracks: room for as many that overlap in each kind.
_TRACK_ROOM = 100_000
_PASSES, _WAITS, _SENDS, _RECEIVES = (kind * _TRACK_ROOM for kind in range(1, 5))
_TRACK_NAMES = {_PASSES: "passes", _WAITS: "waits", _SENDS: "sends", _RECEIVES: "receives"}
# A microbatch's activations are kept from its forward pass to its last backward pass.
_RELEASES = (PassKind.B, PassKind.W)


def chrome_trace(timeline: Timeline, waits: Sequence[Wait] = ()) -> dict[str, Any]:
    """Return the document: times in microseconds after the first event."""
    base_ns = int(timeline.passes.start_ns.min(initial=np.iinfo(np.int64).max))
    base_ns = min(base_ns, int(timeline.transfers.send_start_ns.min(initial=base_ns)))
    base_ns = min(base_ns, int(timeline.transfers.receive_start_ns.min(initial=base_ns)))
    events = [event for rank in timeline.ranks for event in _rank_events(timeline, rank, waits)]
    events += _transfer_events(timeline.transfers)
    events += _name_tracks(events)
    for event in events:
        event["ts"] = _us(event["ts"] - base_ns) if event["ph"] != "M" else 0
    return {
        "schemaVersion": 1,
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": base_ns,
        "traceName": f"debubble {__version__}",
        "traceEvents": events,
    }


def write_chrome(timeline: Timeline, path: Path, waits: Sequence[Wait] = ()) -> None:
    """Write the document, packed where the name ends in .gz."""
    data = json.dumps(
        chrome_trace(timeline, waits), separators=(",", ":"), allow_nan=False
    ).encode()
    packed = gzip.compress(data, mtime=0) if path.suffix == ".gz" else data
    write_file(path, packed)


def _us(nanoseconds: int) -> float:
    return nanoseconds / NS_PER_US


def _rank_events(timeline: Timeline, rank: RankTimeline, waits: Sequence[Wait]) -> Iterator[Event]:
    passes = timeline.passes.where(timeline.passes.rank == rank.rank)
    yield from _names(rank)
    yield from _pass_events(passes)
    yield from _wait_events([wait for wait in waits if wait.rank == rank.rank])
    yield from _counters(passes, rank)


def _names(rank: RankTimeline) -> Iterator[Event]:
    stages = " ".join(str(stage) for stage in rank.stages)
    plural = "s" if len(rank.stages) > 1 else ""
    yield _metadata(rank.rank, "process_name", name=f"rank {rank.rank}, stage{plural} {stages}")
    order = rank.pipeline * 100_000 + rank.position
    yield _metadata(rank.rank, "process_sort_index", sort_index=order)
    if rank.peak_memory_bytes is not None:
        peak = f"peak memory {show_bytes(rank.peak_memory_bytes)}"
        yield _metadata(rank.rank, "process_labels", labels=peak)


def _name_tracks(events: Sequence[Event]) -> list[Event]:
    """Name every track that something lies on."""
    used = sorted({(event["pid"], event["tid"]) for event in events if event["ph"] == "X"})
    named = []
    for rank, track in used:
        name = _TRACK_NAMES[track - track % _TRACK_ROOM]
        named += [
            _metadata(rank, "thread_name", track, name=name),
            _metadata(rank, "thread_sort_index", track, sort_index=track),
        ]
    return named


def _metadata(rank: int, kind: str, track: int = 0, **args: Any) -> Event:
    return {"ph": "M", "name": kind, "pid": rank, "tid": track, "ts": 0, "args": args}


def _slice(name: str, category: str, place: tuple[int, int], span: tuple[int, int]) -> Event:
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "pid": place[0],
        "tid": place[1],
        "ts": span[0],
        "dur": _us(max(span[1] - span[0], 0)),
    }


def _pass_events(passes: Passes) -> Iterator[Event]:
    columns = (getattr(passes, name).tolist() for name in Passes.__dataclass_fields__)
    tracks = assign_tracks(passes.start_ns, passes.end_ns)
    for track, row in zip(tracks, zip(*columns, strict=True), strict=True):
        cells = dict(zip(Passes.__dataclass_fields__, row, strict=True))
        place = cells["rank"], _PASSES + track
        name = f"{PassKind(cells['kind']).name}{cells['microbatch']}"
        args = {key: cells[key] for key in ("stage", "microbatch", "step")}
        args["busy_us"] = _us(cells["busy_ns"])
        yield {**_slice(name, "pass", place, (cells["start_ns"], cells["end_ns"])), "args": args}


def _wait_events(waits: Sequence[Wait]) -> Iterator[Event]:
    """Show waits by cause."""
    for wait in waits:
        name = str(wait.cause).replace("_", " ")
        if wait.waits_for:
            name += f": {wait.waits_for}"
        event = _slice(name, "wait", (wait.rank, _WAITS), (wait.start_ns, wait.end_ns))
        args = {"cause": str(wait.cause), "waits_for": wait.waits_for, "step": wait.step}
        yield {**event, "args": args}


def _counters(passes: Passes, rank: RankTimeline) -> Iterator[Event]:
    """Count microbatches in flight."""
    trains = bool(np.isin(passes.kind, _RELEASES).any())
    forward = passes.kind == PassKind.F
    released = np.isin(passes.kind, _RELEASES) if trains else forward
    moments = np.concatenate((passes.start_ns[forward], passes.end_ns[released]))
    change = np.repeat((1, -1), (int(forward.sum()), int(released.sum())))
    order = np.lexsort((change, moments))
    for moment, count in zip(
        moments[order].tolist(), np.cumsum(change[order]).tolist(), strict=True
    ):
        place = {"ph": "C", "pid": rank.rank, "tid": 0, "ts": moment}
        yield {**place, "name": "microbatches in flight", "args": {"count": count}}


def _transfer_events(transfers: Transfers) -> list[Event]:
    """Show each message on both its ranks, and an arrow between the two."""
    sends = _by_rank(transfers.source, transfers.send_start_ns, transfers.send_end_ns)
    receives = _by_rank(transfers.destination, transfers.receive_start_ns, transfers.receive_end_ns)
    columns = [getattr(transfers, name).tolist() for name in Transfers.__dataclass_fields__]
    events: list[Event] = []
    for number, row in enumerate(zip(*columns, strict=True)):
        message = dict(zip(Transfers.__dataclass_fields__, row, strict=True))
        source, destination = message["source"], message["destination"]
        out = (source, _SENDS + sends[number]), (message["send_start_ns"], message["send_end_ns"])
        into = (
            (destination, _RECEIVES + receives[number]),
            (message["receive_start_ns"], message["receive_end_ns"]),
        )
        args = {
            "bytes": message["message_bytes"],
            "step": message["step"],
            "fused": message["fused"],
        }
        events += [
            {**_slice(f"send to {destination}", "send", *out), "args": args},
            {**_slice(f"receive from {source}", "receive", *into), "args": args},
            *_arrow(number, out, into),
        ]
    return events


def _arrow(
    number: int,
    out: tuple[tuple[int, int], tuple[int, int]],
    into: tuple[tuple[int, int], tuple[int, int]],
) -> list[Event]:
    """Draw from a send's start to just before its receive's end, where the slice still is."""
    flow = {"cat": "transfer", "name": "transfer", "id": number}
    (source, sends), (begin, _) = out
    (destination, receives), (posted, arrived) = into
    last = max(posted, arrived - 1)
    return [
        {"ph": "s", **flow, "pid": source, "tid": sends, "ts": begin},
        {"ph": "f", "bp": "e", **flow, "pid": destination, "tid": receives, "ts": last},
    ]


def _by_rank(rank: NDArray[np.int32], start: I64, end: I64) -> Sequence[int]:
    """Return each message's track among those of its rank."""
    tracks = np.zeros(len(rank), dtype=np.int64)
    for owner in np.unique(rank):
        mine = rank == owner
        tracks[mine] = assign_tracks(start[mine], end[mine])
    return tracks.tolist()
