"""Parts of the service in → run for good, each on its own: what fails waits, and is logged.

A part is one source's folder, one source's server, the page: none ends another.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TypeVar

from debubble.errors import mask_secrets

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long the service waits for what, in seconds."""

    poll_s: float = 1.0
    """Between two looks for captures that are to be taken up again, for alerts that are to be sent,
    for a store that was away, and at the clock: it may be set, and the machine may sleep. And how
    old what is shown may be."""
    suspect_s: float = 10.0
    """Before a capture is taken up again, for each time that the service died of it, as far as is
    known: a service that dies of something else, again and again, has died by then."""
    grace_s: float = 10.0
    """After a stop, for analyses to end; then the next service begins them anew."""
    last_s: float = 60.0
    """And for servers to end their profiles: they may write for minutes, but were told."""
    store_check_s: float = 10.0
    """Between two looks whether the store can be written."""
    request_s: float = 5.0
    """For a client to ask."""
    answer_s: float = 10.0
    """Then to take the answer."""
    retry_share: float = 0.1
    """Of the time between two captures, for a server that is pressed or away to be asked again."""
    first_retry_s: float = 1.0
    """After a failure; then twice as long each time."""
    longest_retry_s: float = 300.0

    def after(self, failures: int) -> float:
        """Return how long to wait before something that failed so often is tried again."""
        return float(min(self.first_retry_s * 2**failures, self.longest_retry_s))


PATIENCE = Patience()


def log(event: str, *, level: str = "info", **fields: object) -> None:
    """Write an event; strangers' text is escaped, so that one event is one line."""
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    more = {
        name: value if isinstance(value, int | float | str | list | dict | None) else str(value)
        for name, value in fields.items()
    }
    line = {"time": now, "level": level, "event": event, **more}
    sys.stderr.write(mask_secrets(json.dumps(line)) + "\n")
    sys.stderr.flush()


async def in_daemon(call: Callable[..., _T], *words: object) -> _T:
    """Call what takes time in a thread of its own, which neither others nor the end wait for.

    A pool's threads are few: as many folders or servers that hang would stop everybody.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[_T] = loop.create_future()

    def tell(set_it: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(lambda: None if future.done() else set_it())

    def run() -> None:
        try:
            result = call(*words)
        except BaseException as error:  # noqa: BLE001 (whoever waits gets it)
            told = error
            tell(lambda: future.set_exception(told))
        else:
            tell(lambda: future.set_result(result))

    threading.Thread(target=run, daemon=True).start()
    return await future


async def supervise(
    part: str,
    work: Callable[[], Awaitable[None]],
    *,
    sleep: Callable[[float], Awaitable[None]],
    stopping: asyncio.Event,
    on_failure: Callable[[str], None],
) -> None:
    """Run a part until the service stops; after a failure again, later and later."""
    failures = 0
    while not stopping.is_set():
        began = time.monotonic()
        try:
            await work()
        except Exception as error:  # noqa: BLE001 (one part must not take the service down)
            if time.monotonic() - began > 2 * PATIENCE.longest_retry_s:  # it was well
                failures = 0
            wait_s = PATIENCE.after(failures)
            failures += 1
            on_failure(f"{type(error).__name__}: {error}")
            told = "".join(traceback.format_exception(error))
            log("failed", level="error", part=part, problem=told, again_in_s=wait_s)
            await sleep(wait_s)
        else:
            return
