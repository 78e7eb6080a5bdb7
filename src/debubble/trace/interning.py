"""Strings in → small numbers out, so that columns hold numbers and each name is kept once."""

from __future__ import annotations


class Interner(dict[str, int]):
    """`interner[name]` is the name's number; new names get the next one."""

    def __missing__(self, name: str) -> int:
        number = self[name] = len(self)
        return number

    def strings(self) -> tuple[str, ...]:
        """Return all names, by number."""
        return tuple(self)
