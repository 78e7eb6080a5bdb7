"""What the service remembers: captures, claims, states of drift, alerts, triggers.

A capture is claimed, analysed elsewhere, and its result is stored with all that follows from it in
one transaction. A claim that was under way when the service died is taken up again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import sqlalchemy as sa

from debubble.annexes.watch import tables
from debubble.annexes.watch.analyse import Finding, Outcome
from debubble.measure.store import Store
from debubble.measure.store_schema import add_tables, wait_for_turn, write_row
from debubble.units import printable

_T = TypeVar("_T")

# A capture that was taken up so often, and the service died each time, is given up.
MOST_DEATHS = 5
CLAIMED, STORED, UNREADABLE = "claimed", "stored", "unreadable"
GIVEN_UP, AGAIN = "given_up", "again"
"""Given up, and to be taken up once more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A capture that is ours to analyse."""

    number: int
    source: str
    key: str
    files: tuple[str, ...]
    attempts: int
    found_s: float

    @property
    def deaths(self) -> int:
        """How often the service died after it had taken this up again."""
        return self.attempts - 1


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

    @property
    def captured_s(self) -> float:
        """When it was captured; when it was found where nothing tells."""
        return (self.finding and self.finding.captured_s) or self.found_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """Something that changed."""

    number: int
    source: str
    kind: str
    subject: str
    raised_s: float
    """When the capture that raised it was taken."""
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

    def _rows(self, query: sa.Executable, connection: sa.Connection | None = None) -> Sequence[Any]:
        """Return all rows, as a transaction that is open sees them, or a new one."""
        with nullcontext(connection) if connection else self.store.transaction() as opened:
            return opened.execute(query).all()

    def _read_all(self, kind: type[_T], query: sa.Executable) -> tuple[_T, ...]:
        """Return all rows as one type."""
        return tuple(_read(kind, row) for row in self._rows(query))

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
            same = sa.select(table.c.number).where(table.c.source == source, table.c.key == key)
            if connection.execute(same).first() is not None:
                return None
            row = table.insert().values(
                source=source,
                key=key,
                state=CLAIMED,
                found_s=now_s,
                attempts=1,
                files=tuple(files),
            )
            return _read(Claim, connection.execute(row.returning(table)).one())

    def unfinished(self, sources: Sequence[str], *, now_s: float) -> tuple[Claim, ...]:
        """Return the claims of a service that died, the least suspect first."""
        table, claims = tables.captures, []
        for claim in self._claims(sources, CLAIMED):
            if claim.deaths < MOST_DEATHS:
                claims.append(claim)
                continue
            why = f"the service died {claim.deaths} times while it was analysed"
            given_up = table.update().where(table.c.number == claim.number)
            self._write(given_up.values(state=GIVEN_UP, problem=why, finished_s=now_s))
        return tuple(sorted(claims, key=lambda claim: (claim.deaths, claim.number)))

    def asked_again(self, sources: Sequence[str]) -> tuple[Claim, ...]:
        """Claim what was given up and is to be taken up once more."""
        table, claims = tables.captures, self._claims(sources, AGAIN)
        for claim in claims:
            this = table.update().where(table.c.number == claim.number, table.c.state == AGAIN)
            self._write(this.values(state=CLAIMED))
        return claims

    def _claims(self, sources: Sequence[str], state: str) -> tuple[Claim, ...]:
        """Return the captures of a state, the oldest first."""
        table = tables.captures
        chosen = (table.c.state == state) & table.c.source.in_(list(sources))
        return self._read_all(Claim, table.select().where(chosen).order_by(table.c.number))

    def count_death(self, claim: Claim) -> None:
        """Count a death before it happens; `put_back` or `finish` takes it back."""
        table = tables.captures
        this = table.update().where(table.c.number == claim.number)
        self._write(this.values(attempts=claim.attempts + 1))

    def put_back(self, claim: Claim) -> None:
        """Leave a claim to the next service as it was: this one stops, and did not die of it."""
        table = tables.captures
        this = table.update().where(table.c.number == claim.number, table.c.state == CLAIMED)
        self._write(this.values(attempts=claim.attempts))

    def given_up(self, sources: Sequence[str]) -> tuple[CaptureRow, ...]:
        """Return what was given up, the oldest first."""
        table = tables.captures
        query = table.select().where(table.c.state == GIVEN_UP, table.c.source.in_(list(sources)))
        return self._read_all(CaptureRow, query.order_by(table.c.number))

    def retry(self, sources: Sequence[str], number: int | None = None) -> int:
        """Have given-up captures taken up again; one by its number, unreadable or not."""
        table = tables.captures
        which = table.c.source.in_(list(sources)) & (table.c.state == GIVEN_UP)
        if number is not None:
            ended = table.c.state.in_([GIVEN_UP, UNREADABLE])
            which = table.c.source.in_(list(sources)) & (table.c.number == number) & ended
        with self.store.transaction() as connection:
            again = table.update().where(which).values(state=AGAIN, attempts=1, problem=None)
            return int(connection.execute(again).rowcount)

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
        ended = GIVEN_UP if analysis.given_up else UNREADABLE
        this = table.update().where(table.c.number == claim.number)
        with self.store.transaction() as connection:
            still = connection.execute(
                this.where(table.c.state == CLAIMED).values(
                    state=STORED if finding else ended,
                    finished_s=now_s,
                    problem=printable(analysis.problem) or None,
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
            connection.execute(this.values(measurement_id=number, finding=finding))
            points = [
                {
                    "capture_id": claim.number,
                    "metric": metric,
                    "source": claim.source,
                    "bucket": finding.bucket,
                    "at_s": finding.captured_s or claim.found_s,
                    "value": value,
                }
                for metric, value in finding.points().items()
            ]
            if points:
                connection.execute(tables.points.insert(), points)
            follow(connection, finding)
        return True

    # Captures, and what became of them.

    def captures(self, source: str, *, most: int) -> tuple[CaptureRow, ...]:
        """Return the last captures of a source, the newest first."""
        table = tables.captures
        query = table.select().where(table.c.source == source)
        return self._read_all(CaptureRow, query.order_by(table.c.number.desc()).limit(most))

    def capture(self, source: str, number: int) -> CaptureRow | None:
        """Return one capture."""
        table = tables.captures
        query = table.select().where(table.c.source == source, table.c.number == number)
        return next(iter(self._read_all(CaptureRow, query)), None)

    def latest(self, source: str) -> CaptureRow | None:
        """Return the last capture that was understood."""
        table = tables.captures
        query = table.select().where(table.c.source == source, table.c.state == STORED)
        newest = query.order_by(table.c.number.desc()).limit(1)
        return next(iter(self._read_all(CaptureRow, newest)), None)

    def outcomes(self, source: str) -> dict[str, int]:
        """Count the captures of a source by what became of them."""
        table = tables.captures
        query = sa.select(table.c.state, sa.func.count()).where(table.c.source == source)
        return {state: int(count) for state, count in self._rows(query.group_by(table.c.state))}

    def points(
        self, source: str, *, most: int, connection: sa.Connection | None = None
    ) -> dict[str, list[tuple[float, int, float]]]:
        """Return by metric what the last captures gave: when, which bucket, what; oldest first."""
        table = tables.points
        of_source = table.c.source == source
        numbers = sa.select(table.c.capture_id).where(of_source).distinct()
        newest = numbers.order_by(table.c.capture_id.desc()).limit(most).subquery()
        query = table.select().where(of_source, table.c.capture_id.in_(sa.select(newest)))
        points: dict[str, list[tuple[float, int, float]]] = {}
        for row in self._rows(query.order_by(table.c.at_s, table.c.capture_id), connection):
            points.setdefault(row.metric, []).append((row.at_s, row.bucket, row.value))
        return points

    def prunable(self, source: str, *, keep: int) -> list[tuple[int, tuple[str, ...]]]:
        """Return finished captures beyond the newest, with the files they still have."""
        table = tables.captures
        query = (
            table.select()
            .where(table.c.source == source, table.c.state == STORED, table.c.files != ())
            .order_by(table.c.number.desc())
            .offset(keep)
        )
        return [(row.number, row.files) for row in self._rows(query) if row.files]

    def forget_files(self, number: int) -> None:
        """Note that the raw traces of a capture are gone."""
        table = tables.captures
        self._write(table.update().where(table.c.number == number).values(files=()))

    # States: something small by source and name.

    def state(self, connection: sa.Connection, source: str, name: str, kind: type[Any]) -> Any:
        """Return what was remembered; a new one where nothing was."""
        table = tables.states
        query = sa.select(table.c.data).where(table.c.source == source, table.c.name == name)
        data = connection.execute(query).scalar()
        return kind() if data is None else tables.decode(data, kind) or kind()

    def states(
        self, source: str, prefix: str, kind: type[_T], connection: sa.Connection | None = None
    ) -> dict[str, _T]:
        """Return all that is remembered under a prefix."""
        table = tables.states
        begins = table.c.name.startswith(prefix, autoescape=True)
        query = table.select().where(table.c.source == source, begins)
        states = (
            (row.name.removeprefix(prefix), tables.decode(row.data, kind))
            for row in self._rows(query, connection)
        )
        return {name: state for name, state in states if state is not None}

    def remember(self, connection: sa.Connection, source: str, name: str, state: object) -> None:
        """Remember something for the next capture."""
        key = {"source": source, "name": name}
        write_row(connection, tables.states, key, data=tables.encode(state))

    # Alerts, and who still has to hear of them.

    def raise_alert(  # noqa: PLR0913 (what an alert is made of)
        self,
        connection: sa.Connection,
        claim: Claim,
        kind: str,
        subject: str,
        data: Mapping[str, Any],
        *,
        at_s: float,
        targets: Sequence[str],
    ) -> int | None:
        """Raise an alert and queue it for the webhooks; None where the same one is open already."""
        table = tables.alerts
        same = sa.select(table.c.number).where(
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
            raised_s=at_s,
            capture=claim.number,
            data=data,
        )
        number = int(connection.execute(row.returning(table.c.number)).scalar_one())
        for target in targets:
            queued = tables.deliveries.insert().values(
                alert_id=number, target=target, attempts=0, next_s=at_s
            )
            connection.execute(queued)
        return number

    def alerts(self, *, most: int = 100) -> tuple[Alert, ...]:
        """Return the last alerts, the newest first."""
        table = tables.alerts
        query = table.select().order_by(table.c.number.desc()).limit(most)
        return self._read_all(Alert, query)

    def open_alerts(self) -> tuple[Alert, ...]:
        """Return all alerts that wait to be acknowledged."""
        table = tables.alerts
        query = table.select().where(table.c.acknowledged_s.is_(None)).order_by(table.c.number)
        return self._read_all(Alert, query)

    def acknowledge(
        self, number: int, *, now_s: float, follow: Callable[[sa.Connection, Alert], None]
    ) -> bool:
        """Close an alert, with what follows from it; False where there is no such open alert."""
        table = tables.alerts
        this = table.c.number == number
        with self.store.transaction() as connection:
            still_open = table.select().where(this, table.c.acknowledged_s.is_(None))
            row = connection.execute(still_open).first()
            if row is None:
                return False
            connection.execute(table.update().where(this).values(acknowledged_s=now_s))
            follow(connection, _read(Alert, row))
        return True

    def due(self, target: str, *, now_s: float, most_attempts: int) -> tuple[Delivery, ...]:
        """Return what a target is to get now, the oldest first; nothing after so many tries."""
        queue, alerts = tables.deliveries, tables.alerts
        query = (
            sa.select(queue.c.target, queue.c.attempts, alerts)
            .join_from(queue, alerts, queue.c.alert_id == alerts.c.number)
            .where(
                queue.c.target == target,
                queue.c.delivered_s.is_(None),
                queue.c.next_s <= now_s,
                queue.c.attempts < most_attempts,
            )
            .order_by(queue.c.alert_id)
        )
        return tuple(
            Delivery(alert=_read(Alert, row), target=row.target, attempts=row.attempts)
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
        newest = sa.select(sa.func.max(table.c.began_s)).where(table.c.source == source)
        last_s: float | None = self._scalar(newest)
        return last_s

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
        self._write(ended.values(ended_s=now_s, traffic=traffic, problem=problem or None))

    def traffic_at(self, source: str, at_s: float) -> dict[int, float]:
        """Return what a server counted around the capture whose files are of that time."""
        table = tables.triggers
        query = sa.select(table.c.traffic).where(table.c.source == source, table.c.began_s <= at_s)
        counted = query.where(table.c.traffic.is_not(None)).order_by(table.c.id.desc())
        return self._scalar(counted.limit(1)) or {}

    def check_writable(self, *, now_s: float) -> None:
        """Write something small: a store that is full, or may only be read, says so here."""
        with self.store.transaction() as connection:
            self.remember(connection, "", "written", now_s)


def _read(kind: type[_T], row: Any) -> _T:
    """Return a row as a type whose fields are columns."""
    return kind(**{name: getattr(row, name) for name in _FIELDS[kind]})


_FIELDS: dict[type[Any], tuple[str, ...]] = {
    kind: tuple(field.name for field in fields(kind)) for kind in (Claim, CaptureRow, Alert)
}
