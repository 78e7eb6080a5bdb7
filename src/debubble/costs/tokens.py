"""What passes took with one number of tokens in → what they would take with another.

Of one run: passes grow as tokens do, but adding to gradients that are there does not. Of two runs
with different numbers of tokens: a line through both, with a constant; where passes grow faster
than tokens, as attention does, a square without one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from debubble.timeline.model import PassKind

Kind = tuple[int, bool]
"""Kind of pass, and whether of the first microbatch."""
Bases = Mapping[tuple[int, bool, int], float]
"""Logarithms of times, by kind and by the rank's place."""

# These do not add to gradients.
_NO_GRADIENTS = frozenset({int(PassKind.F), int(PassKind.I)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """Shares of a measured pass: what stays, and what grows with the square; the rest is linear."""

    constant: float = 0.0
    square: float = 0.0

    def times(self, scale: float) -> float:
        """Return how many times as long a pass takes with so many times as many tokens."""
        linear = 1 - self.constant - self.square
        return self.constant + linear * scale + self.square * scale * scale


def grow_by_one_run(base: Bases) -> dict[Kind, Growth]:
    """Let what a first microbatch does without, the accumulation of gradients, stay as it is."""
    shares: dict[Kind, list[float]] = {}
    for (kind, first, place), own in base.items():
        shares.setdefault((kind, first), [])
        alone = base.get((kind, True, place))
        if not first and alone is not None and kind not in _NO_GRADIENTS:
            shares[kind, first].append(1 - float(np.exp(alone - own)))
    return {
        kind: Growth(constant=max(0.0, float(np.mean(seen)))) if seen else Growth()
        for kind, seen in shares.items()
    }


def grow_by_two_runs(base: Bases, other: Bases, ratio: float) -> dict[Kind, Growth]:
    """Lay a line through two runs, the other with `ratio` times as many tokens.

    What only one of them has grows as by one run.
    """
    growth = grow_by_one_run(base)
    apart: dict[Kind, list[float]] = {}
    for (kind, first, place), own in base.items():
        if (kind, first, place) in other:
            apart.setdefault((kind, first), []).append(other[kind, first, place] - own)
    for kind_and_first, logs in apart.items():
        growth[kind_and_first] = _line(float(np.exp(np.mean(logs))), ratio)
    return growth


def _line(took: float, ratio: float) -> Growth:
    """Fit what takes `took` times as long with `ratio` times as many tokens."""
    constant = (took - ratio) / (1 - ratio)
    if constant >= 0:
        return Growth(constant=min(constant, 1.0))
    return Growth(square=min((took - ratio) / (ratio * ratio - ratio), 1.0))
