"""The lever of layers: the best split of the run as it is (`plan/split.py` looks for it)."""

from __future__ import annotations

from collections.abc import Iterator

from debubble.plan.change import Change
from debubble.plan.lever import Lever, Start
from debubble.plan.option import Idea


def ideas(start: Start) -> Iterator[Idea]:
    """Yield the best split, where it is another."""
    best = start.partition
    if best is not None and best.split != start.baseline.source.split:
        yield Idea(lever="split", change=Change(split=best.split))


def words(change: Change) -> str:
    """Name the split of a change."""
    return f"split {','.join(map(str, change.split))}" if change.split else ""


LEVER = Lever(key="split", position=30, ideas=ideas, words=words)
