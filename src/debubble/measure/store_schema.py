"""How the history is laid out, and the steps that lead there: old stores take those they lack.

The only module that names tables and columns. SQLAlchemy writes the words of each database.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

metadata = sa.MetaData()
store_version = sa.Table(
    "store_version", metadata, sa.Column("version", sa.Integer, nullable=False)
)
measurements = sa.Table(
    "measurements",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("created_s", sa.Double, nullable=False),
    sa.Column("data", sa.Text, nullable=False),
    sa.Index("measurements_by_name", "name"),
)
tags = sa.Table(
    "tags",
    metadata,
    sa.Column("measurement_id", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("value", sa.Text, nullable=False),
)

watch_captures = sa.Table(
    "watch_captures",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("source", sa.Text, nullable=False),
    sa.Column("key", sa.Text, nullable=False),
    sa.Column("state", sa.Text, nullable=False),
    sa.Column("found_s", sa.Double, nullable=False),
    sa.Column("finished_s", sa.Double),
    sa.Column("attempts", sa.Integer, nullable=False),
    sa.Column("files", sa.Text, nullable=False),
    sa.Column("measurement_id", sa.Integer),
    sa.Column("data", sa.Text),
    sa.Column("problem", sa.Text),
    sa.Index("watch_captures_once", "source", "key", unique=True),
    sa.Index("watch_captures_by_state", "state"),
)
watch_points = sa.Table(
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
watch_states = sa.Table(
    "watch_states",
    metadata,
    sa.Column("source", sa.Text, primary_key=True),
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("data", sa.Text, nullable=False),
)
watch_triggers = sa.Table(
    "watch_triggers",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("source", sa.Text, nullable=False),
    sa.Column("began_s", sa.Double, nullable=False),
    sa.Column("ended_s", sa.Double),
    sa.Column("data", sa.Text),
    sa.Column("problem", sa.Text),
    sa.Index("watch_triggers_by_source", "source", "began_s"),
)
watch_alerts = sa.Table(
    "watch_alerts",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("source", sa.Text, nullable=False),
    sa.Column("kind", sa.Text, nullable=False),
    sa.Column("subject", sa.Text, nullable=False),
    sa.Column("raised_s", sa.Double, nullable=False),
    sa.Column("capture_id", sa.Integer, nullable=False),
    sa.Column("acknowledged_s", sa.Double),
    sa.Column("data", sa.Text, nullable=False),
    sa.Index("watch_alerts_by_source", "source", "kind", "subject"),
)
watch_deliveries = sa.Table(
    "watch_deliveries",
    metadata,
    sa.Column("alert_id", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("target", sa.Text, primary_key=True),
    sa.Column("attempts", sa.Integer, nullable=False),
    sa.Column("next_s", sa.Double, nullable=False),
    sa.Column("delivered_s", sa.Double),
    sa.Column("problem", sa.Text),
)
_WATCH = (
    watch_captures,
    watch_points,
    watch_states,
    watch_triggers,
    watch_alerts,
    watch_deliveries,
)

# Any number, as long as nobody else on the server takes the same one for a lock of theirs.
_MIGRATION_LOCK = 0x6465627562


def _first(connection: sa.Connection) -> None:
    store_version.create(connection)
    measurements.create(connection)


def _with_tags(connection: sa.Connection) -> None:
    tags.create(connection)


def _with_watch(connection: sa.Connection) -> None:
    for table in _WATCH:
        table.create(connection)


MIGRATIONS: tuple[Callable[[sa.Connection], None], ...] = (_first, _with_tags, _with_watch)
VERSION = len(MIGRATIONS)


def read_version(connection: sa.Connection) -> int:
    """Return the version of the store; 0 of an empty one."""
    if not sa.inspect(connection).has_table(store_version.name):
        return 0
    return int(connection.scalar(sa.select(sa.func.max(store_version.c.version))) or 0)


def bring_up_to_date(connection: sa.Connection, found: int) -> None:
    """Take the steps that a store lacks, in the transaction that is open."""
    if found >= VERSION:
        return
    for step in MIGRATIONS[found:]:
        step(connection)
    connection.execute(store_version.delete())
    connection.execute(store_version.insert().values(version=VERSION))


def wait_for_turn(connection: sa.Connection) -> None:
    """Let one process at a time look at the version: SQLite's own lock does the same."""
    if connection.dialect.name == "postgresql":
        connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_MIGRATION_LOCK)))


def write_state(connection: sa.Connection, source: str, name: str, data: str) -> None:
    """Remember something of a source; what was remembered before is replaced."""
    insert = postgresql.insert if connection.dialect.name == "postgresql" else sqlite.insert
    row = insert(watch_states).values(source=source, name=name, data=data)
    same = [watch_states.c.source, watch_states.c.name]
    connection.execute(row.on_conflict_do_update(index_elements=same, set_={"data": data}))


def write_tags(connection: sa.Connection, number: int, pairs: Mapping[str, str]) -> None:
    """Add tags to a measurement; those of the same name are replaced."""
    insert = postgresql.insert if connection.dialect.name == "postgresql" else sqlite.insert
    for name, value in pairs.items():
        row = insert(tags).values(measurement_id=number, name=name, value=value)
        same = [tags.c.measurement_id, tags.c.name]
        connection.execute(row.on_conflict_do_update(index_elements=same, set_={"value": value}))
