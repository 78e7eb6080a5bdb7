"""Measurements in → a record that many processes write at once: SQLite, or a team's PostgreSQL.

A record is there once `add` has returned, whatever is killed afterwards.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from debubble.errors import MissingExtra, RunNotFound, StoreError
from debubble.measure.measurement import Measurement
from debubble.measure.store_schema import MIGRATIONS, VERSION

if TYPE_CHECKING:
    from sqlalchemy import Connection, Engine

# Writers queue for the one lock; a record takes milliseconds.
_BUSY_S = 60
# Only the very first processes of a new file race for its journal mode.
_TRIES = 50
_PAUSE_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One measurement as it was kept."""

    number: int
    name: str
    created_s: float
    """Seconds since 1970."""
    measurement: Measurement
    tags: dict[str, str]


class Store:
    """The history behind one URL."""

    def __init__(self, url: str, *, sleep: Callable[[float], None] = time.sleep) -> None:
        self.url = url
        self._engine = _connect(url, sleep)
        with self._transaction() as connection:
            self._migrate(connection)

    def add(
        self, name: str, measurement: Measurement, *, now_s: float, tags: Mapping[str, str]
    ) -> int:
        """Keep a measurement; it is on the disk when this returns."""
        data = msgspec.json.encode(measurement).decode()
        with self._transaction() as connection:
            number = int(
                _run(
                    connection,
                    "INSERT INTO measurements (name, created_s, data) "
                    "VALUES (:name, :created_s, :data) RETURNING id",
                    name=name,
                    created_s=now_s,
                    data=data,
                ).scalar_one()
            )
            _write_tags(connection, number, tags)
        return number

    def records(self, name: str | None = None) -> tuple[Record, ...]:
        """Return all records, or those of one name, oldest first."""
        chosen = "" if name is None else " WHERE name = :name"
        given = {} if name is None else {"name": name}
        with self._transaction() as connection:
            tags: dict[int, dict[str, str]] = {}
            for number, key, value in _run(
                connection, "SELECT measurement_id, name, value FROM tags ORDER BY name"
            ):
                tags.setdefault(number, {})[key] = value
            rows = _run(
                connection,
                f"SELECT id, name, created_s, data FROM measurements{chosen} ORDER BY id",  # noqa: S608 (our own words)
                **given,
            ).all()
        return tuple(
            Record(
                number=row[0],
                name=row[1],
                created_s=row[2],
                measurement=msgspec.json.decode(row[3], type=Measurement),
                tags=tags.get(row[0], {}),
            )
            for row in rows
        )

    def named(self, name: str) -> tuple[Record, ...]:
        """Return the records of a name; there is at least one."""
        found = self.records(name)
        if not found:
            raise RunNotFound(
                f"nothing in the history is called {name!r}", hint="debubble history list"
            )
        return found

    def tag(self, name: str, tags: Mapping[str, str]) -> int:
        """Tag all records of a name; return how many."""
        found = self.named(name)
        with self._transaction() as connection:
            for record in found:
                _write_tags(connection, record.number, tags)
        return len(found)

    def prune(self, *, keep: int, name: str | None = None) -> int:
        """Drop all but the newest records of each name; return how many went."""
        by_name: dict[str, list[int]] = {}
        for record in self.records(name):
            by_name.setdefault(record.name, []).append(record.number)
        gone = [number for numbers in by_name.values() for number in numbers[: -keep or None]]
        with self._transaction() as connection:
            for number in gone:
                _run(connection, "DELETE FROM tags WHERE measurement_id = :id", id=number)
                _run(connection, "DELETE FROM measurements WHERE id = :id", id=number)
        return len(gone)

    def close(self) -> None:
        """Let go of the file."""
        self._engine.dispose()

    def _migrate(self, connection: Connection) -> None:
        """Bring an older store up to date, one step after another; leave a newer one alone."""
        found = _version(connection)
        if found > VERSION:
            raise StoreError(
                f"{self.url} was written by a newer debubble (version {found} of the store, "
                f"this one knows {VERSION})",
                hint="pip install --upgrade debubble, or give another --store",
            )
        serial = "SERIAL" if connection.dialect.name == "postgresql" else "INTEGER"
        for step in MIGRATIONS[found:]:
            for statement in step:
                _run(connection, statement.replace("{key}", f"{serial} PRIMARY KEY"))
        if found < VERSION:
            _run(connection, "DELETE FROM store_version")
            _run(connection, "INSERT INTO store_version VALUES (:version)", version=VERSION)

    @contextmanager
    def _transaction(self) -> Iterator[Connection]:
        from sqlalchemy.exc import DBAPIError  # noqa: PLC0415

        try:
            with self._engine.begin() as connection:
                yield connection
        except DBAPIError as error:
            raise _explained(self.url, str(error.orig)) from error


