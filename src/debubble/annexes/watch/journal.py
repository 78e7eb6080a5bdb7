"""What the service remembers, in a store: captures, states of drift, alerts and who has them.

A capture is claimed, analysed elsewhere, and its result is stored with all that follows from it in
one transaction. A claim that was under way when the service died is found, and taken, again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec
import sqlalchemy as sa
from msgspec.structs import replace

from debubble.annexes.watch.analyse import Finding, Outcome
from debubble.annexes.watch.judge import Alert, Capture, State
from debubble.annexes.watch.log import log
from debubble.measure.store import Store, add_tables, metadata, write_row
from debubble.units import printable

_T = TypeVar("_T")

CLAIMED, STORED, FAILED = "claimed", "stored", "failed"
# Captures that are drawn, and that causes are asked of; alerts that are listed.
LOOKED_BACK = 300


def _decode(data: str, kind: type[_T]) -> _T | None:
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.MsgspecError as error:
        log("unreadable_row", level="error", problem=str(error))
        return None


class JsonColumn(sa.TypeDecorator[Any]):
    """A column of JSON, read as one type; None where another version's cannot be read."""

    impl = sa.Text
    cache_ok = True

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.kind = kind

    def process_bind_param(self, value: Any, _dialect: sa.Dialect) -> str | None:
        """Write it."""
        return None if value is None else msgspec.json.encode(value).decode()

    def process_result_value(self, value: Any, _dialect: sa.Dialect) -> Any:
        """Read it."""
        return None if value is None else _decode(value, self.kind)


