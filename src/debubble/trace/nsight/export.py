"""An Nsight Systems SQLite export, opened: its tables as arrays, its strings by id.

Only strings that are asked for are read: those of an export also hold the job's output.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Final

import numpy as np

from debubble.errors import TraceError
from debubble.trace.columns import I32, I64, UNKNOWN

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Iterable

STRINGS: Final = "StringIds"

# What SQLite gives for NULL times: no real time, and the sum of two never looks like one.
MISSING_TIME: Final = -(2**63)
# SQLite before 3.32 takes no more than 999 parameters in one statement.
_IDS_PER_QUERY: Final = 500


class Export:
    """An open export: which tables and columns it has, and their contents as arrays."""

    def __init__(self, connection: sqlite3.Connection, file: str) -> None:
        self._connection = connection
        self._file = file
        tables = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        self._columns = {
            str(table): frozenset(str(row[1]) for row in self._table_info(str(table)))
            for (table,) in tables.fetchall()
        }

    def has(self, table: str, *columns: str) -> bool:
        """Tell whether the export has the table, with all these columns."""
        return self._columns.get(table, frozenset()).issuperset(columns) and table in self._columns

    @property
    def tables(self) -> frozenset[str]:
        """The names of all tables."""
        return frozenset(self._columns)

    def integers(self, table: str, *columns: str) -> tuple[I64, ...]:
        """Read columns as int64, in row order; what is missing or NULL is -1, or MISSING_TIME."""
        asked = ", ".join(self._integer(table, column) for column in columns)
        values = np.fromiter(
            chain.from_iterable(self._connection.execute(f"SELECT {asked} FROM {table}")),  # noqa: S608  # our own names
            dtype=np.int64,
        )
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

    def rows(self, query: str, *values: object) -> list[tuple[object, ...]]:
        """Return the rows of a small query."""
        return self._connection.execute(query, values).fetchall()

    def strings(self, ids: Iterable[int]) -> dict[int, str]:
        """Look up the names of ids."""
        wanted = [int(identity) for identity in ids]
        found: dict[int, str] = {}
        for first in range(0, len(wanted), _IDS_PER_QUERY):
            part = wanted[first : first + _IDS_PER_QUERY]
            marks = ", ".join("?" * len(part))
            text = "CAST(COALESCE(value, '') AS TEXT)"
            query = f"SELECT id, {text} FROM {STRINGS} WHERE id IN ({marks})"  # noqa: S608  # our own names
            found.update(self._connection.execute(query, part).fetchall())
        return found

    def _integer(self, table: str, column: str) -> str:
        missing = str(MISSING_TIME) if column in {"start", "end"} else str(UNKNOWN)
        if column not in self._columns[table]:
            if column in {"start", "end"}:
                message = f"the export's table {table} has no column {column}"
                raise TraceError(message, file=self._file, hint="export it with a newer nsys")
            return missing
        return f'CAST(COALESCE("{column}", {missing}) AS INTEGER)'

    def _table_info(self, table: str) -> list[tuple[object, ...]]:
        quoted = table.replace('"', '""')
        return self._connection.execute(f'PRAGMA table_info("{quoted}")').fetchall()


class Names:
    """Names, each kept once; rows refer to them by index."""

    def __init__(self) -> None:
        self._index: dict[str, int] = {}

    def add(self, name: str) -> int:
        """Return the index of a name."""
        return self._index.setdefault(name, len(self._index))

    def look_up(self, ids: I64, export: Export) -> I32:
        """Return the indices of the names of Nsight's string ids."""
        unique, inverse = np.unique(ids, return_inverse=True)
        found = export.strings(unique.tolist())
        indices = [self.add(found.get(identity, "")) for identity in unique.tolist()]
        return np.array(indices, dtype=np.int32)[inverse.reshape(-1)]

    def all(self) -> tuple[str, ...]:
        """Return all names in the order of their indices."""
        return tuple(self._index)
