"""Captures of servers in → when each was taken, and the traffic meanwhile."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import sqlalchemy as sa

from debubble.measure import store_schema as schema
from debubble.watch.journal.room import Room


class Triggers(Room):
    """Which server was captured when."""

    def last_trigger(self, source: str) -> float | None:
        """Return when a server was last captured, or tried."""
        table = schema.watch_triggers
        query = sa.select(sa.func.max(table.c.began_s)).where(table.c.source == source)
        with self.store.transaction() as connection:
            found = connection.execute(query).scalar()
        return None if found is None else float(found)

    def unended_trigger(self, source: str) -> int | None:
        """Return the capture of a server that was under way when the service died."""
        table = schema.watch_triggers
        query = sa.select(table.c.id).where(table.c.source == source, table.c.ended_s.is_(None))
        with self.store.transaction() as connection:
            found = connection.execute(query.order_by(table.c.id.desc())).scalar()
        return None if found is None else int(found)

    def begin_trigger(self, source: str, *, now_s: float) -> int:
        """Note that a server is being captured."""
        table = schema.watch_triggers
        row = table.insert().values(source=source, began_s=now_s).returning(table.c.id)
        with self.store.transaction() as connection:
            return int(connection.execute(row).scalar_one())

    def end_trigger(
        self, number: int, *, now_s: float, traffic: Mapping[int, float], problem: str = ""
    ) -> None:
        """Note what came of it, and the requests the server counted."""
        table = schema.watch_triggers
        values = {
            "ended_s": now_s,
            "data": msgspec.json.encode(traffic).decode(),
            "problem": problem or None,
        }
        with self.store.transaction() as connection:
            connection.execute(table.update().where(table.c.id == number).values(**values))

    def traffic_at(self, source: str, at_s: float) -> dict[int, float]:
        """Return what a server counted around the capture whose files are of that time."""
        table = schema.watch_triggers
        query = (
            sa.select(table.c.data)
            .where(table.c.source == source, table.c.began_s <= at_s, table.c.data.is_not(None))
            .order_by(table.c.id.desc())
            .limit(1)
        )
        with self.store.transaction() as connection:
            data = connection.execute(query).scalar()
        return {} if data is None else msgspec.json.decode(data, type=dict[int, float])
