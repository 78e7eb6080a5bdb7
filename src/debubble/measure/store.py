"""Measurements in → a record that many processes write at once: SQLite, or a team's PostgreSQL.

A record is there once `add` has returned, whatever is killed afterwards. Tables of others than the
history stand with those who use them, in the same `metadata`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
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
from debubble.measure.measurement import Measurement, Record, identity_of
from debubble.measure.prediction import Prediction

try:
    import sqlalchemy as sa
    from sqlalchemy.dialects import postgresql, sqlite
    from sqlalchemy.exc import (
        ArgumentError,
        DBAPIError,
        InterfaceError,
        NoSuchModuleError,
        OperationalError,
    )
except ImportError as error:
    raise MissingExtra(
        "the history needs SQLAlchemy", hint="pip install 'debubble[store]'"
    ) from error

# Writers queue for the one lock; a record takes milliseconds.
_BUSY_S = 60
# A server that does not answer by then is not there.
_CONNECT_S = 10
# Any number, as long as nobody else on the server takes the same one for a lock of theirs.
_TABLES_LOCK = 0x6465627562

metadata = sa.MetaData()
measurements = sa.Table(
    "measurements",
    metadata,
    sa.Column("id", sa.Integer, primary_key=True),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("created_s", sa.Double, nullable=False),
    sa.Column("data", sa.Text, nullable=False),
    sa.Index("measurements_by_name", "name"),
)
tag_rows = sa.Table(
    "tags",
    metadata,
    sa.Column("measurement_id", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("value", sa.Text, nullable=False),
)


class Store:
    """The history behind one URL."""

    def __init__(self, url: str, *, read_only: bool = False) -> None:
        """Open a store, and make the tables it lacks; `read_only` takes one that is not ours."""
        self._engine = _connect(url)
        self.url = mask_secrets(url)
        try:
            with self.transaction() as connection:
                add_tables(connection, [measurements, tag_rows])
        except BaseException as error:
            self.close()
            if not (read_only and isinstance(error, StoreAway) and url.startswith("sqlite")):
                raise
            self._engine = _connect(url, read_only=True)

    def add(
        self, name: str, measurement: Measurement, *, now_s: float, tags: Mapping[str, str]
    ) -> int:
        """Keep a measurement; it is on the disk when this returns."""
        with self.transaction() as connection:
            return self.add_within(connection, name, measurement, now_s=now_s, tags=tags)

    def add_within(
        self,
        connection: sa.Connection,
        name: str,
        measurement: Measurement,
        *,
        now_s: float,
        tags: Mapping[str, str],
    ) -> int:
        """Keep a measurement together with whatever else the open transaction writes."""
        row = measurements.insert().values(
            name=name, created_s=now_s, data=msgspec.json.encode(measurement).decode()
        )
        number = int(connection.execute(row.returning(measurements.c.id)).scalar_one())
        for key, value in tags.items():
            write_row(connection, tag_rows, {"measurement_id": number, "name": key}, value=value)
        return number

    def records(self, name: str | None = None) -> tuple[Record, ...]:
        """Return all records, or those of one name, oldest first; refuse where one is damaged."""
        records, damaged = self.readable_records(name)
        if damaged:
            raise StoreError(
                damaged[0].message,
                hint="debubble history shows the others; history prune drops the oldest",
                file=self.url,
            )
        return records

    def readable_records(
        self, name: str | None = None
    ) -> tuple[tuple[Record, ...], tuple[Gap, ...]]:
        """Return the records that can be read, and a word on each that cannot."""
        rows = measurements.select().order_by(measurements.c.id)
        if name is not None:
            rows = rows.where(measurements.c.name == name)
        by_number: dict[int, dict[str, str]] = {}
        with self.transaction() as connection:
            for pair in connection.execute(tag_rows.select().order_by(tag_rows.c.name)):
                by_number.setdefault(pair.measurement_id, {})[pair.name] = pair.value
            stored = connection.execute(rows).all()
        records, damaged = [], []
        for row in stored:
            try:
                record = {
                    "number": row.id,
                    "name": row.name,
                    "created_s": row.created_s,
                    "measurement": msgspec.json.decode(row.data, type=Measurement),
                    "tags": by_number.get(row.id, {}),
                }
                records.append(msgspec.convert(record, type=Record))
                _ = records[-1].created
            except (msgspec.MsgspecError, ValueError, RecursionError) as error:
                why = f"record {row.id} of the history, {row.name!r}, is damaged: {error}"
                damaged.append(Gap(code=Code.DAMAGED_RECORD, message=why))
        return tuple(records), tuple(damaged)

    def predicted_of(self, measurement: Measurement) -> tuple[Prediction, ...]:
        """Return what was predicted of changes to a run, under whatever name that was kept."""
        predicted = measurements.c.data.contains('"predicted":[{', autoescape=True)
        rows = sa.select(measurements.c.data).where(predicted).order_by(measurements.c.id.desc())
        with self.transaction() as connection:
            texts = connection.scalars(rows).all()
        for text in texts:
            with suppress(msgspec.MsgspecError):
                kept = msgspec.json.decode(text, type=Measurement)
                if identity_of(kept) == identity_of(measurement):
                    return kept.predicted
        return ()

    def named(self, name: str) -> tuple[Record, ...]:
        """Return the records of a name; there is at least one."""
        records = self.records(name)
        if not records:
            raise RunNotFound(f"nothing in the history is called {name!r}", hint="debubble history")
        return records

    def prune(self, *, keep: int, name: str | None = None) -> int:
        """Drop all but the newest records of each name; return how many went."""
        rows = sa.select(measurements.c.id, measurements.c.name).order_by(measurements.c.id)
        if name is not None:
            rows = rows.where(measurements.c.name == name)
        by_name: dict[str, list[int]] = {}
        with self.transaction() as connection:
            for row in connection.execute(rows):
                by_name.setdefault(row.name, []).append(row.id)
            gone = [number for numbers in by_name.values() for number in numbers[: -keep or None]]
            for number in gone:
                connection.execute(tag_rows.delete().where(tag_rows.c.measurement_id == number))
                connection.execute(measurements.delete().where(measurements.c.id == number))
        return len(gone)

    def close(self) -> None:
        """Let go of the file, or of the server."""
        self._engine.dispose()

    @contextmanager
    def transaction(self) -> Iterator[sa.Connection]:
        """Lend a connection; all that is done with it happens, or nothing of it."""
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
            elif "readonly" in why:
                hint = "the file or its folder cannot be written; give another --store"
            away = isinstance(error, OperationalError | InterfaceError)
            kind = StoreAway if away else StoreError
            raise kind(f"{self.url}: {why}", hint=hint) from error


def add_tables(connection: sa.Connection, tables: Sequence[sa.Table]) -> None:
    """Make those that a store lacks, one process at a time: SQLite's own lock sees to that."""
    if connection.dialect.name == "postgresql":
        connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_TABLES_LOCK)))
    metadata.create_all(connection, tables=tables)


