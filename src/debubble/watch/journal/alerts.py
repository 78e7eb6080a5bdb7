"""What changed in → alerts, each open once, and their way to the webhooks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import sqlalchemy as sa

from debubble.measure import store_schema as schema
from debubble.watch.journal.claims import Claim
from debubble.watch.journal.room import Room

if TYPE_CHECKING:
    from sqlalchemy import Connection


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """Something that changed."""

    number: int
    source: str
    kind: str
    subject: str
    raised_s: float
    capture: int
    acknowledged_s: float | None
    data: dict[str, Any]

    @property
    def message(self) -> str:
        """What happened, in a sentence."""
        return str(self.data.get("message", ""))


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """An alert that a webhook has not taken yet."""

    alert: Alert
    target: str
    attempts: int


class Alerts(Room):
    """Alerts, and who still has to hear of them."""

    def is_open(self, connection: Connection, source: str, kind: str, subject: str) -> bool:
        """Tell whether the same alert waits to be acknowledged."""
        table = schema.watch_alerts
        query = sa.select(table.c.id).where(
            table.c.source == source,
            table.c.kind == kind,
            table.c.subject == subject,
            table.c.acknowledged_s.is_(None),
        )
        return connection.execute(query).first() is not None

    def raise_alert(  # noqa: PLR0913 (what an alert is made of)
        self,
        connection: Connection,
        claim: Claim,
        kind: str,
        subject: str,
        data: Mapping[str, Any],
        *,
        now_s: float,
        targets: Sequence[str],
    ) -> int | None:
        """Raise an alert and queue it for the webhooks; None where it is open already."""
        if self.is_open(connection, claim.source, kind, subject):
            return None
        table = schema.watch_alerts
        row = table.insert().values(
            source=claim.source,
            kind=kind,
            subject=subject,
            raised_s=now_s,
            capture_id=claim.number,
            data=msgspec.json.encode(data).decode(),
        )
        number = int(connection.execute(row.returning(table.c.id)).scalar_one())
        for target in targets:
            queued = schema.watch_deliveries.insert().values(
                alert_id=number, target=target, attempts=0, next_s=now_s
            )
            connection.execute(queued)
        return number

    def alerts(self, source: str | None = None, *, most: int = 100) -> tuple[Alert, ...]:
        """Return the last alerts, the newest first."""
        table = schema.watch_alerts
        query = table.select().order_by(table.c.id.desc()).limit(most)
        if source is not None:
            query = query.where(table.c.source == source)
        with self.store.transaction() as connection:
            return tuple(_as_alert(row) for row in connection.execute(query))

    def open_alerts(self) -> tuple[Alert, ...]:
        """Return all alerts that wait to be acknowledged."""
        table = schema.watch_alerts
        query = table.select().where(table.c.acknowledged_s.is_(None)).order_by(table.c.id)
        with self.store.transaction() as connection:
            return tuple(_as_alert(row) for row in connection.execute(query))

    def acknowledge(
        self, number: int, *, now_s: float, follow: Callable[[Connection, Alert], None]
    ) -> bool:
        """Close an alert, with what follows from it; False where there is no such open alert."""
        table = schema.watch_alerts
        with self.store.transaction() as connection:
            this = table.c.id == number
            row = connection.execute(
                table.select().where(this, table.c.acknowledged_s.is_(None))
            ).first()
            if row is None:
                return False
            connection.execute(table.update().where(this).values(acknowledged_s=now_s))
            follow(connection, _as_alert(row))
        return True

    def due(self, *, now_s: float) -> tuple[Delivery, ...]:
        """Return what is to be sent now, the oldest first."""
        queue, alerts = schema.watch_deliveries, schema.watch_alerts
        query = (
            sa.select(queue.c.target, queue.c.attempts, alerts)
            .join_from(queue, alerts, queue.c.alert_id == alerts.c.id)
            .where(queue.c.delivered_s.is_(None), queue.c.next_s <= now_s)
            .order_by(queue.c.alert_id)
        )
        with self.store.transaction() as connection:
            return tuple(
                Delivery(alert=_as_alert(row), target=row.target, attempts=row.attempts)
                for row in connection.execute(query)
            )

    def delivered(self, one: Delivery, *, now_s: float) -> None:
        """Note that a webhook took an alert."""
        self._note(one, attempts=one.attempts + 1, delivered_s=now_s, problem=None)

    def postpone(self, one: Delivery, problem: str, *, next_s: float) -> None:
        """Note that it did not, and when to try again."""
        self._note(one, attempts=one.attempts + 1, next_s=next_s, problem=problem)

    def _note(self, one: Delivery, **values: object) -> None:
        queue = schema.watch_deliveries
        this = (queue.c.alert_id == one.alert.number) & (queue.c.target == one.target)
        with self.store.transaction() as connection:
            connection.execute(queue.update().where(this).values(**values))


def _as_alert(row: Any) -> Alert:
    return Alert(
        number=row.id,
        source=row.source,
        kind=row.kind,
        subject=row.subject,
        raised_s=row.raised_s,
        capture=row.capture_id,
        acknowledged_s=row.acknowledged_s,
        data=msgspec.json.decode(row.data, type=dict[str, Any]),
    )
