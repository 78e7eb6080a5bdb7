"""The service's own tables in the store, beside those of the history."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
import sqlalchemy as sa

from debubble.annexes.watch.analyse import Finding
from debubble.annexes.watch.supervise import log
from debubble.measure.store_schema import metadata

_T = TypeVar("_T")


def encode(value: object) -> str:
    """Write a value as a row holds it."""
    return msgspec.json.encode(value).decode()


def decode(data: str, kind: type[_T]) -> _T | None:
    """Read what a row holds; what another version wrote and this one cannot read is said."""
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.MsgspecError as error:
        log("unreadable_row", level="error", problem=f"{getattr(kind, '__name__', kind)}: {error}")
        return None


class Packed(sa.TypeDecorator[Any]):
    """A column of JSON, read as one type."""

    impl = sa.Text
    cache_ok = True

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.kind = kind

    def process_bind_param(self, value: Any, _dialect: sa.Dialect) -> str | None:
        """Write it."""
        return None if value is None else encode(value)

    def process_result_value(self, value: Any, _dialect: sa.Dialect) -> Any:
        """Read it; None where it cannot be."""
        return None if value is None else decode(value, self.kind)


captures = sa.Table(
    "watch_captures",
    metadata,
    sa.Column("id", sa.Integer, key="number", primary_key=True),
    sa.Column("source", sa.Text, nullable=False),
    sa.Column("key", sa.Text, nullable=False),
    sa.Column("state", sa.Text, nullable=False),
    sa.Column("found_s", sa.Double, nullable=False),
    sa.Column("finished_s", sa.Double),
    sa.Column("attempts", sa.Integer, nullable=False),
    sa.Column("files", Packed(tuple[str, ...]), nullable=False),
    sa.Column("measurement_id", sa.Integer),
    sa.Column("data", Packed(Finding), key="finding"),
    sa.Column("problem", sa.Text),
    sa.Index("watch_captures_once", "source", "key", unique=True),
    sa.Index("watch_captures_by_state", "state"),
)
points = sa.Table(
    "watch_points",
    metadata,
    sa.Column("capture_id", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("metric", sa.Text, primary_key=True),
    sa.Column("source", sa.Text, nullable=False),
    sa.Column("bucket", sa.Integer, nullable=False),
    sa.Column("at_s", sa.Double, nullable=False),
    sa.Column("value", sa.Double, nullable=False),
    sa.Index("watch_points_by_source", "source", "metric", "capture_id"),
)
states = sa.Table(
    "watch_states",
    metadata,
    sa.Column("source", sa.Text, primary_key=True),
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("data", sa.Text, nullable=False),
)
triggers = sa.Table(
    "watch_triggers",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("source", sa.Text, nullable=False),
    sa.Column("began_s", sa.Double, nullable=False),
    sa.Column("ended_s", sa.Double),
    sa.Column("data", Packed(dict[int, float]), key="traffic"),
    sa.Column("problem", sa.Text),
    sa.Index("watch_triggers_by_source", "source", "began_s"),
)
alerts = sa.Table(
    "watch_alerts",
    metadata,
    sa.Column("id", sa.Integer, key="number", primary_key=True),
    sa.Column("source", sa.Text, nullable=False),
    sa.Column("kind", sa.Text, nullable=False),
    sa.Column("subject", sa.Text, nullable=False),
    sa.Column("raised_s", sa.Double, nullable=False),
    sa.Column("capture_id", sa.Integer, key="capture", nullable=False),
    sa.Column("acknowledged_s", sa.Double),
    sa.Column("data", Packed(dict[str, Any]), nullable=False),
    sa.Index("watch_alerts_by_source", "source", "kind", "subject"),
)
deliveries = sa.Table(
    "watch_deliveries",
    metadata,
    sa.Column("alert_id", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("target", sa.Text, primary_key=True),
    sa.Column("attempts", sa.Integer, nullable=False),
    sa.Column("next_s", sa.Double, nullable=False),
    sa.Column("delivered_s", sa.Double),
    sa.Column("problem", sa.Text),
)
ALL = (captures, points, states, triggers, alerts, deliveries)