def write_row(
    connection: sa.Connection, table: sa.Table, key: Mapping[str, object], **values: object
) -> None:
    """Write a row; one of the same key is replaced."""
    insert = postgresql.insert if connection.dialect.name == "postgresql" else sqlite.insert
    row = insert(table).values(**key, **values)
    connection.execute(row.on_conflict_do_update(index_elements=[*key], set_=values))


def _connect(url: str, *, read_only: bool = False) -> sa.Engine:
    hint = "write it as sqlite:///history.db or postgresql://user@host/name"
    refusal = StoreError(f"{mask_secrets(url)!r} is no store", hint=hint)
    try:
        address = sa.engine.make_url(url)
        backend = address.get_backend_name()
        if backend == "postgresql":
            address = address.set(drivername="postgresql+psycopg")
            return sa.create_engine(address, connect_args={"connect_timeout": _CONNECT_S})
    except (ArgumentError, NoSuchModuleError, ValueError) as error:
        raise refusal from error
    except ImportError as error:
        hint = "pip install 'debubble[postgres]'"
        raise MissingExtra("a PostgreSQL history needs psycopg", hint=hint) from error
    file = address.database
    if backend != "sqlite" or not file:
        raise refusal
    if read_only:
        file = quote(str(Path(file).resolve()))
        address = sa.engine.make_url(f"sqlite:///file:{file}?mode=ro&uri=true")
    else:
        with suppress(OSError):  # it is there, or cannot be: SQLite says why
            # For its owner alone; what SQLite puts beside it follows.
            os.close(os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    waits = {"timeout": _BUSY_S, "isolation_level": None}
    engine = sa.create_engine(address, connect_args=waits)
    # A transaction that reads first and writes later could not wait for its turn.
    begin = "BEGIN" if read_only else "BEGIN IMMEDIATE"
    sa.event.listen(engine, "begin", lambda connection: connection.exec_driver_sql(begin))
    return engine


def user_file() -> Path:
    """Return the store in the user's data folder."""
    base = os.environ.get("XDG_DATA_HOME") or os.environ.get("LOCALAPPDATA")
    folder = Path(base) if base else Path.home() / ".local" / "share"
    return folder / "debubble" / "history.db"


def store_url(stated: str | None) -> str:
    """Return the store that was stated, or the user's own, whose folder is made."""
    if stated is not None:
        return stated
    file = user_file()
    file.parent.mkdir(parents=True, exist_ok=True)
    return f"sqlite:///{file}"
