"""Timelines in → what a pass takes: per layer, rank and kind, with its spread.

time = (layers + extra) x exp(base(kind, rank) + slope x ranks at work). An embedding on the first
stage and a head on the last are extra, in layers, forward and backward each its own. The slope is 0
unless ranks share a device and the run shows that they slow each other. The base of a step's first
backward passes is its own: they have no gradients to add theirs to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from debubble.costs.activity import trailing_activity
from debubble.costs.devices import may_share, surely_share
from debubble.costs.passes import data_parallel_of, inside_passes
from debubble.costs.tokens import Growth, Kind, grow_by_one_run
from debubble.timeline.model import F64, Passes, PassKind, RankTimeline, Timeline

# Whole backward passes of a first stage that is written as a weight gradient alone.
WHOLE = 4
# Within a run about half of it is seen, for a device's clock follows its mean load as well: between
# runs of one program on one H200 cut into four, times grew by 0.1 a rank at most.
_SEEN_WITHIN, _STEEPEST = 0.5, 0.1
# Less than this of a layer is what lies between layers, not an embedding or a head.
_LEAST_EXTRA = 0.1
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
    """Of each stage; 1 each where they could not be told."""
    extras: dict[int, tuple[float, float]]
    """By kind, what first and last stage have besides their layers, in layers."""
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

    def besides_layers(self, kind: int) -> tuple[float, float]:
        """Return what first and last stage have besides layers, by the kind nearest to this."""
        for known in (kind, PassKind.B, PassKind.F):
            if known in self.extras:
                return self.extras[known]
        return 0.0, 0.0

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


def fit_passes(
    timeline: Timeline, pipeline: int, layers: Sequence[float] | None = None
) -> PassModel:
    """Fit a run's passes, given how many layers each stage holds where that is known."""
    ranks = timeline.ranks_of(pipeline)
    stages = 1 + max(stage for rank in ranks for stage in rank.stages)
    extras = {} if layers is None else _extras(ranks, layers)
    layers = (1.0,) * stages if layers is None else tuple(float(count) for count in layers)
    passes = timeline.passes.where(np.isin(timeline.passes.rank, [rank.rank for rank in ranks]))
    passes = passes.where(passes.end_ns > passes.start_ns)
    classes = _classes(passes, ranks)
    weights = np.array(layers)[passes.stage]
    for end, at in enumerate((0, stages - 1)):
        mine = passes.stage == at
        more = [extras.get(kind, extras.get(int(PassKind.F), (0.0, 0.0))) for kind in PassKind]
        weights[mine] += np.array([one[end] for one in more])[passes.kind[mine]]
    # What is gathered or reduced beside passes is none of their work.
    own_ns = passes.end_ns - passes.start_ns - inside_passes(passes, ranks, data_parallel_of)
    logs = np.log(np.maximum(own_ns, 1) / np.maximum(weights, _LEAST_EXTRA))
    activity = np.zeros(len(passes))
    for step in np.unique(passes.step).tolist():
        here = passes.step == step
        activity[here] = trailing_activity(passes.start_ns[here], passes.end_ns[here])
    seen, spread = _slope_within(classes, logs, activity)
    slopes = surely_share(ranks) or (may_share(ranks) and seen > _SURE * spread)
    slope = min(max(seen / _SEEN_WITHIN, 0.0), _STEEPEST) if slopes else 0.0
    rest = logs - slope * activity
    rows_of = _rows_of(classes)
    base = {one: float(rest[rows].mean()) for one, rows in rows_of.items()}
    return PassModel(
        base=base,
        residuals=rest - np.array([base[one] for one in classes]),
        slope=slope,
        slope_spread=spread if slope and np.isfinite(spread) else 0.0,
        seen_slope=seen,
        seen_spread=spread,
        layers=layers,
        extras=extras,
        activity={one: float(activity[rows].mean()) for one, rows in rows_of.items()},
        growth=grow_by_one_run(base),
    )


def _extras(
    ranks: Sequence[RankTimeline], layers: Sequence[float]
) -> dict[int, tuple[float, float]]:
    """Return by kind, in layers, what the ends have that is not of layers.

    What stages between them have besides layers as well, such as sums of gradients, grows with the
    layers and is part of them. A stage's own layers tell how long one takes there; of a stage that
    has none, the others tell.
    """
    found = {one.stage: one for rank in ranks for one in rank.layers}
    if any(stage not in found or found[stage].layers != n for stage, n in enumerate(layers)):
        return {}  # what was stated wins, and its layers are not those that kernels show
    extras = {}
    ends = (0, len(layers) - 1)
    for kind in (PassKind.F, PassKind.B):
        columns = {
            stage: (one.layer_ns, one.rest_ns)
            if kind is PassKind.F
            else (one.backward_layer_ns or 0, one.backward_rest_ns or 0)
            for stage, one in found.items()
        }
        usual = [each for each, _ in columns.values() if each]
        if not usual:
            continue
        shares = [
            rest / (each * layers[stage])
            for stage, (each, rest) in columns.items()
            if stage not in ends and each and layers[stage]
        ]
        common = float(np.median(shares)) if shares else 0.0
        both = []
        for stage in ends:
            each, rest = columns[stage]
            more = rest / (each or float(np.median(usual))) - common * layers[stage]
            both.append(more / (1 + common) if more >= _LEAST_EXTRA else 0.0)
        extras[int(kind)] = (both[0], both[1])
    return extras


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
