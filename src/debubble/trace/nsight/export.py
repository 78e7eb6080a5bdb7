"""An Nsight Systems SQLite export in → its tables as columns, whatever version wrote them.

Only strings that are asked for are read: those of an export also hold the job's output.
"""

from __future__ import annotations

import sqlite3
from itertools import chain

import numpy as np

from debubble.errors import TraceError
from debubble.trace.columns import I64, UNKNOWN

# What SQLite gives for NULL times: no real time, and the sum of two never looks like one.
MISSING_TIME = -(2**63)
_TIMES = frozenset({"start", "end"})
_REQUIRED = _TIMES | {"globalPid"}


class Export:
    """An open export: which tables and columns it has, and their contents as arrays."""

    def __init__(self, connection: sqlite3.Connection, file: str) -> None:
        self._connection = connection
        self._file = file
        tables = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        self.columns: dict[str, frozenset[str]] = {}
        """By table."""
        for (table,) in tables.fetchall():
            quoted = str(table).replace('"', '""')
            columns = connection.execute(f'PRAGMA table_info("{quoted}")').fetchall()
            self.columns[str(table)] = frozenset(str(column[1]) for column in columns)

    def has(self, table: str, *columns: str) -> bool:
        """Tell whether the export has the table, with all these columns."""
        return table in self.columns and self.columns[table].issuperset(columns)

    def integers(self, table: str, *columns: str) -> tuple[I64, ...]:
        """Read columns as int64, in row order; what is missing or NULL is -1, or MISSING_TIME."""
        if not self.has(table):
            return (np.zeros(0, dtype=np.int64),) * len(columns)
        missing = sorted(_REQUIRED.intersection(columns) - self.columns[table])
        if missing:
            message = f"the export's table {table} has no column {missing[0]}"
            raise TraceError(message, file=self._file, hint="export it with a newer nsys")
        wanted = []
        for column in columns:
            null = str(MISSING_TIME if column in _TIMES else UNKNOWN)
            cell = f'CAST(COALESCE("{column}", {null}) AS INTEGER)'
            wanted.append(cell if column in self.columns[table] else null)
        rows = self._connection.execute(f"SELECT {', '.join(wanted)} FROM {table}")  # noqa: S608  # our own names
        values = np.fromiter(chain.from_iterable(rows), dtype=np.int64)
        return tuple(np.ascontiguousarray(part) for part in values.reshape(-1, len(columns)).T)

    def texts(self, table: str, column: str) -> list[str]:
        """Read one column as text, in row order; what is missing or NULL is empty."""
        if not self.has(table, column):
            return [""] * self.count(table)
        query = f"SELECT CAST(COALESCE({column}, '') AS TEXT) FROM {table}"  # noqa: S608  # our own names
        return [text for (text,) in self._connection.execute(query)]

    def count(self, table: str) -> int:
        """Count the rows of a table; 0 where there is none."""
        if not self.has(table):
            return 0
        # An index is shorter to count, but where it is damaged it disagrees with its table.
        query = f"SELECT COUNT(*) FROM {table} NOT INDEXED"  # noqa: S608  # our own names
        (count,) = self._connection.execute(query).fetchone()
        return int(count)

    def values(self, table: str, pattern: str, value: str = "*") -> list[str]:
        """Return values of a table of names and values, both by a pattern of SQLite's GLOB."""
        if not self.has(table, "name", "value"):
            return []
        query = f"SELECT value FROM {table} WHERE name GLOB ? AND value GLOB ?"  # noqa: S608  # our own names
        return [str(found) for (found,) in self._connection.execute(query, (pattern, value))]

    def strings(self, table: str, column: str) -> dict[int, str]:
        """Return the texts by id that a column names."""
        if not self.has(table, column):
            return {}
        asked = f"SELECT {column} FROM {table}"  # noqa: S608  # our own names
        text = "CAST(COALESCE(value, '') AS TEXT)"
        query = f"SELECT id, {text} FROM StringIds WHERE id IN ({asked})"  # noqa: S608  # the same
        return dict(self._connection.execute(query).fetchall())
