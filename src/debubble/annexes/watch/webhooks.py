"""Alerts in → posted to webhooks: each once, tried again for a day, never waited for by others."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from urllib.parse import urlsplit

from debubble.annexes.watch.journal import Delivery, Journal
from debubble.annexes.watch.supervise import log
from debubble.annexes.watch.views import SCHEMA, alert_view
from debubble.capture.fetch import Request, fetch
from debubble.errors import CaptureError, StoreError, mask_secrets

PATIENCE_S = 5.0
_POLL_S = 2.0
_FIRST_WAIT_S = 5.0
_LONGEST_WAIT_S = 3600.0
# Together about a day.
MOST_ATTEMPTS = 32
_NEVER_S = 1e15
_LONGEST_ANSWER = 1 << 20
_HTTP_REFUSED = 300


class Webhooks:
    """Sends what is due, one task a target: one that hangs holds up itself alone."""

    def __init__(self, journal: Journal, targets: tuple[str, ...]) -> None:
        self._journal = journal
        self._targets = targets

    async def run(self, stopping: asyncio.Event) -> None:
        """Deliver until stopped."""
        async with asyncio.TaskGroup() as tasks:
            for target in self._targets:
                tasks.create_task(self._serve(target, stopping))

    async def _serve(self, target: str, stopping: asyncio.Event) -> None:
        while not stopping.is_set():
            try:
                due = await asyncio.to_thread(lambda: self._journal.due(now_s=time.time()))
                for delivery in (waiting for waiting in due if waiting.target == target):
                    if stopping.is_set():
                        return
                    await asyncio.to_thread(self.deliver, delivery)
            except StoreError as error:
                log("store_away", level="error", problem=str(error))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_POLL_S):
                    await stopping.wait()

    def deliver(self, delivery: Delivery) -> bool:
        """Post one alert; where that fails, later again."""
        host, number = urlsplit(delivery.target).hostname, delivery.alert.number
        try:
            post(delivery)
        except CaptureError as error:
            # An address may hold a secret: only its host is told.
            problem = error.message.removeprefix(f"{delivery.target}: ")[:300]
            given_up = delivery.attempts + 1 >= MOST_ATTEMPTS
            wait_s = min(_FIRST_WAIT_S * 2**delivery.attempts, _LONGEST_WAIT_S)
            next_s = _NEVER_S if given_up else time.time() + wait_s
            self._journal.postpone(delivery, problem, next_s=next_s)
            event = "webhook_given_up" if given_up else "webhook_failed"
            log(event, level="warning", target=host, alert=number, problem=problem)
            return False
        self._journal.delivered(delivery, now_s=time.time())
        log("webhook_sent", target=host, alert=number)
        return True


def post(delivery: Delivery) -> None:
    """Send an alert as JSON; its key stays the same, for targets that tell doubles."""
    text = json.dumps({"schema": SCHEMA, "alert": alert_view(delivery.alert)})
    body = mask_secrets(text).encode()
    asked = Request(
        url=delivery.target,
        method="POST",
        body=body,
        headers={
            "Content-Type": "application/json",
            "User-Agent": "debubble",
            "Idempotency-Key": f"debubble-alert-{delivery.alert.number}",
        },
        patience_s=PATIENCE_S,
        most_bytes=_LONGEST_ANSWER,
        follow=False,  # only the configured address is written to
    )
    reply = fetch(asked)
    if reply.status >= _HTTP_REFUSED:
        raise CaptureError(f"the target answered {reply.status}")
