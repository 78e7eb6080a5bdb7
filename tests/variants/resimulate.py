"""A recording in → the same run at other speeds of device, host or wire; orders and causes stay.

Kept are launches, the order of streams, what the host waited for, and which message is which. A
kernel begins when it is launched, its stream is free and what it followed on another stream has
ended, each as closely as in the recording; a message ends one wire time after both sides are there.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.traces.documents import (
    Documents,
    Event,
    drop,
    is_compute,
    launches_of,
    load_all,
    on_device,
)

import debubble

_DERIVED = ("ac2g", "fwdbwd", "gpu_user_annotation", "Trace")
_WAITS = re.compile(r"Synchronize|cudaMemcpy$")
# What a device or a host needs from one thing to the next, in us; gaps beyond it have a cause.
_LAUNCH_US, _NEXT_US, _RETURN_US, _LEAST_US = 6.0, 2.0, 5.0, 1.6


def _is_useless(event: Event) -> bool:
    """Tell what no reader keeps beside kernels."""
    category = event.get("cat")
    talks = event["name"].startswith(("c10d::", "record_param_comms"))
    return category in _DERIVED or (category == "cpu_op" and not talks)


@dataclass(frozen=True, kw_only=True)
class Speeds:
    """How fast all is, against the recording; times are in us, as the recording counts them."""

    device: Callable[[int, float, Event], float] = lambda *_: 1.0
    """What a kernel takes, as a factor: by rank, start and event."""
    host: float = 1.0
    wire: Callable[[int, int, float], float] = lambda *_: 0.0
    """What a message takes more: from a rank, to a rank, at a moment."""
    pauses: tuple[tuple[int, float, float], ...] = ()
    """Of hosts: rank, moment, length."""


class Replay:
    """A recording, taken apart so that it can be run again."""

    def __init__(self, folder: Path) -> None:
        self.documents = load_all(folder)
        for document in self.documents.values():
            drop(document, _is_useless)
        analysis = debubble.analyse(str(folder))
        self.timeline = analysis.timeline
        first_ns = {trace.rank: int(trace.kernels.start_ns[0]) for trace in analysis.traces}
        self.kernels = {rank: on_device(one) for rank, one in self.documents.items()}
        self.launches = {rank: launches_of(one) for rank, one in self.documents.items()}
        self.base_ns = {
            rank: first_ns[rank] - round(kernels[0]["ts"] * 1000)
            for rank, kernels in self.kernels.items()
        }
        self.sides = self._sides_of_messages()

    def _sides_of_messages(self) -> dict[tuple[int, int], list[tuple[int, int, int, int]]]:
        """Return, of each kernel, the messages it carries: both ranks and both kernels."""
        transfers = self.timeline.transfers
        row_at = {
            (rank, self.base_ns[rank] + round(event["ts"] * 1000) + off): row
            for rank, kernels in self.kernels.items()
            for off in (2, -2, 1, -1, 0)
            for row, event in enumerate(kernels)
        }
        sides: dict[tuple[int, int], list[tuple[int, int, int, int]]] = {}
        for source, destination, sent, received in zip(
            transfers.source.tolist(),
            transfers.destination.tolist(),
            transfers.send_start_ns.tolist(),
            transfers.receive_start_ns.tolist(),
            strict=True,
        ):
            out, into = row_at.get((source, sent)), row_at.get((destination, received))
            if out is not None and into is not None:
                message = (source, out, destination, into)
                for side in ((source, out), (destination, into)):
                    sides.setdefault(side, []).append(message)
        return sides

    def run(self, speeds: Speeds | None = None) -> Documents:
        """Run it again; unchanged, the figures stay within the noise of the model."""
        return _Run(self, speeds or Speeds()).documents()


class _Run:
    """One run: when each kernel now begins and ends, and how each host's clock is bent."""

    def __init__(self, replay: Replay, speeds: Speeds) -> None:
        self.replay, self.speeds = replay, speeds
        occurrences = sorted(self._occurrences(), key=lambda known: known[:2])
        before = occurrences[0][0] - 1e6
        self.bends = {rank: [(before, before)] for rank in replay.kernels}
        self.launched: dict[tuple[int, int], float] = {}
        self.begins: dict[tuple[int, int], float] = {}
        self.ends: dict[tuple[int, int], float] = {}
        self.last: dict[tuple[int, int], int] = {}
        self.ended: dict[int, dict[int, tuple[float, float]]] = {r: {} for r in replay.kernels}
        self.waits: dict[int, float] = {}
        for at, _, what, rank, thing in occurrences:
            what(self, rank, at, thing)

    def _occurrences(self) -> Iterator[tuple[float, int, Callable[..., None], int, Any]]:
        """Yield all that happens: when, after what of the same moment, and to whom."""
        for rank, kernels in self.replay.kernels.items():
            for row, event in enumerate(kernels):
                yield event["ts"] + event["dur"], 0, _Run.end, rank, row
                yield event["ts"], 1, _Run.begin, rank, row
                launch = self.replay.launches[rank].get(event["args"].get("correlation"))
                if launch is not None:
                    yield launch["ts"], 2, _Run.launch, rank, row
            for event in self.replay.documents[rank]["traceEvents"]:
                runtime = event.get("cat") == "cuda_runtime" and event["ph"] == "X"
                if runtime and _WAITS.search(event["name"]) and event["dur"] > _RETURN_US:
                    yield event["ts"], 2, _Run.wait, rank, event
                    yield event["ts"] + event["dur"], 3, _Run.go_on, rank, event
        for rank, at, length in self.speeds.pauses:
            yield at, 3, _Run.pause, rank, length

    def on_host(self, rank: int, at: float) -> float:
        """Return when the host now does what it did at a moment."""
        bends = self.bends[rank]
        row = max(bisect_right(bends, (at, float("inf"))) - 1, 0)
        old, new = bends[row]
        latest = bends[row + 1][1] if row + 1 < len(bends) else float("inf")
        return min(new + (at - old) * self.speeds.host, latest)

    def launch(self, rank: int, at: float, row: int) -> None:
        self.launched[rank, row] = self.on_host(rank, at)

    def wait(self, rank: int, at: float, event: Event) -> None:
        self.waits[id(event)] = self.on_host(rank, at)

    def go_on(self, rank: int, at: float, event: Event) -> None:
        """Return from a call that waited, once all is done that was waited for."""
        began = self.waits[id(event)]
        done = max((end for _, end in self.ended[rank].values()), default=0.0)
        waited = event["dur"] > 4 * _RETURN_US
        returned = done + _RETURN_US if waited else began + event["dur"]
        self.bends[rank].append((at, max(returned, began + _NEXT_US)))

    def pause(self, rank: int, at: float, length: float) -> None:
        self.bends[rank].append((at, self.on_host(rank, at) + length))

    def begin(self, rank: int, at: float, row: int) -> None:
        kernel = self.replay.kernels[rank][row]
        stream = kernel["args"].get("stream")
        after = []
        if (rank, row) in self.launched:
            launch = self.replay.launches[rank][kernel["args"]["correlation"]]
            delay = min(max(at - launch["ts"], 0.0), _LAUNCH_US)
            after.append(self.launched[rank, row] + delay)
        if (rank, stream) in self.last:
            ahead = self.last[rank, stream]
            event = self.replay.kernels[rank][ahead]
            now = self.ends.get((rank, ahead)) or self.begins[rank, ahead] + event["dur"]
            after.append(now + min(at - event["ts"] - event["dur"], _NEXT_US))
        for other, (old, new) in self.ended[rank].items():
            if other != stream:
                after.append(new + min(max(at - old, 0.0), _NEXT_US))
        self.begins[rank, row] = max(after) if after else self.on_host(rank, at)
        self.last[rank, stream] = row

    def end(self, rank: int, at: float, row: int) -> None:
        kernel = self.replay.kernels[rank][row]
        stream, begins = kernel["args"].get("stream"), self.begins[rank, row]
        messages = self.replay.sides.get((rank, row), ())
        if messages:
            ends = max(self._end_of(message, (rank, row), at) for message in messages)
        else:
            factor = self.speeds.device(rank, at, kernel) if is_compute(kernel) else 1.0
            ends = begins + kernel["dur"] * factor
        self.ends[rank, row] = ends
        self.ended[rank][stream] = at, max(ends, self.ended[rank].get(stream, (0.0, 0.0))[1])

    def _end_of(
        self, message: tuple[int, int, int, int], side: tuple[int, int], at: float
    ) -> float:
        """Return when a message is there, which now begins when both sides are."""
        source, out, destination, into = message
        send, receive = self.replay.kernels[source][out], self.replay.kernels[destination][into]
        begins = self.begins[side]
        both = self.begins.get((source, out)), self.begins.get((destination, into))
        if both[0] is None or both[1] is None:
            return begins + self.replay.kernels[side[0]][side[1]]["dur"]
        is_receive = side == (destination, into)
        sent = send["ts"] + send["dur"]
        if not is_receive and sent <= receive["ts"]:  # into a buffer
            return begins + send["dur"]
        ended = receive["ts"] + receive["dur"] if is_receive else sent
        took = max(ended - max(send["ts"], receive["ts"]), 1.0)
        wire = self.speeds.wire(source, destination, at)
        return max(max(both) + took + wire, begins + _LEAST_US)

    def documents(self) -> Documents:
        """Return the traces that this run would have left."""
        return {rank: self._document(rank) for rank in self.replay.documents}

    def _document(self, rank: int) -> Event:
        kernels = {id(event): row for row, event in enumerate(self.replay.kernels[rank])}
        source = self.replay.documents[rank]
        events = []
        for event in source["traceEvents"]:
            copy = {**event, "args": dict(event["args"])} if "args" in event else dict(event)
            if id(event) in kernels:
                row = rank, kernels[id(event)]
                begin, end = self.begins[row], self.ends[row]
                copy["args"].pop("memory bandwidth (GB/s)", None)
            elif "ts" in event and event["ph"] != "M":
                begin = self.on_host(rank, event["ts"])
                end = self.on_host(rank, event["ts"] + event.get("dur", 0.0))
            else:
                events.append(copy)
                continue
            copy["ts"] = round(begin, 3)
            if "dur" in event:
                copy["dur"] = round(max(end - copy["ts"], 0.0), 3)
            events.append(copy)
        return {**source, "traceEvents": events}
