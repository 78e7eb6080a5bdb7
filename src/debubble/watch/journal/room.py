"""A store in → a part of the journal that keeps to its own tables."""

from __future__ import annotations

from debubble.measure.store import Store


class Room:
    """What all parts have: the store that they share."""

    def __init__(self, store: Store) -> None:
        self.store = store
