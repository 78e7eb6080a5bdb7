"""What the service remembers: captures, claims, states of drift, alerts, triggers.

A capture is claimed, analysed elsewhere, and its result is stored with all that follows from it in
one transaction. A claim that was under way when the service died is taken up again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import sqlalchemy as sa

from debubble.measure import store_schema as schema
from debubble.measure.store import Store
from debubble.watch.analyse import Analysis, Finding

if TYPE_CHECKING:
    from sqlalchemy import Connection


class Room:
    """What all parts have: the store that they share."""

    def __init__(self, store: Store) -> None:
        self.store = store


# A capture that took the service or a worker down so often is not tried again.
MOST_ATTEMPTS = 3
CLAIMED, STORED, UNREADABLE = "claimed", "stored", "unreadable"


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A capture that is ours to analyse."""

    number: int
    source: str
    key: str
    files: tuple[str, ...]
    attempts: int
    found_s: float


class Claims(Room):
    """Who has which capture."""

    def known_keys(self, source: str) -> frozenset[str]:
        """Return the captures of a source that were ever claimed."""
        table = schema.watch_captures
        with self.store.transaction() as connection:
            rows = connection.execute(sa.select(table.c.key).where(table.c.source == source))
            return frozenset(row.key for row in rows)

    def claim(self, source: str, key: str, files: Sequence[str], *, now_s: float) -> Claim | None:
        """Take a capture; None where somebody has it."""
        table = schema.watch_captures
        with self.store.transaction() as connection:
            schema.wait_for_turn(connection)
            same = sa.select(table.c.id).where(table.c.source == source, table.c.key == key)
            if connection.execute(same).first() is not None:
                return None
            row = table.insert().values(
                source=source,
                key=key,
                state=CLAIMED,
                found_s=now_s,
                attempts=1,
                files=msgspec.json.encode(tuple(files)).decode(),
            )
            number = int(connection.execute(row.returning(table.c.id)).scalar_one())
        return Claim(
            number=number, source=source, key=key, files=tuple(files), attempts=1, found_s=now_s
        )

    def unfinished(self, sources: Sequence[str], *, now_s: float) -> tuple[Claim, ...]:
        """Take up the claims of a service that died; what died too often is given up."""
        table = schema.watch_captures
        claims = []
        with self.store.transaction() as connection:
            mine = table.c.source.in_(list(sources))
            found = table.select().where(table.c.state == CLAIMED, mine).order_by(table.c.id)
            for row in connection.execute(found).all():
                attempts = row.attempts + 1
                this = table.update().where(table.c.id == row.id)
                if attempts > MOST_ATTEMPTS:
                    why = f"the analysis died {row.attempts} times"
                    connection.execute(this.values(state=UNREADABLE, problem=why, finished_s=now_s))
                    continue
                connection.execute(this.values(attempts=attempts))
                claims.append(
                    Claim(
                        number=row.id,
                        source=row.source,
                        key=row.key,
                        files=tuple(msgspec.json.decode(row.files, type=list[str])),
                        attempts=attempts,
                        found_s=row.found_s,
                    )
                )
        return tuple(claims)

    def finish(
        self,
        claim: Claim,
        analysis: Analysis,
        *,
        now_s: float,
        follow: Callable[[Connection, Finding], None],
    ) -> bool:
        """Store what came of a capture, with what follows from it; False where it was stored."""
        table = schema.watch_captures
        with self.store.transaction() as connection:
            still = connection.execute(
                table.update()
                .where(table.c.id == claim.number, table.c.state == CLAIMED)
                .values(
                    state=STORED if analysis.finding else UNREADABLE,
                    finished_s=now_s,
                    problem=analysis.problem or None,
                )
            )
            if still.rowcount != 1:
                return False
            if analysis.finding is None or analysis.measurement is None:
                return True
            number = self.store.add_within(
                connection,
                claim.source,
                analysis.measurement,
                now_s=claim.found_s,
                tags={"watch": claim.key},
            )
            connection.execute(
                table.update()
                .where(table.c.id == claim.number)
                .values(
                    measurement_id=number,
                    data=msgspec.json.encode(analysis.finding).decode(),
                )
            )
            for metric, value in analysis.finding.metrics.items():
                connection.execute(
                    schema.watch_points.insert().values(
                        capture_id=claim.number,
                        metric=metric,
                        source=claim.source,
                        bucket=analysis.finding.bucket,
                        at_s=claim.found_s,
                        value=value,
                    )
                )
            follow(connection, analysis.finding)
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureRow:
    """A capture as it stands."""

    number: int
    source: str
    key: str
    state: str
    found_s: float
    finished_s: float | None
    problem: str | None
    finding: Finding | None


