"""Captures in → claims, and what came of each, stored once with all that follows from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
import sqlalchemy as sa

from debubble.measure import store_schema as schema
from debubble.watch.analyse import Analysis, Finding
from debubble.watch.journal.room import Room

if TYPE_CHECKING:
    from sqlalchemy import Connection

# A capture that took the service or a worker down so often is not tried again.
MOST_ATTEMPTS = 3
CLAIMED, STORED, UNREADABLE = "claimed", "stored", "unreadable"


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A capture that is ours to analyse."""

    number: int
    source: str
    key: str
    files: tuple[str, ...]
    attempts: int
    found_s: float


class Claims(Room):
    """Who has which capture."""

    def known_keys(self, source: str) -> frozenset[str]:
        """Return the captures of a source that were ever claimed."""
        table = schema.watch_captures
        with self.store.transaction() as connection:
            rows = connection.execute(sa.select(table.c.key).where(table.c.source == source))
            return frozenset(row.key for row in rows)

    def claim(self, source: str, key: str, files: Sequence[str], *, now_s: float) -> Claim | None:
        """Take a capture; None where somebody has it."""
        table = schema.watch_captures
        with self.store.transaction() as connection:
            schema.wait_for_turn(connection)
            same = sa.select(table.c.id).where(table.c.source == source, table.c.key == key)
            if connection.execute(same).first() is not None:
                return None
            row = table.insert().values(
                source=source,
                key=key,
                state=CLAIMED,
                found_s=now_s,
                attempts=1,
                files=msgspec.json.encode(tuple(files)).decode(),
            )
            number = int(connection.execute(row.returning(table.c.id)).scalar_one())
        return Claim(
            number=number, source=source, key=key, files=tuple(files), attempts=1, found_s=now_s
        )

    def unfinished(self, sources: Sequence[str], *, now_s: float) -> tuple[Claim, ...]:
        """Take up the claims of a service that died; what died too often is given up."""
        table = schema.watch_captures
        claims = []
        with self.store.transaction() as connection:
            mine = table.c.source.in_(list(sources))
            found = table.select().where(table.c.state == CLAIMED, mine).order_by(table.c.id)
            for row in connection.execute(found).all():
                attempts = row.attempts + 1
                this = table.update().where(table.c.id == row.id)
                if attempts > MOST_ATTEMPTS:
                    why = f"the analysis died {row.attempts} times"
                    connection.execute(this.values(state=UNREADABLE, problem=why, finished_s=now_s))
                    continue
                connection.execute(this.values(attempts=attempts))
                claims.append(
                    Claim(
                        number=row.id,
                        source=row.source,
                        key=row.key,
                        files=tuple(msgspec.json.decode(row.files, type=list[str])),
                        attempts=attempts,
                        found_s=row.found_s,
                    )
                )
        return tuple(claims)

    def finish(
        self,
        claim: Claim,
        analysis: Analysis,
        *,
        now_s: float,
        follow: Callable[[Connection, Finding], None],
    ) -> bool:
        """Store what came of a capture, with what follows from it; False where it was stored."""
        table = schema.watch_captures
        with self.store.transaction() as connection:
            still = connection.execute(
                table.update()
                .where(table.c.id == claim.number, table.c.state == CLAIMED)
                .values(
                    state=STORED if analysis.finding else UNREADABLE,
                    finished_s=now_s,
                    problem=analysis.problem or None,
                )
            )
            if still.rowcount != 1:
                return False
            if analysis.finding is None or analysis.measurement is None:
                return True
            number = self.store.add_within(
                connection,
                claim.source,
                analysis.measurement,
                now_s=claim.found_s,
                tags={"watch": claim.key},
            )
            connection.execute(
                table.update()
                .where(table.c.id == claim.number)
                .values(
                    measurement_id=number,
                    data=msgspec.json.encode(analysis.finding).decode(),
                )
            )
            for metric, value in analysis.finding.metrics.items():
                connection.execute(
                    schema.watch_points.insert().values(
                        capture_id=claim.number,
                        metric=metric,
                        source=claim.source,
                        bucket=analysis.finding.bucket,
                        at_s=claim.found_s,
                        value=value,
                    )
                )
            follow(connection, analysis.finding)
        return True