captures = sa.Table(
    "watch_captures",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("pipeline", sa.Text, nullable=False),
    sa.Column("key", sa.Text, nullable=False),
    sa.Column("state", sa.Text, nullable=False),
    sa.Column("found_s", sa.Double, nullable=False),
    sa.Column("attempts", sa.Integer, nullable=False),
    sa.Column("files", JsonColumn(tuple[str, ...]), nullable=False),
    sa.Column("problem", sa.Text),
    sa.Column("finding", JsonColumn(Finding)),
    sa.Column("report", sa.Text),
    sa.Index("watch_captures_once", "pipeline", "key", unique=True),
)
states = sa.Table(
    "watch_states",
    metadata,
    sa.Column("pipeline", sa.Text, primary_key=True),
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("data", sa.Text, nullable=False),
)
alerts = sa.Table(
    "watch_alerts",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("pipeline", sa.Text, nullable=False),
    sa.Column("kind", sa.Text, nullable=False),
    sa.Column("subject", sa.Text, nullable=False),
    sa.Column("message", sa.Text, nullable=False),
    sa.Column("raised_s", sa.Double, nullable=False),
    sa.Column("capture_id", sa.Integer, nullable=False),
    sa.Column("acknowledged_s", sa.Double),
    sa.Column("data", JsonColumn(dict[str, Any]), nullable=False),
)
deliveries = sa.Table(
    "watch_deliveries",
    metadata,
    sa.Column("alert_id", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("target", sa.Text, primary_key=True),
    sa.Column("queued_s", sa.Double, nullable=False),
    sa.Column("delivered_s", sa.Double),
)
_TABLES = (captures, states, alerts, deliveries)
# All of a capture but its report, which is long.
_CAPTURE = [captures.c[name] for name in Capture.__struct_fields__]


def _read(kind: type[_T], connection: sa.Connection, query: sa.Executable) -> tuple[_T, ...]:
    """Return all rows as a type whose fields are columns."""
    return tuple(kind(**row) for row in connection.execute(query).mappings())


class Journal:
    """The service's own tables in a store; those that it lacks are made."""

    def __init__(self, store: Store) -> None:
        self.store = store
        with store.transaction() as connection:
            add_tables(connection, _TABLES)

    # Captures: each is claimed, begun, and finished or put back.

    def ended_keys(self, pipeline: str) -> frozenset[str]:
        """Return the captures of a pipeline that are not to be analysed any more."""
        ended = (captures.c.pipeline == pipeline) & (captures.c.state != CLAIMED)
        with self.store.transaction() as connection:
            return frozenset(connection.scalars(sa.select(captures.c.key).where(ended)))

    def claim(self, pipeline: str, key: str, files: Sequence[str], *, now_s: float) -> Capture:
        """Take a capture, a new one or one that was under way when a service ended."""
        same = (captures.c.pipeline == pipeline) & (captures.c.key == key)
        with self.store.transaction() as connection:
            known = _read(Capture, connection, sa.select(*_CAPTURE).where(same))
            if known:
                return known[0]
            new = captures.insert().values(
                pipeline=pipeline,
                key=key,
                state=CLAIMED,
                found_s=now_s,
                attempts=0,
                files=tuple(files),
            )
            return _read(Capture, connection, new.returning(*_CAPTURE))[0]

    def begin(self, capture: Capture) -> None:
        """Count an analysis before it begins: if the service dies of it, nobody else would."""
        self._set(capture.id, attempts=capture.attempts + 1)

    def put_back(self, capture: Capture) -> None:
        """Leave a claim to the next service as it was: this one stops, and did not die of it."""
        self._set(capture.id, attempts=capture.attempts)

    def _set(self, number: int, **values: object) -> None:
        with self.store.transaction() as connection:
            connection.execute(captures.update().where(captures.c.id == number).values(**values))

    def finish(
        self,
        capture: Capture,
        outcome: Outcome,
        *,
        now_s: float,
        judge: Callable[[State, Capture, Sequence[Capture]], tuple[State, list[Alert]]],
        targets: Sequence[str] = (),
    ) -> list[Alert] | None:
        """Store what came of a capture; return the alerts it raised, None where it was stored.

        A webhook among the targets will get each of them.
        """
        claimed = (captures.c.id == capture.id) & (captures.c.state == CLAIMED)
        finding = outcome.finding
        values = {
            "state": FAILED if finding is None else STORED,
            "problem": printable(outcome.problem) or None,
            "finding": finding,
            "report": outcome.report,
        }
        with self.store.transaction() as connection:
            result = connection.execute(captures.update().where(claimed).values(**values))
            if result.rowcount != 1:
                return None
            if finding is None or outcome.measurement is None:
                return []
            self.store.add_within(
                connection,
                capture.pipeline,
                outcome.measurement,
                now_s=capture.found_s,
                tags={"watch": capture.key},
            )
            earlier = self._captures(connection, capture.pipeline)
            state, up = judge(
                self._state(connection, capture.pipeline, State),
                replace(capture, state=STORED, finding=finding),
                [known for known in earlier if known.id != capture.id],
            )
            self._remember(connection, capture.pipeline, state)
            return [
                alert
                for alert in up
                if self._raise(connection, alert, now_s=now_s, targets=targets)
            ]

    def captures(self, pipeline: str) -> tuple[Capture, ...]:
        """Return the last captures of a pipeline, the newest first."""
        with self.store.transaction() as connection:
            return self._captures(connection, pipeline)

    def _captures(self, connection: sa.Connection, pipeline: str) -> tuple[Capture, ...]:
        query = sa.select(*_CAPTURE).where(captures.c.pipeline == pipeline)
        newest = query.order_by(captures.c.id.desc()).limit(LOOKED_BACK)
        return _read(Capture, connection, newest)

    def capture(self, number: int) -> tuple[Capture, str] | None:
        """Return one capture with its report."""
        query = sa.select(*_CAPTURE, captures.c.report).where(captures.c.id == number)
        with self.store.transaction() as connection:
            row = connection.execute(query).first()
        if row is None:
            return None
        *values, report = row
        return Capture(**dict(zip(Capture.__struct_fields__, values, strict=True))), report or ""

    def counts(self, pipeline: str) -> dict[str, int]:
        """Count the captures of a pipeline by state."""
        query = sa.select(captures.c.state, sa.func.count().label("n")).where(
            captures.c.pipeline == pipeline
        )
        with self.store.transaction() as connection:
            rows = connection.execute(query.group_by(captures.c.state))
            return {row.state: int(row.n) for row in rows}

    def retry(self, pipelines: Sequence[str], number: int | None = None) -> tuple[Capture, ...]:
        """Forget failed captures, all or one, so that they are found again; return them."""
        failed = captures.c.pipeline.in_(list(pipelines)) & (captures.c.state == FAILED)
        if number is not None:
            failed &= captures.c.id == number
        with self.store.transaction() as connection:
            return _read(Capture, connection, captures.delete().where(failed).returning(*_CAPTURE))

    def prunable(self, pipeline: str, *, keep: int) -> tuple[Capture, ...]:
        """Return stored captures beyond the newest, of those that still have their files."""
        has_files = (captures.c.state == STORED) & (captures.c.files != ())
        query = sa.select(*_CAPTURE).where(captures.c.pipeline == pipeline, has_files)
        with self.store.transaction() as connection:
            return _read(Capture, connection, query.order_by(captures.c.id.desc()).offset(keep))

    def forget_files(self, capture: Capture) -> None:
        """Note that the raw traces of a capture are gone."""
        self._set(capture.id, files=())

    # States: one of each type a pipeline.

    def state(self, pipeline: str, kind: type[_T]) -> _T:
        """Return what was remembered; a new one where nothing was."""
        with self.store.transaction() as connection:
            return self._state(connection, pipeline, kind)

    def _state(self, connection: sa.Connection, pipeline: str, kind: type[_T]) -> _T:
        this = (states.c.pipeline == pipeline) & (states.c.name == kind.__name__)
        data = connection.scalar(sa.select(states.c.data).where(this))
        return (data and _decode(data, kind)) or kind()

    def remember(self, pipeline: str, state: object) -> None:
        """Remember something of a pipeline."""
        with self.store.transaction() as connection:
            self._remember(connection, pipeline, state)

    def _remember(self, connection: sa.Connection, pipeline: str, state: object) -> None:
        key = {"pipeline": pipeline, "name": type(state).__name__}
        write_row(connection, states, key, data=msgspec.json.encode(state).decode())

    # Alerts, and who still has to hear of them.

    def _raise(
        self, connection: sa.Connection, alert: Alert, *, now_s: float, targets: Sequence[str]
    ) -> bool:
        """Store an alert, unless the same one is open; queue it for the webhooks."""
        same = sa.select(alerts.c.id).where(
            alerts.c.pipeline == alert.pipeline,
            alerts.c.kind == alert.kind,
            alerts.c.subject == alert.subject,
            alerts.c.acknowledged_s.is_(None),
        )
        if connection.execute(same).first() is not None:
            return False
        values = {name: getattr(alert, name) for name in Alert.__struct_fields__ if name != "id"}
        new = alerts.insert().values(**values).returning(alerts.c.id)
        number = connection.execute(new).scalar_one()
        for target in targets:
            queued = deliveries.insert().values(alert_id=number, target=target, queued_s=now_s)
            connection.execute(queued)
        return True

    def alerts(self) -> tuple[Alert, ...]:
        """Return the last alerts: those that are open first, then the newest first."""
        order = (alerts.c.acknowledged_s.is_not(None), alerts.c.id.desc())
        with self.store.transaction() as connection:
            return _read(Alert, connection, alerts.select().order_by(*order).limit(LOOKED_BACK))

    def acknowledge(
        self, number: int, *, now_s: float, accept: Callable[[State, Alert], State]
    ) -> bool:
        """Close an alert, and accept what it says; False where there is no such open alert."""
        is_open = (alerts.c.id == number) & alerts.c.acknowledged_s.is_(None)
        with self.store.transaction() as connection:
            closing = alerts.update().where(is_open).values(acknowledged_s=now_s)
            closed = _read(Alert, connection, closing.returning(alerts))
            if not closed:
                return False
            (alert,) = closed
            state = self._state(connection, alert.pipeline, State)
            self._remember(connection, alert.pipeline, accept(state, alert))
            return True

    def undelivered(self, target: str, *, since_s: float) -> tuple[Alert, ...]:
        """Return what a webhook has not got of the alerts since a time, the oldest first."""
        query = (
            alerts.select()
            .join(deliveries, deliveries.c.alert_id == alerts.c.id)
            .where(
                deliveries.c.target == target,
                deliveries.c.delivered_s.is_(None),
                deliveries.c.queued_s >= since_s,
            )
        )
        with self.store.transaction() as connection:
            return _read(Alert, connection, query.order_by(alerts.c.id))

    def delivered(self, alert: Alert, target: str, *, now_s: float) -> None:
        """Note that a webhook has an alert."""
        this = (deliveries.c.alert_id == alert.id) & (deliveries.c.target == target)
        with self.store.transaction() as connection:
            connection.execute(deliveries.update().where(this).values(delivered_s=now_s))