class Captures(Room):
    """What became of captures."""

    def captures(self, source: str, *, most: int) -> tuple[CaptureRow, ...]:
        """Return the last captures of a source, the newest first."""
        table = schema.watch_captures
        rows = table.select().where(table.c.source == source).order_by(table.c.id.desc())
        with self.store.transaction() as connection:
            return tuple(_as_row(row) for row in connection.execute(rows.limit(most)))

    def capture(self, source: str, number: int) -> CaptureRow | None:
        """Return one capture."""
        table = schema.watch_captures
        rows = table.select().where(table.c.source == source, table.c.id == number)
        with self.store.transaction() as connection:
            row = connection.execute(rows).first()
        return None if row is None else _as_row(row)

    def latest(self, source: str) -> CaptureRow | None:
        """Return the last capture that was understood."""
        table = schema.watch_captures
        rows = (
            table.select()
            .where(table.c.source == source, table.c.state == STORED)
            .order_by(table.c.id.desc())
            .limit(1)
        )
        with self.store.transaction() as connection:
            row = connection.execute(rows).first()
        return None if row is None else _as_row(row)

    def outcomes(self, source: str) -> dict[str, int]:
        """Count the captures of a source by what became of them."""
        table = schema.watch_captures
        query = (
            sa.select(table.c.state, sa.func.count())
            .where(table.c.source == source)
            .group_by(table.c.state)
        )
        with self.store.transaction() as connection:
            return {state: int(count) for state, count in connection.execute(query)}

    def points(self, source: str, metric: str, *, most: int) -> list[tuple[float, int, float]]:
        """Return the last values of a metric: when, which bucket, what; the oldest first."""
        table = schema.watch_points
        query = (
            sa.select(table.c.at_s, table.c.bucket, table.c.value)
            .where(table.c.source == source, table.c.metric == metric)
            .order_by(table.c.capture_id.desc())
            .limit(most)
        )
        with self.store.transaction() as connection:
            found = [(row.at_s, row.bucket, row.value) for row in connection.execute(query)]
        return found[::-1]

    def histogram(
        self, source: str, metric: str, bounds: Sequence[float]
    ) -> dict[int, tuple[list[int], float]]:
        """Count all values of a metric up to each bound and in all, with their sum, by bucket."""
        table = schema.watch_points
        below = [sa.func.sum(sa.case((table.c.value <= bound, 1), else_=0)) for bound in bounds]
        query = (
            sa.select(table.c.bucket, sa.func.sum(table.c.value), *below, sa.func.count())
            .where(table.c.source == source, table.c.metric == metric)
            .group_by(table.c.bucket)
        )
        with self.store.transaction() as connection:
            return {
                int(row[0]): ([int(count) for count in row[2:]], float(row[1]))
                for row in connection.execute(query)
            }

    def prunable(self, source: str, *, keep: int) -> list[tuple[int, tuple[str, ...]]]:
        """Return finished captures beyond the newest, with the files they still have."""
        table = schema.watch_captures
        query = (
            table.select()
            .where(table.c.source == source, table.c.state == STORED, table.c.files != "[]")
            .order_by(table.c.id.desc())
            .offset(keep)
        )
        with self.store.transaction() as connection:
            return [
                (row.id, tuple(msgspec.json.decode(row.files, type=list[str])))
                for row in connection.execute(query)
            ]

    def forget_files(self, number: int) -> None:
        """Note that the raw traces of a capture are gone."""
        table = schema.watch_captures
        with self.store.transaction() as connection:
            connection.execute(table.update().where(table.c.id == number).values(files="[]"))


