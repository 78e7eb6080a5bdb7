"""Many rows in → those that stand out, and one that sums up the others: an answer is one screen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TypeVar

import numpy as np

from debubble.trace.run import show_ranks

# So many of anything are listed one by one.
FEW = 16
# Of more, those that stand out.
STANDING_OUT = 4

_Number = TypeVar("_Number", int, float)


def farthest(values: Sequence[float | None], count: int = STANDING_OUT) -> set[int]:
    """Return the places of the values farthest from their middle."""
    known = [(place, value) for place, value in enumerate(values) if value is not None]
    if not known:
        return set()
    middle = float(np.median([value for _, value in known]))
    ranked = sorted(known, key=lambda one: (-abs(one[1] - middle), one[0]))
    return {place for place, _ in ranked[:count]}


def show_range(values: Sequence[_Number], show: Callable[[_Number], str]) -> str:
    """Write `4.95 ms to 5.12 ms`, or one of them where both read the same."""
    least, most = show(min(values)), show(max(values))
    return least if least == most else f"{least} to {most}"


def show_members(ranks: Sequence[int]) -> str:
    """Write ranks briefly, whether they follow each other or stand apart."""
    text = show_ranks(ranks)
    if text.count(",") < 2:
        return text
    steps = {later - earlier for earlier, later in pairwise(ranks)}
    if len(steps) == 1:
        return f"{ranks[0]}-{ranks[-1]}, every {_ordinal(steps.pop())}"
    return f"{ranks[0]}-{ranks[-1]}, {len(ranks)} of them"


def _ordinal(number: int) -> str:
    ends = {1: "st", 2: "nd", 3: "rd"}
    teens = 10 <= number % 100 <= 20
    return f"{number}{'th' if teens else ends.get(number % 10, 'th')}"
