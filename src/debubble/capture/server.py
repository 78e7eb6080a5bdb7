"""A serving engine's profiling routes in → its traces out, and what it did meanwhile, over HTTP."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from debubble.capture.fetch import NoAnswer, fetch
from debubble.errors import CaptureError, UsageError
from debubble.trace.server_notes import (
    SCHEMA,
    EngineReading,
    ServerNotes,
    read_page,
    span_of,
    write_server_notes,
)

KINDS = ("vllm", "sglang")

_POLL_S = 0.5
# The profiler's start, and writing traces, hold an engine up: so long after it, it serves again.
_SETTLE_S = 1.0
# Batches that vLLM profiles at most: some hundred are enough, and a file that can be read.
_MOST_BATCHES = 400
_ERROR_SHOWN = 300
# Engines write all ranks' traces before they answer: minutes, for large models.
_PATIENCE_S = 900.0

_VLLM_CONFIG = json.dumps(
    {
        "profiler": "torch",
        "torch_profiler_dir": "/absolute/folder",
        "torch_profiler_with_stack": False,
        "torch_profiler_record_shapes": True,
        "torch_profiler_with_memory": True,
        "ignore_frontend": True,
        "max_iterations": _MOST_BATCHES,
    }
)
_CONFIGURE = {
    "vllm": f"start it with: vllm serve … --profiler-config '{_VLLM_CONFIG}'",
    "sglang": "is this SGLang's own address, not a router's? It has these routes by default",
}
_NO_TRACES = {
    "vllm": "no traces came to {out}: they are in the server's torch_profiler_dir; "
    "give that folder as --out where it is on this machine",
    "sglang": "no traces came to {out} on this machine: look there on the server's",
}
_NO_METRICS = {
    "vllm": "{url}/metrics has no data: profiling overhead unknown",
    "sglang": "{url}/metrics has no data: profiling overhead unknown; "
    "start SGLang with --enable-metrics",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOrder:
    """Which server to profile, and for how long."""

    url: str
    kind: str
    out: Path
    seconds: float
    around_s: float = 2.0
    """How long to look at the server's metrics before and after."""

    def __post_init__(self) -> None:
        if urlsplit(self.url).scheme not in {"http", "https"}:
            raise UsageError(f"{self.url!r} is no address", hint="such as http://127.0.0.1:8000")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerCapture:
    """What the server left, as far as it can be seen from here."""

    kind: str
    url: str
    files: tuple[Path, ...]
    note: str = ""
    metrics: ServerNotes | None = None
    """What the server did before, under and after the profiler, as it tells itself."""


def capture_server(
    order: ServerOrder,
    *,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> ServerCapture:
    """Have a server profile itself; it is never left profiling, whatever happens here.

    Its metrics are read before, meanwhile and after, and noted beside the traces.
    """
    earlier = set(_traces_in(order.out))
    look = _Look(order, sleep, clock)
    before = look.on_for(order.around_s) if look.tells else []
    began = time.time()
    _post(order, "start_profile", _start_body(order))
    try:
        # The profiler's start holds the engine up: no token's wait for it is to count.
        pause = min(_SETTLE_S, order.seconds / 4) if look.tells else 0.0
        sleep(pause)
        during = look.on_for(order.seconds - pause)
    finally:
        end_profile(order)
    files = tuple(sorted(set(_traces_in(order.out)) - earlier))
    notes = [] if files else [_NO_TRACES[order.kind].format(out=order.out)]
    metrics = None
    if look.tells:
        sleep(_SETTLE_S)
        metrics = ServerNotes(
            schema=SCHEMA,
            kind=order.kind,
            url=order.url,
            began_unix_s=began,
            traces=tuple(file.name for file in files),
            before=span_of(before),
            during=span_of(during),
            after=span_of(look.on_for(order.around_s)),
        )
        if files:
            write_server_notes(files[0].parent, metrics)
    else:
        notes.append(_NO_METRICS[order.kind].format(url=order.url.rstrip("/")))
    return ServerCapture(
        kind=order.kind, url=order.url, files=files, note="; ".join(notes), metrics=metrics
    )


class _Look:
    """Looks at a server's metrics now and then, where they are wanted and there are any."""

    def __init__(
        self, order: ServerOrder, sleep: Callable[[float], None], clock: Callable[[], float]
    ) -> None:
        self.page, self.sleep, self.clock = f"{order.url.rstrip('/')}/metrics", sleep, clock
        self.tells = self.once() is not None

    def once(self) -> EngineReading | None:
        """Read the page; None where it tells nothing."""
        try:
            reply = fetch(self.page)
        except NoAnswer:  # one look that is missing spoils nothing; a server that is gone is told
            return None
        if not reply.ok:
            return None
        text = reply.body.decode("utf-8", "replace")
        reading = read_page(text, self.clock())
        return None if reading.tells_nothing else reading

    def on_for(self, seconds: float) -> list[EngineReading]:
        """Look until the time is over, at its start and at its end."""
        if not self.tells:
            self.sleep(seconds)
            return []
        found = [self.once()]
        deadline = self.clock() + seconds
        while (left := deadline - self.clock()) > 0:
            began, pause = self.clock(), min(_POLL_S, left)
            self.sleep(pause)
            found.append(self.once())
            if self.clock() - began < pause / 2:
                break  # whoever sleeps here was told to stop
        return [reading for reading in found if reading is not None]


def end_profile(order: ServerOrder) -> None:
    """End a profile that somebody left on."""
    _post(order, "stop_profile")


def _start_body(order: ServerOrder) -> dict[str, Any] | None:
    """Return what SGLang is told; vLLM was told at its start."""
    if order.kind == "vllm":
        return None
    return {
        "output_dir": str(order.out.resolve()),
        "activities": ["CPU", "GPU"],
        "record_shapes": True,
        "with_stack": False,
    }


def _traces_in(folder: Path) -> list[Path]:
    return [*folder.rglob("*.json.gz"), *folder.rglob("*.json")] if folder.is_dir() else []


def _post(order: ServerOrder, route: str, body: dict[str, Any] | None = None) -> None:
    url = f"{order.url.rstrip('/')}/{route}"
    try:
        reply = fetch(
            url,
            body=b"" if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
            patience_s=_PATIENCE_S,
        )
    except NoAnswer as error:
        if error.late:
            raise CaptureError(
                f"{url}: no answer within {_PATIENCE_S:g} s",
                hint="it may still be writing its traces: look into its folder before you "
                "try again",
            ) from error
        raise CaptureError(
            error.message, hint="look whether the server runs and the address is right"
        ) from error
    if reply.status == 404:
        raise CaptureError(
            f"{url}: this server has no profiling routes", hint=_CONFIGURE[order.kind]
        )
    if not reply.ok:
        said = reply.body[:_ERROR_SHOWN].decode("utf-8", "replace").strip()
        answered = f"the server answered {reply.status} {reply.reason}"
        raise CaptureError(
            f"{url}: {answered}" + (f": {said}" if said else ""),
            hint="the server's own log says more; a profile that is under way must end first",
        )