def _as_row(row: Any) -> CaptureRow:
    return CaptureRow(
        number=row.id,
        source=row.source,
        key=row.key,
        state=row.state,
        found_s=row.found_s,
        finished_s=row.finished_s,
        problem=row.problem,
        finding=None if row.data is None else msgspec.json.decode(row.data, type=Finding),
    )


class States(Room):
    """Something small by source and name."""

    def state(self, connection: Connection, source: str, name: str, kind: type[Any]) -> Any:
        """Return what was remembered; a new one where nothing was."""
        table = schema.watch_states
        query = sa.select(table.c.data).where(table.c.source == source, table.c.name == name)
        data = connection.execute(query).scalar()
        return kind() if data is None else msgspec.json.decode(data, type=kind)

    def states(self, source: str, prefix: str, kind: type[Any]) -> dict[str, Any]:
        """Return all that is remembered under a prefix."""
        table = schema.watch_states
        query = table.select().where(
            table.c.source == source, table.c.name.startswith(prefix, autoescape=True)
        )
        with self.store.transaction() as connection:
            return {
                row.name.removeprefix(prefix): msgspec.json.decode(row.data, type=kind)
                for row in connection.execute(query)
            }

    def remember(self, connection: Connection, source: str, name: str, what: object) -> None:
        """Remember something for the next capture."""
        schema.write_state(connection, source, name, msgspec.json.encode(what).decode())


class Triggers(Room):
    """Which server was captured when."""

    def last_trigger(self, source: str) -> float | None:
        """Return when a server was last captured, or tried."""
        table = schema.watch_triggers
        query = sa.select(sa.func.max(table.c.began_s)).where(table.c.source == source)
        with self.store.transaction() as connection:
            found = connection.execute(query).scalar()
        return None if found is None else float(found)

    def unended_trigger(self, source: str) -> int | None:
        """Return the capture of a server that was under way when the service died."""
        table = schema.watch_triggers
        query = sa.select(table.c.id).where(table.c.source == source, table.c.ended_s.is_(None))
        with self.store.transaction() as connection:
            found = connection.execute(query.order_by(table.c.id.desc())).scalar()
        return None if found is None else int(found)

    def begin_trigger(self, source: str, *, now_s: float) -> int:
        """Note that a server is being captured."""
        table = schema.watch_triggers
        row = table.insert().values(source=source, began_s=now_s).returning(table.c.id)
        with self.store.transaction() as connection:
            return int(connection.execute(row).scalar_one())

    def end_trigger(
        self, number: int, *, now_s: float, traffic: Mapping[int, float], problem: str = ""
    ) -> None:
        """Note what came of it, and the requests the server counted."""
        table = schema.watch_triggers
        values = {
            "ended_s": now_s,
            "data": msgspec.json.encode(traffic).decode(),
            "problem": problem or None,
        }
        with self.store.transaction() as connection:
            connection.execute(table.update().where(table.c.id == number).values(**values))

    def traffic_at(self, source: str, at_s: float) -> dict[int, float]:
        """Return what a server counted around the capture whose files are of that time."""
        table = schema.watch_triggers
        query = (
            sa.select(table.c.data)
            .where(table.c.source == source, table.c.began_s <= at_s, table.c.data.is_not(None))
            .order_by(table.c.id.desc())
            .limit(1)
        )
        with self.store.transaction() as connection:
            data = connection.execute(query).scalar()
        return {} if data is None else msgspec.json.decode(data, type=dict[int, float])


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


class Journal(Claims, Captures, States, Alerts, Triggers):
    """The service's own tables, a room each, over one store."""


__all__ = ["MOST_ATTEMPTS", "Alert", "CaptureRow", "Claim", "Delivery", "Journal"]
