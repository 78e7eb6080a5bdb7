"""What is stored of captures in → the last ones, their figures over time, and their files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import sqlalchemy as sa

from debubble.measure import store_schema as schema
from debubble.watch.analyse import Finding
from debubble.watch.journal.claims import STORED
from debubble.watch.journal.room import Room


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


class Captures(Room):
    """What became of captures."""

    def captures(self, source: str, *, most: int) -> tuple[CaptureRow, ...]:
        """Return the last captures of a source, the newest first."""
        table = schema.watch_captures
        rows = table.select().where(table.c.source == source).order_by(table.c.id.desc())
        with self.store.transaction() as connection:
            return tuple(_as_row(row) for row in connection.execute(rows.limit(most)))

    def capture(self, source: str, number: int) -> CaptureRow | None:
        """Return one capture."""
        table = schema.watch_captures
        rows = table.select().where(table.c.source == source, table.c.id == number)
        with self.store.transaction() as connection:
            row = connection.execute(rows).first()
        return None if row is None else _as_row(row)

    def latest(self, source: str) -> CaptureRow | None:
        """Return the last capture that was understood."""
        table = schema.watch_captures
        rows = (
            table.select()
            .where(table.c.source == source, table.c.state == STORED)
            .order_by(table.c.id.desc())
            .limit(1)
        )
        with self.store.transaction() as connection:
            row = connection.execute(rows).first()
        return None if row is None else _as_row(row)

    def outcomes(self, source: str) -> dict[str, int]:
        """Count the captures of a source by what became of them."""
        table = schema.watch_captures
        query = (
            sa.select(table.c.state, sa.func.count())
            .where(table.c.source == source)
            .group_by(table.c.state)
        )
        with self.store.transaction() as connection:
            return {state: int(count) for state, count in connection.execute(query)}

    def points(self, source: str, metric: str, *, most: int) -> list[tuple[float, int, float]]:
        """Return the last values of a metric: when, which bucket, what; the oldest first."""
        table = schema.watch_points
        query = (
            sa.select(table.c.at_s, table.c.bucket, table.c.value)
            .where(table.c.source == source, table.c.metric == metric)
            .order_by(table.c.capture_id.desc())
            .limit(most)
        )
        with self.store.transaction() as connection:
            found = [(row.at_s, row.bucket, row.value) for row in connection.execute(query)]
        return found[::-1]

    def histogram(
        self, source: str, metric: str, bounds: Sequence[float]
    ) -> dict[int, tuple[list[int], float]]:
        """Count all values of a metric up to each bound and in all, with their sum, by bucket."""
        table = schema.watch_points
        below = [sa.func.sum(sa.case((table.c.value <= bound, 1), else_=0)) for bound in bounds]
        query = (
            sa.select(table.c.bucket, sa.func.sum(table.c.value), *below, sa.func.count())
            .where(table.c.source == source, table.c.metric == metric)
            .group_by(table.c.bucket)
        )
        with self.store.transaction() as connection:
            return {
                int(row[0]): ([int(count) for count in row[2:]], float(row[1]))
                for row in connection.execute(query)
            }

    def prunable(self, source: str, *, keep: int) -> list[tuple[int, tuple[str, ...]]]:
        """Return finished captures beyond the newest, with the files they still have."""
        table = schema.watch_captures
        query = (
            table.select()
            .where(table.c.source == source, table.c.state == STORED, table.c.files != "[]")
            .order_by(table.c.id.desc())
            .offset(keep)
        )
        with self.store.transaction() as connection:
            return [
                (row.id, tuple(msgspec.json.decode(row.files, type=list[str])))
                for row in connection.execute(query)
            ]

    def forget_files(self, number: int) -> None:
        """Note that the raw traces of a capture are gone."""
        table = schema.watch_captures
        with self.store.transaction() as connection:
            connection.execute(table.update().where(table.c.id == number).values(files="[]"))


def _as_row(row: Any) -> CaptureRow:
    return CaptureRow(
        number=row.id,
        source=row.source,
        key=row.key,
        state=row.state,
        found_s=row.found_s,
        finished_s=row.finished_s,
        problem=row.problem,
        finding=None if row.data is None else msgspec.json.decode(row.data, type=Finding),
    )
