"""Measurements in → a record that many processes write at once: SQLite, or a team's PostgreSQL.

A record is there once `add` has returned, whatever is killed afterwards.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import msgspec

from debubble.errors import (
    Code,
    Gap,
    MissingExtra,
    RunNotFound,
    StoreAway,
    StoreError,
    mask_secrets,
)
from debubble.measure.measurement import Measurement, identity_of
from debubble.measure.prediction import Prediction

if TYPE_CHECKING:
    from sqlalchemy import Connection, Engine

# Writers queue for the one lock; a record takes milliseconds.
_BUSY_S = 60
# Only the very first processes of a new file race for its journal mode.
_TRIES = 50
_PAUSE_S = 0.1
# A server that does not answer by then is not there.
_CONNECT_S = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One measurement as it was kept."""

    number: int
    name: str
    created_s: float
    """Seconds since 1970."""
    measurement: Measurement
    tags: dict[str, str]


def created_at(created_s: float) -> str:
    """Return when a record was made, in UTC."""
    return datetime.fromtimestamp(created_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class Store:
    """The history behind one URL."""

    def __init__(
        self,
        url: str,
        *,
        read_only: bool = False,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Open a store, and bring it up to date; `read_only` serves one that cannot be written."""
        self._engine = _connect(url, sleep)
        from debubble.measure import store_schema  # noqa: PLC0415 (SQLAlchemy is an extra)

        self._schema = store_schema
        self.url = mask_secrets(url)
        try:
            self._migrate()
        except StoreAway:
            self.close()
            if not read_only or self._engine.dialect.name != "sqlite":
                raise
            self._open_as_it_is(url, sleep)
        except BaseException:
            self.close()
            raise

    def _open_as_it_is(self, url: str, sleep: Callable[[float], None]) -> None:
        """Open a store that cannot be written, as a reader among others or, at last, alone.

        SQLite wants to note its readers beside the file. Where it cannot, nobody else may be
        writing: notes of a writer that are still there would be left out without a word.
        """
        notes = Path(f"{self._engine.url.database}-wal")
        alone = not (notes.exists() and notes.stat().st_size)
        for mode in ("mode=ro", "immutable=1") if alone else ("mode=ro",):
            self._engine = _connect(url, sleep, reading=mode)
            try:
                with self.transaction() as connection:
                    self._refuse_other(self._schema.read_version(connection))
            except StoreAway:
                self.close()
                if mode == "immutable=1" or not alone:
                    raise
            except BaseException:
                self.close()
                raise
            else:
                return

    def _refuse_other(self, version: int) -> None:
        self._refuse_newer(version)
        if version < self._schema.VERSION:
            raise StoreError(
                f"{self.url} is of an older debubble and must be brought up to date",
                hint="it cannot be written for that; give another --store",
            )

    def add(
        self, name: str, measurement: Measurement, *, now_s: float, tags: Mapping[str, str]
    ) -> int:
        """Keep a measurement; it is on the disk when this returns."""
        with self.transaction() as connection:
            return self.add_within(connection, name, measurement, now_s=now_s, tags=tags)

    def add_within(
        self,
        connection: Connection,
        name: str,
        measurement: Measurement,
        *,
        now_s: float,
        tags: Mapping[str, str],
    ) -> int:
        """Keep a measurement together with whatever else the open transaction writes."""
        table = self._schema.measurements
        row = table.insert().values(
            name=name, created_s=now_s, data=msgspec.json.encode(measurement).decode()
        )
        number = int(connection.execute(row.returning(table.c.id)).scalar_one())
        self._schema.write_tags(connection, number, tags)
        return number

    def records(self, name: str | None = None) -> tuple[Record, ...]:
        """Return all records, or those of one name, oldest first; refuse where one is damaged."""
        found, damaged = self.readable_records(name)
        if damaged:
            raise StoreError(
                damaged[0].message,
                hint="debubble history shows the others; history prune drops the oldest",
                file=self.url,
            )
        return found

    def readable_records(
        self, name: str | None = None
    ) -> tuple[tuple[Record, ...], tuple[Gap, ...]]:
        """Return the records that can be read, and a word on each that cannot."""
        table, tags = self._schema.measurements, self._schema.tags
        rows = table.select().order_by(table.c.id)
        pairs = tags.select().order_by(tags.c.name)
        if name is not None:
            rows = rows.where(table.c.name == name)
            pairs = pairs.join_from(tags, table, tags.c.measurement_id == table.c.id).where(
                table.c.name == name
            )
        by_number: dict[int, dict[str, str]] = {}
        with self.transaction() as connection:
            for pair in connection.execute(pairs):
                by_number.setdefault(pair.measurement_id, {})[pair.name] = pair.value
            found = connection.execute(rows).all()
        records, damaged = [], []
        for row in found:
            kept = {
                "number": row.id,
                "name": row.name,
                "created_s": row.created_s,
                "tags": by_number.get(row.id, {}),
            }
            try:
                created_at(row.created_s)
                measurement = msgspec.json.decode(row.data, type=Measurement)
                records.append(msgspec.convert({**kept, "measurement": measurement}, type=Record))
            except (msgspec.MsgspecError, ValueError, RecursionError) as error:
                why = f"record {row.id} of the history, {row.name!r}, is damaged: {error}"
                damaged.append(Gap(code=Code.DAMAGED_RECORD, message=why))
        return tuple(records), tuple(damaged)

    def predicted_of(self, measurement: Measurement) -> tuple[Prediction, ...]:
        """Return what was predicted of changes to a run, under whatever name that was kept."""
        table = self._schema.measurements
        rows = table.select().where(table.c.data.contains('"predicted":[{', autoescape=True))
        with self.transaction() as connection:
            texts = [row.data for row in connection.execute(rows.order_by(table.c.id.desc()))]
        for text in texts:
            with suppress(msgspec.MsgspecError):
                kept = msgspec.json.decode(text, type=Measurement)
                if identity_of(kept) == identity_of(measurement):
                    return kept.predicted
        return ()

    def named(self, name: str) -> tuple[Record, ...]:
        """Return the records of a name; there is at least one."""
        found = self.records(name)
        if not found:
            raise RunNotFound(f"nothing in the history is called {name!r}", hint="debubble history")
        return found

    def tag(self, name: str, tags: Mapping[str, str]) -> int:
        """Tag all records of a name; return how many."""
        found = self.named(name)
        with self.transaction() as connection:
            for record in found:
                self._schema.write_tags(connection, record.number, tags)
        return len(found)

    def prune(self, *, keep: int, name: str | None = None) -> int:
        """Drop all but the newest records of each name; return how many went."""
        table, tags = self._schema.measurements, self._schema.tags
        rows = table.select().with_only_columns(table.c.id, table.c.name).order_by(table.c.id)
        if name is not None:
            rows = rows.where(table.c.name == name)
        by_name: dict[str, list[int]] = {}
        with self.transaction() as connection:
            for row in connection.execute(rows):
                by_name.setdefault(row.name, []).append(row.id)
            gone = [number for numbers in by_name.values() for number in numbers[: -keep or None]]
            for number in gone:
                connection.execute(tags.delete().where(tags.c.measurement_id == number))
                connection.execute(table.delete().where(table.c.id == number))
        return len(gone)

    def _migrate(self) -> None:
        """Bring an older store up to date; leave a newer one alone."""
        with self.transaction() as connection:
            self._schema.wait_for_turn(connection)
            found = self._schema.read_version(connection)
            self._refuse_newer(found)
            self._schema.bring_up_to_date(connection, found)

    def _refuse_newer(self, found: int) -> None:
        if found > self._schema.VERSION:
            raise StoreError(
                f"{self.url} was written by a newer debubble (version {found} of the store, "
                f"this one knows {self._schema.VERSION})",
                hint="pip install --upgrade debubble, or give another --store",
            )

    def close(self) -> None:
        """Let go of the file, or of the server."""
        self._engine.dispose()

    @contextmanager
    def transaction(self) -> Iterator[Connection]:
        """Lend a connection; all that is done with it happens, or nothing of it."""
        from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError  # noqa: PLC0415

        try:
            with self._engine.begin() as connection:
                yield connection
        except DBAPIError as error:
            why = " ".join(str(error.orig).split())
            hint = "is the path right, and is it a debubble history? give another --store"
            if self.url.startswith("postgresql"):
                hint = (
                    "is the server up, and may you write to this database? or give another --store"
                )
            elif "readonly" in why or "read-only" in why:
                hint = "the file or its folder cannot be written; give another --store"
            away = isinstance(error, OperationalError | InterfaceError)
            kind = StoreAway if away else StoreError
            raise kind(f"{self.url}: {why}", hint=hint) from error


def _connect(url: str, sleep: Callable[[float], None], reading: str = "") -> Engine:
    try:
        import sqlalchemy  # noqa: PLC0415 (an extra)
        from sqlalchemy.exc import ArgumentError, NoSuchModuleError  # noqa: PLC0415
    except ImportError as error:
        raise MissingExtra(
            "the history needs SQLAlchemy", hint="pip install 'debubble[store]'"
        ) from error
    try:
        address = sqlalchemy.engine.make_url(url)
        backend = address.get_backend_name()
        if address.drivername == "postgresql":
            address = address.set(drivername="postgresql+psycopg")
        if backend == "postgresql":
            waits = {"connect_timeout": _CONNECT_S}
            return sqlalchemy.create_engine(address, connect_args=waits)
    except (ArgumentError, NoSuchModuleError, ValueError) as error:
        raise _no_store(url) from error
    except ImportError as error:
        hint = "pip install 'debubble[postgres]'"
        raise MissingExtra("a PostgreSQL history needs psycopg", hint=hint) from error
    if backend != "sqlite":
        raise _no_store(url)
    reading = reading or ("mode=ro" if "mode=ro" in url else "")
    if reading and address.database and not address.database.startswith("file:"):
        place = quote(str(Path(address.database).resolve()))
        address = sqlalchemy.engine.make_url(f"sqlite:///file:{place}?{reading}&uri=true")
    if address.database and not reading:
        _make_private(address.database)
    engine = sqlalchemy.create_engine(address, connect_args={"timeout": _BUSY_S})
    # A transaction that reads first and writes later could not wait for its turn.
    begin = "BEGIN" if reading else "BEGIN IMMEDIATE"
    if reading:
        sqlalchemy.event.listen(engine, "connect", lambda raw, _: _prepare_to_read(raw))
    else:
        sqlalchemy.event.listen(engine, "connect", lambda raw, _: _prepare(raw, sleep))
    sqlalchemy.event.listen(engine, "begin", lambda connection: connection.exec_driver_sql(begin))
    return engine


def _make_private(file: str) -> None:
    """Make a file that is not there yet for its owner alone; what SQLite puts beside it follows."""
    if file != ":memory:" and not file.startswith("file:"):
        with suppress(OSError):  # it is there, or cannot be: SQLite says why
            os.close(os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))


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


def _prepare_to_read(raw: Any) -> None:
    raw.isolation_level = None


def _no_store(url: str) -> StoreError:
    hint = "write it as sqlite:///history.db or postgresql://user@host/name"
    return StoreError(f"{mask_secrets(url)!r} is no store", hint=hint)


def default_url(environment: Mapping[str, str], home: Path) -> str:
    """Return the store in the user's data folder."""
    base = environment.get("XDG_DATA_HOME") or environment.get("LOCALAPPDATA")
    folder = (Path(base) if base else home / ".local" / "share") / "debubble"
    return f"sqlite:///{folder / 'history.db'}"


def store_url(stated: str | None) -> str:
    """Return the store that was stated, or the user's own, whose folder is made."""
    if stated is not None:
        return stated
    url = default_url(os.environ, Path.home())
    Path(url.removeprefix("sqlite:///")).parent.mkdir(parents=True, exist_ok=True)
    return url