def _connect(url: str, sleep: Callable[[float], None]) -> Engine:
    try:
        import sqlalchemy  # noqa: PLC0415 (an extra)
        from sqlalchemy.exc import ArgumentError, NoSuchModuleError  # noqa: PLC0415
    except ImportError as error:
        raise MissingExtra(
            "the history needs SQLAlchemy", hint="pip install 'debubble[store]'"
        ) from error
    try:
        address = sqlalchemy.engine.make_url(url)
        if address.drivername == "postgresql":
            address = address.set(drivername="postgresql+psycopg")
        if address.get_backend_name() != "sqlite":
            return sqlalchemy.create_engine(address)
    except (ArgumentError, NoSuchModuleError) as error:
        hint = "write it as sqlite:///history.db or postgresql://user@host/name"
        raise StoreError(f"{url!r} is no store", hint=hint) from error
    except ImportError as error:
        hint = "pip install 'debubble[postgres]'"
        raise MissingExtra("a PostgreSQL history needs psycopg", hint=hint) from error
    engine = sqlalchemy.create_engine(address, connect_args={"timeout": _BUSY_S})
    sqlalchemy.event.listen(engine, "connect", lambda raw, _: _prepare(raw, sleep))
    # A transaction that reads first and writes later could not wait for its turn.
    sqlalchemy.event.listen(engine, "begin", lambda one: one.exec_driver_sql(_begin(url)))
    return engine


def _begin(url: str) -> str:
    return "BEGIN" if "mode=ro" in url else "BEGIN IMMEDIATE"


def _prepare(raw: Any, sleep: Callable[[float], None]) -> None:
    """Set a connection to SQLite up: a log of writes that readers do not wait for, kept safe."""
    raw.isolation_level = None
    cursor = raw.cursor()
    cursor.execute("PRAGMA synchronous=FULL")
    for left in reversed(range(_TRIES)):
        try:
            if cursor.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
                cursor.execute("PRAGMA journal_mode=WAL")
            break
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or not left:
                raise
            sleep(_PAUSE_S)
    cursor.close()


def _version(connection: Connection) -> int:
    import sqlalchemy  # noqa: PLC0415

    if not sqlalchemy.inspect(connection).has_table("store_version"):
        return 0
    return int(_run(connection, "SELECT MAX(version) FROM store_version").scalar_one() or 0)


def _write_tags(connection: Connection, number: int, tags: Mapping[str, str]) -> None:
    for key, value in tags.items():
        given = {"id": number, "key": key, "value": value}
        _run(connection, "DELETE FROM tags WHERE measurement_id = :id AND name = :key", **given)
        _run(connection, "INSERT INTO tags VALUES (:id, :key, :value)", **given)


def _run(connection: Connection, statement: str, **given: object) -> Any:
    from sqlalchemy import text  # noqa: PLC0415

    wanted = {key: value for key, value in given.items() if f":{key}" in statement}
    return connection.execute(text(statement), wanted)


def _explained(url: str, why: str) -> StoreError:
    hint = "is the path right, and is it a debubble history? give another --store"
    if "readonly" in why or "read-only" in why:
        hint = "the file or its folder cannot be written; give another --store"
    return StoreError(f"{url}: {why}", hint=hint)


def default_url(environment: Mapping[str, str], home: Path) -> str:
    """Return the store in the user's data folder."""
    base = environment.get("XDG_DATA_HOME") or environment.get("LOCALAPPDATA")
    folder = (Path(base) if base else home / ".local" / "share") / "debubble"
    return f"sqlite:///{folder / 'history.db'}"
