"""What the service remembers, in the store: each capture once, whoever is killed.

A capture is claimed, analysed elsewhere, and its result is stored with all that follows from it in
one transaction. A claim that was under way when the service died is taken up again.
"""

from __future__ import annotations

from debubble.watch.journal.alerts import Alert, Alerts, Delivery
from debubble.watch.journal.captures import CaptureRow, Captures
from debubble.watch.journal.claims import MOST_ATTEMPTS, Claim, Claims
from debubble.watch.journal.states import States
from debubble.watch.journal.triggers import Triggers

__all__ = ["MOST_ATTEMPTS", "Alert", "CaptureRow", "Claim", "Delivery", "Journal"]


class Journal(Claims, Captures, States, Alerts, Triggers):
    """The service's own tables, a room each, over one store."""
