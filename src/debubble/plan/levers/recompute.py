"""The lever of activations: the other way to have them, recomputed or kept."""

from __future__ import annotations

from collections.abc import Iterator

from debubble.plan.change import Change
from debubble.plan.lever import Lever, Start
from debubble.plan.option import Idea


def ideas(start: Start) -> Iterator[Idea]:
    """Yield the other way, where a run trains and its layers are known."""
    baseline = start.baseline
    if baseline.trains and baseline.source.split is not None:
        yield Idea(lever="recompute", change=Change(recompute=not baseline.ranks[0].recomputes))


def words(change: Change) -> str:
    """Say what becomes of activations."""
    if change.recompute is None:
        return ""
    return "activations recomputed" if change.recompute else "activations kept"


LEVER = Lever(key="recompute", position=60, ideas=ideas, words=words)
