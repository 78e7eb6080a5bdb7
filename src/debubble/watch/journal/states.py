"""What drift remembers from one capture to the next."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import sqlalchemy as sa

from debubble.measure import store_schema as schema
from debubble.watch.journal.room import Room

if TYPE_CHECKING:
    from sqlalchemy import Connection


class States(Room):
    """Something small by source and name."""

    def state(self, connection: Connection, source: str, name: str, kind: type[Any]) -> Any:
        """Return what was remembered; a new one where nothing was."""
        table = schema.watch_states
        query = sa.select(table.c.data).where(table.c.source == source, table.c.name == name)
        data = connection.execute(query).scalar()
        return kind() if data is None else msgspec.json.decode(data, type=kind)

    def states(self, source: str, prefix: str, kind: type[Any]) -> dict[str, Any]:
        """Return all that is remembered under a prefix."""
        table = schema.watch_states
        query = table.select().where(
            table.c.source == source, table.c.name.startswith(prefix, autoescape=True)
        )
        with self.store.transaction() as connection:
            return {
                row.name.removeprefix(prefix): msgspec.json.decode(row.data, type=kind)
                for row in connection.execute(query)
            }

    def remember(self, connection: Connection, source: str, name: str, what: object) -> None:
        """Remember something for the next capture."""
        schema.write_state(connection, source, name, msgspec.json.encode(what).decode())
