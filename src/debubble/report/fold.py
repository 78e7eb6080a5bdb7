"""Many rows in → those that stand out, and one that sums up the others: an answer is one screen."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

# So many of anything are listed one by one.
FEW = 16
# Of more, those that stand out.
STANDING_OUT = 4


def farthest(values: Sequence[float | None], count: int = STANDING_OUT) -> set[int]:
    """Return the places of the values farthest from their middle."""
    known = [(place, value) for place, value in enumerate(values) if value is not None]
    if not known:
        return set()
    middle = float(np.median([value for _, value in known]))
    ranked = sorted(known, key=lambda one: (-abs(one[1] - middle), one[0]))
    return {place for place, _ in ranked[:count]}
