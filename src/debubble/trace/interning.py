"""Names in → small numbers out, so that columns hold numbers and each name is kept once."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TypeVar

Name = TypeVar("Name", bound=Hashable)


class Interner(dict[Name, int]):
    """`interner[name]` is the name's number; new names get the next one."""

    def __missing__(self, name: Name) -> int:
        number = self[name] = len(self)
        return number

    def all(self) -> tuple[Name, ...]:
        """Return all names, by number."""
        return tuple(self)
