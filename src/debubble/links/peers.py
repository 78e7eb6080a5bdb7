"""What hops of one class take in → what one of them should, by the others."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence


def middle_of_others(in_order: Sequence[float], own: float | None) -> float | None:
    """Return the middle of some medians, in ascending order, without one's own if it is among them.

    Of two others the faster says what is possible. None where there are no others.
    """
    others = len(in_order) - (own is not None)
    if others < 1:
        return None
    middle = (others - 1) // 2
    stands_before = own is not None and bisect_left(in_order, own) <= middle
    return in_order[middle + stands_before]
