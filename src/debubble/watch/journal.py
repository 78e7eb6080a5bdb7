"""What the service remembers: captures, claims, states of drift, alerts, triggers.

A capture is claimed, analysed elsewhere, and its result is stored with all that follows from it in
one transaction. A claim that was under way when the service died is taken up again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import sqlalchemy as sa

from debubble.measure.store import Store
from debubble.measure.store_schema import add_tables, wait_for_turn, write_row
from debubble.watch import tables
from debubble.watch.analyse import Finding, Outcome

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """An alert that a webhook has not taken yet."""

    alert: Alert
    target: str
    attempts: int


class Journal:
    """The service's own tables in a store; those that it lacks are made."""

    def __init__(self, store: Store) -> None:
        self.store = store
        with store.transaction() as connection:
            add_tables(connection, tables.ALL)

    def _rows(self, query: sa.Executable) -> Sequence[Any]:
        with self.store.transaction() as connection:
            return connection.execute(query).all()

    def _scalar(self, query: sa.Executable) -> Any:
        """Return the first column of the first row; None where there is none."""
        with self.store.transaction() as connection:
            return connection.execute(query).scalar()

    def _write(self, query: sa.Executable) -> None:
        with self.store.transaction() as connection:
            connection.execute(query)

    # Claims: who has which capture.

    def known_keys(self, source: str) -> frozenset[str]:
        """Return the captures of a source that were ever claimed."""
        table = tables.captures
        rows = self._rows(sa.select(table.c.key).where(table.c.source == source))
        return frozenset(row.key for row in rows)

    def claim(self, source: str, key: str, files: Sequence[str], *, now_s: float) -> Claim | None:
        """Take a capture; None where somebody has it."""
        table = tables.captures
        with self.store.transaction() as connection:
            wait_for_turn(connection)
            same = sa.select(table.c.id).where(table.c.source == source, table.c.key == key)
            if connection.execute(same).first() is not None:
                return None
            row = table.insert().values(
                source=source,
                key=key,
                state=CLAIMED,
                found_s=now_s,
                attempts=1,
                files=_encode(tuple(files)),
            )
            number = int(connection.execute(row.returning(table.c.id)).scalar_one())
        return Claim(
            number=number, source=source, key=key, files=tuple(files), attempts=1, found_s=now_s
        )

    def unfinished(self, sources: Sequence[str], *, now_s: float) -> tuple[Claim, ...]:
        """Take up the claims of a service that died; what died too often is given up."""
        table = tables.captures
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
                        files=_files(row),
                        attempts=attempts,
                        found_s=row.found_s,
                    )
                )
        return tuple(claims)

    def finish(
        self,
        claim: Claim,
        analysis: Outcome,
        *,
        now_s: float,
        follow: Callable[[sa.Connection, Finding], None],
    ) -> bool:
        """Store what came of a capture, with what follows from it; False where it was stored."""
        table, finding = tables.captures, analysis.finding
        this = table.update().where(table.c.id == claim.number)
        with self.store.transaction() as connection:
            still = connection.execute(
                this.where(table.c.state == CLAIMED).values(
                    state=STORED if finding else UNREADABLE,
                    finished_s=now_s,
                    problem=analysis.problem or None,
                )
            )
            if still.rowcount != 1:
                return False
            if finding is None or analysis.measurement is None:
                return True
            number = self.store.add_within(
                connection,
                claim.source,
                analysis.measurement,
                now_s=claim.found_s,
                tags={"watch": claim.key},
            )
            connection.execute(this.values(measurement_id=number, data=_encode(finding)))
            for metric, value in finding.metrics.items():
                connection.execute(
                    tables.points.insert().values(
                        capture_id=claim.number,
                        metric=metric,
                        source=claim.source,
                        bucket=finding.bucket,
                        at_s=claim.found_s,
                        value=value,
                    )
                )
            follow(connection, finding)
        return True

    # Captures, and what became of them.

    def captures(self, source: str, *, most: int) -> tuple[CaptureRow, ...]:
        """Return the last captures of a source, the newest first."""
        table = tables.captures
        query = table.select().where(table.c.source == source)
        return tuple(map(_as_capture, self._rows(query.order_by(table.c.id.desc()).limit(most))))

    def capture(self, source: str, number: int) -> CaptureRow | None:
        """Return one capture."""
        table = tables.captures
        rows = self._rows(table.select().where(table.c.source == source, table.c.id == number))
        return _as_capture(rows[0]) if rows else None

    def latest(self, source: str) -> CaptureRow | None:
        """Return the last capture that was understood."""
        table = tables.captures
        query = table.select().where(table.c.source == source, table.c.state == STORED)
        rows = self._rows(query.order_by(table.c.id.desc()).limit(1))
        return _as_capture(rows[0]) if rows else None

    def outcomes(self, source: str) -> dict[str, int]:
        """Count the captures of a source by what became of them."""
        table = tables.captures
        query = sa.select(table.c.state, sa.func.count()).where(table.c.source == source)
        return {state: int(count) for state, count in self._rows(query.group_by(table.c.state))}

    def points(self, source: str, metric: str, *, most: int) -> list[tuple[float, int, float]]:
        """Return the last values of a metric: when, which bucket, what; the oldest first."""
        table = tables.points
        query = (
            sa.select(table.c.at_s, table.c.bucket, table.c.value)
            .where(table.c.source == source, table.c.metric == metric)
            .order_by(table.c.capture_id.desc())
            .limit(most)
        )
        return [(row.at_s, row.bucket, row.value) for row in reversed(self._rows(query))]

    def histogram(
        self, source: str, metric: str, bounds: Sequence[float]
    ) -> dict[int, tuple[list[int], float]]:
        """Count all values of a metric up to each bound and in all, with their sum, by bucket."""
        table = tables.points
        below = [sa.func.sum(sa.case((table.c.value <= bound, 1), else_=0)) for bound in bounds]
        query = (
            sa.select(table.c.bucket, sa.func.sum(table.c.value), *below, sa.func.count())
            .where(table.c.source == source, table.c.metric == metric)
            .group_by(table.c.bucket)
        )
        return {
            int(bucket): ([int(count) for count in counts], float(total))
            for bucket, total, *counts in self._rows(query)
        }

    def prunable(self, source: str, *, keep: int) -> list[tuple[int, tuple[str, ...]]]:
        """Return finished captures beyond the newest, with the files they still have."""
        table = tables.captures
        query = (
            table.select()
            .where(table.c.source == source, table.c.state == STORED, table.c.files != "[]")
            .order_by(table.c.id.desc())
            .offset(keep)
        )
        return [(row.id, _files(row)) for row in self._rows(query)]

    def forget_files(self, number: int) -> None:
        """Note that the raw traces of a capture are gone."""
        table = tables.captures
        self._write(table.update().where(table.c.id == number).values(files="[]"))

    # States: something small by source and name.

    def state(self, connection: sa.Connection, source: str, name: str, kind: type[Any]) -> Any:
        """Return what was remembered; a new one where nothing was."""
        table = tables.states
        query = sa.select(table.c.data).where(table.c.source == source, table.c.name == name)
        data = connection.execute(query).scalar()
        return kind() if data is None else msgspec.json.decode(data, type=kind)

    def states(self, source: str, prefix: str, kind: type[Any]) -> dict[str, Any]:
        """Return all that is remembered under a prefix."""
        table = tables.states
        begins = table.c.name.startswith(prefix, autoescape=True)
        return {
            row.name.removeprefix(prefix): msgspec.json.decode(row.data, type=kind)
            for row in self._rows(table.select().where(table.c.source == source, begins))
        }

    def remember(self, connection: sa.Connection, source: str, name: str, state: object) -> None:
        """Remember something for the next capture."""
        key = {"source": source, "name": name}
        write_row(connection, tables.states, key, data=_encode(state))

    # Alerts, and who still has to hear of them.

    def raise_alert(  # noqa: PLR0913 (what an alert is made of)
        self,
        connection: sa.Connection,
        claim: Claim,
        kind: str,
        subject: str,
        data: Mapping[str, Any],
        *,
        now_s: float,
        targets: Sequence[str],
    ) -> int | None:
        """Raise an alert and queue it for the webhooks; None where the same one is open already."""
        table = tables.alerts
        same = sa.select(table.c.id).where(
            table.c.source == claim.source,
            table.c.kind == kind,
            table.c.subject == subject,
            table.c.acknowledged_s.is_(None),
        )
        if connection.execute(same).first() is not None:
            return None
        row = table.insert().values(
            source=claim.source,
            kind=kind,
            subject=subject,
            raised_s=now_s,
            capture_id=claim.number,
            data=_encode(data),
        )
        number = int(connection.execute(row.returning(table.c.id)).scalar_one())
        for target in targets:
            queued = tables.deliveries.insert().values(
                alert_id=number, target=target, attempts=0, next_s=now_s
            )
            connection.execute(queued)
        return number

    def alerts(self, *, most: int = 100) -> tuple[Alert, ...]:
        """Return the last alerts, the newest first."""
        table = tables.alerts
        query = table.select().order_by(table.c.id.desc()).limit(most)
        return tuple(map(_as_alert, self._rows(query)))

    def open_alerts(self) -> tuple[Alert, ...]:
        """Return all alerts that wait to be acknowledged."""
        table = tables.alerts
        query = table.select().where(table.c.acknowledged_s.is_(None)).order_by(table.c.id)
        return tuple(map(_as_alert, self._rows(query)))

    def acknowledge(
        self, number: int, *, now_s: float, follow: Callable[[sa.Connection, Alert], None]
    ) -> bool:
        """Close an alert, with what follows from it; False where there is no such open alert."""
        table = tables.alerts
        this = table.c.id == number
        with self.store.transaction() as connection:
            still_open = table.select().where(this, table.c.acknowledged_s.is_(None))
            row = connection.execute(still_open).first()
            if row is None:
                return False
            connection.execute(table.update().where(this).values(acknowledged_s=now_s))
            follow(connection, _as_alert(row))
        return True

    def due(self, *, now_s: float) -> tuple[Delivery, ...]:
        """Return what is to be sent now, the oldest first."""
        queue, alerts = tables.deliveries, tables.alerts
        query = (
            sa.select(queue.c.target, queue.c.attempts, alerts)
            .join_from(queue, alerts, queue.c.alert_id == alerts.c.id)
            .where(queue.c.delivered_s.is_(None), queue.c.next_s <= now_s)
            .order_by(queue.c.alert_id)
        )
        return tuple(
            Delivery(alert=_as_alert(row), target=row.target, attempts=row.attempts)
            for row in self._rows(query)
        )

    def delivered(self, delivery: Delivery, *, now_s: float) -> None:
        """Note that a webhook took an alert."""
        self._note_attempt(delivery, delivered_s=now_s, problem=None)

    def postpone(self, delivery: Delivery, problem: str, *, next_s: float) -> None:
        """Note that it did not, and when to try again."""
        self._note_attempt(delivery, next_s=next_s, problem=problem)

    def _note_attempt(self, delivery: Delivery, **values: object) -> None:
        table = tables.deliveries
        this = (table.c.alert_id == delivery.alert.number) & (table.c.target == delivery.target)
        self._write(table.update().where(this).values(attempts=delivery.attempts + 1, **values))

    # Triggers: which server was captured when.

    def last_trigger(self, source: str) -> float | None:
        """Return when a server was last captured, or tried."""
        table = tables.triggers
        found = self._scalar(
            sa.select(sa.func.max(table.c.began_s)).where(table.c.source == source)
        )
        return None if found is None else float(found)

    def unended_trigger(self, source: str) -> int | None:
        """Return the capture of a server that was under way when the service died."""
        table = tables.triggers
        query = sa.select(table.c.id).where(table.c.source == source, table.c.ended_s.is_(None))
        found = self._scalar(query.order_by(table.c.id.desc()))
        return None if found is None else int(found)

    def begin_trigger(self, source: str, *, now_s: float) -> int:
        """Note that a server is being captured."""
        table = tables.triggers
        row = table.insert().values(source=source, began_s=now_s)
        return int(self._scalar(row.returning(table.c.id)))

    def end_trigger(
        self, number: int, *, now_s: float, traffic: Mapping[int, float], problem: str = ""
    ) -> None:
        """Note what came of it, and the requests the server counted."""
        table = tables.triggers
        ended = table.update().where(table.c.id == number)
        self._write(ended.values(ended_s=now_s, data=_encode(traffic), problem=problem or None))

    def traffic_at(self, source: str, at_s: float) -> dict[int, float]:
        """Return what a server counted around the capture whose files are of that time."""
        table = tables.triggers
        data = self._scalar(
            sa.select(table.c.data)
            .where(table.c.source == source, table.c.began_s <= at_s, table.c.data.is_not(None))
            .order_by(table.c.id.desc())
            .limit(1)
        )
        return {} if data is None else msgspec.json.decode(data, type=dict[int, float])


def _encode(value: object) -> str:
    return msgspec.json.encode(value).decode()


def _files(row: Any) -> tuple[str, ...]:
    return msgspec.json.decode(row.files, type=tuple[str, ...])


def _as_capture(row: Any) -> CaptureRow:
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
