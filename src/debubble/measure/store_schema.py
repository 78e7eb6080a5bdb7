"""How the history is laid out, and how old stores come to be so too.

SQLAlchemy writes the words of each database. Tables of others than the history stand with those
who use them, in the same `metadata`: watch/tables.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite

from debubble.errors import StoreError

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

# Any number, as long as nobody else on the server takes the same one for a lock of theirs.
_MIGRATION_LOCK = 0x6465627562
# Counts up whenever a store as it was cannot be used as it is.
VERSION = 3


def read_version(connection: sa.Connection) -> int:
    """Return the version of the store; 0 of an empty one."""
    if not sa.inspect(connection).has_table(store_version.name):
        return 0
    found = connection.scalar(sa.select(sa.func.max(store_version.c.version))) or 0
    if not isinstance(found, int):
        raise StoreError(
            f"the version of the store is damaged: {found!r}", hint="give another --store"
        )
    return found


def bring_up_to_date(connection: sa.Connection, version: int) -> None:
    """Make the tables that a store lacks, in the transaction that is open."""
    if version < VERSION:
        metadata.create_all(connection, tables=[store_version, measurements, tags])
        connection.execute(store_version.delete())
        connection.execute(store_version.insert().values(version=VERSION))


def wait_for_turn(connection: sa.Connection) -> None:
    """Let one process at a time look at the version: SQLite's own lock does the same."""
    if connection.dialect.name == "postgresql":
        connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_MIGRATION_LOCK)))


def add_tables(connection: sa.Connection, tables: Sequence[sa.Table]) -> None:
    """Make those that a store lacks: whoever keeps more than measurements brings its own tables."""
    wait_for_turn(connection)
    metadata.create_all(connection, tables=tables)


def write_row(
    connection: sa.Connection, table: sa.Table, key: Mapping[str, object], **values: object
) -> None:
    """Write a row; one of the same key is replaced."""
    insert = postgresql.insert if connection.dialect.name == "postgresql" else sqlite.insert
    row = insert(table).values(**key, **values)
    connection.execute(row.on_conflict_do_update(index_elements=[*key], set_=values))


def write_tags(connection: sa.Connection, number: int, pairs: Mapping[str, str]) -> None:
    """Add tags to a measurement; those of the same name are replaced."""
    for name, value in pairs.items():
        write_row(connection, tags, {"measurement_id": number, "name": name}, value=value)
