"""Alerts in → posted to webhooks: each once, tried again for a day, never waited for by others."""

from __future__ import annotations

import json
import time
from urllib.parse import urlsplit

from debubble.annexes.watch.journal import Delivery, Journal
from debubble.annexes.watch.supervise import PATIENCE, log
from debubble.annexes.watch.views import SCHEMA, alert_view
from debubble.capture.fetch import fetch
from debubble.errors import CaptureError, mask_secrets

# With the longest wait between them, about a day.
MOST_ATTEMPTS = 300


def deliver(journal: Journal, delivery: Delivery) -> bool:
    """Post one alert; where that fails, later again."""
    host, number = urlsplit(delivery.target).hostname, delivery.alert.number
    try:
        post(delivery)
    except CaptureError as error:
        # An address may hold a secret: only its host is told.
        problem = error.message.removeprefix(f"{delivery.target}: ")[:300]
        journal.postpone(delivery, problem, next_s=time.time() + PATIENCE.after(delivery.attempts))
        given_up = delivery.attempts + 1 >= MOST_ATTEMPTS
        event = "webhook_given_up" if given_up else "webhook_failed"
        log(event, level="warning", target=host, alert=number, problem=problem)
        return False
    journal.delivered(delivery, now_s=time.time())
    log("webhook_sent", target=host, alert=number)
    return True


def post(delivery: Delivery) -> None:
    """Send an alert as JSON; its key stays the same, for targets that tell doubles."""
    text = json.dumps({"schema": SCHEMA, "alert": alert_view(delivery.alert)})
    body = mask_secrets(text).encode()
    reply = fetch(
        delivery.target,
        body=body,
        headers={
            "Content-Type": "application/json",
            "User-Agent": "debubble",
            "Idempotency-Key": f"debubble-alert-{delivery.alert.number}",
        },
    )
    if not reply.ok:
        raise CaptureError(f"the target answered {reply.status}")
