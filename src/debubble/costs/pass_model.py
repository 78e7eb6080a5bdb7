"""Timelines in → what a pass takes: per layer, rank and kind, with its spread.

Ranks that share a device slow each other:
log(time per layer) = base(kind, rank) + slope x ranks at work. The base of a step's first backward
passes is its own: they have no gradients to add theirs to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from debubble.costs.activity import trailing_activity
from debubble.costs.devices import may_share, surely_share
from debubble.costs.tokens import Growth, Kind, grow_by_one_run
from debubble.timeline.model import F64, Passes, PassKind, RankTimeline, Timeline

# Whole backward passes of a first stage that is written as a weight gradient alone.
WHOLE = 4
# What each rank at work adds, where ranks share a device: measured on one H200 cut into four.
# Within a run less is seen, for the clock follows the run's mean load as well.
SHARED_SLOPE = 0.1
_SHARED_SLOPE_SPREAD = 0.02
# How sure the run itself must be that ranks slow each other, where devices do not tell.
_SURE = 2.5

# One run foretold half and twice its tokens 20 and 27 % wrong: one pair of recorded runs.
ONE_RUN_SPREAD = 0.2

Class = tuple[int, bool, int]
"""Kind of pass (or `WHOLE`), whether of the first microbatch, place of the rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassModel:
    """Logarithms of nanoseconds per layer."""

    base: dict[Class, float]
    residuals: F64
    slope: float
    """What one more rank at work adds; 0 where ranks have devices of their own."""
    slope_spread: float
    seen_slope: float
    """What the run itself shows, and how surely."""
    seen_spread: float
    layers: tuple[float, ...]
    """Of each stage, in layers: embedding and head count as many as they take time for."""
    activity: dict[Class, float]
    """Ranks at work, on the mean, during passes of each class."""
    growth: dict[Kind, Growth]
    """How passes of each kind grow with tokens."""
    growth_spread: float = ONE_RUN_SPREAD
    """How unsure that is: of the logarithm of a time, for each e-fold of tokens."""

    @property
    def splits_backward(self) -> bool:
        """Whether input and weight gradients were measured apart."""
        return any(kind == PassKind.I for kind, _, _ in self.base)

    def log_ns(self, kind: int, *, first: bool, place: int) -> float | None:
        """Return a rank's base, else the mean of the other ranks; None where no such pass ran.

        A run of one microbatch has none but the first.
        """
        for is_first in (first, False) if first else (False,):
            if (kind, is_first, place) in self.base:
                return self.base[kind, is_first, place]
        others = [
            base
            for (other, is_first, _), base in self.base.items()
            if other == kind and is_first == first
        ]
        others = others or [base for (other, _, _), base in self.base.items() if other == kind]
        return float(np.mean(others)) if others else None

    def with_tokens(self, scale: float) -> PassModel:
        """Return what passes take with so many times as many tokens a microbatch."""
        if scale == 1.0:
            return self
        base = {
            (kind, first, place): log + float(np.log(self.growth[kind, first].times(scale)))
            for (kind, first, place), log in self.base.items()
        }
        return replace(self, base=base)

    def with_slope(self, slope: float) -> PassModel:
        """Explain the same times by another slope: the steeper, the lower the bases."""
        base = {
            one: log + (self.slope - slope) * self.activity[one] for one, log in self.base.items()
        }
        return replace(self, base=base, slope=slope)


def fit_passes(timeline: Timeline, pipeline: int, layers: Sequence[float]) -> PassModel:
    """Fit a run's passes, given how many layers each stage holds."""
    ranks = timeline.ranks_of(pipeline)
    passes = timeline.passes.where(np.isin(timeline.passes.rank, [rank.rank for rank in ranks]))
    passes = passes.where(passes.end_ns > passes.start_ns)
    classes = _classes(passes, ranks)
    per_layer = np.array([layers[stage] for stage in passes.stage.tolist()])
    logs = np.log((passes.end_ns - passes.start_ns) / per_layer)
    activity = np.zeros(len(passes))
    for step in np.unique(passes.step).tolist():
        here = passes.step == step
        activity[here] = trailing_activity(passes.start_ns[here], passes.end_ns[here])
    seen, spread = _slope_within(classes, logs, activity)
    slopes = surely_share(ranks) or (may_share(ranks) and seen > _SURE * spread)
    slope = max(seen, SHARED_SLOPE) if slopes else 0.0
    rest = logs - slope * activity
    rows_of = _rows_of(classes)
    base = {one: float(rest[rows].mean()) for one, rows in rows_of.items()}
    return PassModel(
        base=base,
        residuals=rest - np.array([base[one] for one in classes]),
        slope=slope,
        slope_spread=_SHARED_SLOPE_SPREAD if slopes else 0.0,
        seen_slope=seen,
        seen_spread=spread,
        layers=tuple(layers),
        activity={one: float(activity[rows].mean()) for one, rows in rows_of.items()},
        growth=grow_by_one_run(base),
    )


def _classes(passes: Passes, ranks: Sequence[RankTimeline]) -> list[Class]:
    place = {rank.rank: number for number, rank in enumerate(ranks)}
    kinds = passes.kind.astype(int)
    splits = bool((kinds == PassKind.I).any())
    first_has_none = splits and not ((kinds == PassKind.I) & (passes.stage == 0)).any()
    if first_has_none:
        kinds[(passes.stage == 0) & (kinds == PassKind.W)] = WHOLE
    return [
        (kind, number == 0 and kind not in {PassKind.F, PassKind.I}, place[rank])
        for kind, number, rank in zip(
            kinds.tolist(), passes.microbatch.tolist(), passes.rank.tolist(), strict=True
        )
    ]


def _rows_of(classes: Sequence[Class]) -> dict[Class, list[int]]:
    rows: dict[Class, list[int]] = {}
    for row, one in enumerate(classes):
        rows.setdefault(one, []).append(row)
    return rows


def _slope_within(classes: Sequence[Class], logs: F64, activity: F64) -> tuple[float, float]:
    """Return how times follow activity within their classes, and the standard error of that."""
    y, x = logs.copy(), activity.copy()
    for rows in _rows_of(classes).values():
        y[rows] -= y[rows].mean()
        x[rows] -= x[rows].mean()
    spread = float(x @ x)
    free = len(y) - len(_rows_of(classes)) - 1
    if spread < 1e-9 or free < 1:
        return 0.0, np.inf
    slope = float(x @ y) / spread
    rest = y - slope * x
    return slope, float(np.sqrt(rest @ rest / free / spread))
