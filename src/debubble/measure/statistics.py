"""Samples in → medians with their intervals, and how sure a difference is. numpy alone, seeded.

The test is Mann and Whitney's: it asks nothing of the shape of the distribution, and a step that
a neighbour disturbed counts as one step. The intervals are bootstrapped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]

ALPHA = 0.03
"""How often two runs of the same may be called different: below the twentieth that is promised."""
CONFIDENCE = 0.95
_RESAMPLES = 2000
_SEED = 20261115
# Up to here every arrangement of the ranks is counted; 25 of 50 are 1.3e14, exact in a float.
_EXACT_UP_TO = 50
# Quantiles of the normal distribution: of the level, two-sided, and of a power of 80 %.
_Z_ALPHA, _Z_POWER = (NormalDist().inv_cdf(level) for level in (1 - ALPHA / 2, 0.8))
# What the rank test needs more samples than the t test on normal data: pi / 3.
_RANK_PRICE = math.pi / 3
# Student's two-sided 2.5 % by degrees of freedom: for samples too few for any rank test. Half of
# the promised twentieth, for nothing shows that they are normal.
_STUDENT = {2: 6.205, 3: 4.177, 4: 3.495, 5: 3.163, 6: 2.969, 7: 2.841}
# Two steps may agree by chance; no run is known to repeat itself better than this.
_LEAST_SPREAD = 0.005
# So many of a side are paired with as many of the other: a million ratios.
_MOST_PAIRED = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """The samples of a number on one side, as answers have them."""

    median: float
    ci: tuple[float, float] | None
    """Where the median may as well lie; None of a single sample."""
    n: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTest:
    """The outcome of Mann and Whitney's test."""

    u: float
    """How many pairs have the first sample above the second; ties count half."""
    p: float
    exact: bool


def spread_of(samples: Sequence[float]) -> Spread | None:
    """Return the median with its bootstrap interval; None of nothing."""
    if not samples:
        return None
    interval = _interval(*_resampled_medians(samples)) if len(samples) > 1 else None
    return Spread(median=float(np.median(samples)), ci=interval, n=len(samples))


def ratio_interval(before: Sequence[float], after: Sequence[float]) -> tuple[float, float] | None:
    """Return where the ratio of the medians, after over before, may lie; None of single samples."""
    if min(len(before), len(after)) < 2 or min(before) <= 0:
        return None
    first, second = _resampled_medians(before, after)
    return _interval(second / first)


def difference_interval(
    before: Sequence[float], after: Sequence[float]
) -> tuple[float, float] | None:
    """Return where the difference of the medians may lie: for what may be zero."""
    if min(len(before), len(after)) < 2:
        return None
    first, second = _resampled_medians(before, after)
    return _interval(second - first)


def moved_ratio(
    before: Sequence[float], after: Sequence[float]
) -> tuple[float, float, float] | None:
    """Return by which factor samples moved, from where to where it may be, as the rank test has it.

    Hodges and Lehmann: the middle of all ratios of a sample after to one before. The interval holds
    the factors that the rank test would not refuse (Moses).
    """
    n, m = len(before), len(after)
    if min(n, m) < 2 or min(*before, *after) <= 0:
        return None
    first, second = (
        np.quantile(np.log(np.asarray(side)), np.linspace(0, 1, min(len(side), _MOST_PAIRED)))
        for side in (before, after)
    )
    ratios = np.exp(np.sort((second[:, None] - first[None, :]).ravel()))
    below = n * m / 2 - _Z_ALPHA * math.sqrt(n * m * (n + m + 1) / 12)
    share = min(max(below / (n * m), 0.0), 0.5)
    low, middle, high = np.quantile(ratios, (share, 0.5, 1 - share)).tolist()
    return middle, low, high


def rank_test(first: Sequence[float], second: Sequence[float]) -> RankTest | None:
    """Test whether one side tends to be larger, two-sided; None where a side is empty."""
    if not len(first) or not len(second):
        return None
    ranks = _doubled_ranks(np.asarray([*first, *second], dtype=np.float64))
    n, m = len(first), len(second)
    doubled = int(ranks[:n].sum())
    u = doubled / 2 - n * (n + 1) / 2
    if n + m <= _EXACT_UP_TO:
        return RankTest(u=u, p=_exact_p(ranks, n, doubled), exact=True)
    return RankTest(u=u, p=_normal_p(ranks, n, m, u), exact=False)


def can_be_tested(n: int, m: int) -> bool:
    """Tell whether the rank test could find any difference between so many samples."""
    return min(n, m) > 0 and 2 / math.comb(n + m, n) <= ALPHA


def few_differ(first: Sequence[float], second: Sequence[float]) -> bool | None:
    """Tell by Student's test whether two or three samples a side differ; None where not even that.

    It takes the logarithms for normal, which so few samples cannot show: an indication, no proof.
    """
    n, m = len(first), len(second)
    if min(n, m) < 2 or min(*first, *second) <= 0:
        return None
    a, b = np.log(np.asarray(first)), np.log(np.asarray(second))
    squares = float(((a - a.mean()) ** 2).sum() + ((b - b.mean()) ** 2).sum())
    spread = max(math.sqrt(squares / (n + m - 2)), _LEAST_SPREAD)
    t = abs(float(a.mean() - b.mean())) / (spread * math.sqrt(1 / n + 1 / m))
    return t > _STUDENT.get(n + m - 2, _STUDENT[7])


def samples_needed(before: Sequence[float], after: Sequence[float], effect: float) -> int | None:
    """Return how many samples a side show a change of `effect` in four of five tries."""
    noise = _noise(before, after)
    if noise is None or effect <= 0:
        return None
    wanted = 2 * _RANK_PRICE * ((_Z_ALPHA + _Z_POWER) * noise / math.log1p(effect)) ** 2
    return max(least_samples(), math.ceil(wanted))


def least_samples() -> int:
    """Return the fewest samples a side that any test can tell apart."""
    return next(n for n in range(1, 10) if can_be_tested(n, n))


def detectable_change(before: Sequence[float], after: Sequence[float]) -> float | None:
    """Return the smallest change that so many samples show in four of five tries."""
    noise = _noise(before, after)
    if noise is None:
        return None
    share = (1 / len(before) + 1 / len(after)) * _RANK_PRICE
    return math.expm1((_Z_ALPHA + _Z_POWER) * noise * math.sqrt(share))


def _noise(before: Sequence[float], after: Sequence[float]) -> float | None:
    """Return the relative spread inside both sides together."""
    free = len(before) + len(after) - 2
    if free < 1 or min(len(before), len(after)) < 1 or min(*before, *after) <= 0:
        return None
    logs = [np.log(np.asarray(side, dtype=np.float64)) for side in (before, after)]
    squares = sum(float(((log - log.mean()) ** 2).sum()) for log in logs)
    return max(math.sqrt(squares / free), _LEAST_SPREAD)


def _resampled_medians(*sides: Sequence[float]) -> list[F64]:
    """Return the medians of each side drawn again and again from its own samples, seeded."""
    rng = np.random.default_rng(_SEED)
    picks = [rng.integers(0, len(side), (_RESAMPLES, len(side))) for side in sides]
    return [
        np.median(np.asarray(side, dtype=np.float64)[pick], axis=1)
        for side, pick in zip(sides, picks, strict=True)
    ]


def _interval(values: F64) -> tuple[float, float]:
    tail = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(values, [tail, 100 - tail])
    return float(low), float(high)


def _doubled_ranks(values: F64) -> NDArray[np.int64]:
    """Return twice the rank of each value, so that the middle ranks of ties are whole."""
    order = np.sort(values)
    below = np.searchsorted(order, values, side="left")
    upto = np.searchsorted(order, values, side="right")
    return (below + upto + 1).astype(np.int64)


def _exact_p(ranks: NDArray[np.int64], n: int, doubled: int) -> float:
    """Count all ways to pick n of the ranks that lie as far out as the one seen, ties and all."""
    counts = _count_ways(tuple(sorted(ranks.tolist())), n)
    expected = n * (len(counts) - 1) / len(ranks)
    far = np.abs(np.arange(len(counts)) - expected) >= abs(doubled - expected) - 1e-9
    return float(min(1.0, counts[far].sum() / counts.sum()))


@lru_cache(maxsize=16)
def _count_ways(ranks: tuple[int, ...], n: int) -> F64:
    """Return in how many ways n of the ranks have each sum: ranks without ties are always alike."""
    total = sum(ranks)
    ways = np.zeros((n + 1, total + 1))
    ways[0, 0] = 1
    for rank in ranks:
        ways[1:, rank:] += ways[:-1, : total + 1 - rank].copy()
    counts: F64 = ways[n]
    return counts


def _normal_p(ranks: NDArray[np.int64], n: int, m: int, u: float) -> float:
    """Return the normal approximation, corrected for ties and for steps of one."""
    both = n + m
    _, ties = np.unique(ranks, return_counts=True)
    tied = float((ties.astype(np.float64) ** 3 - ties).sum())
    variance = n * m / 12 * (both + 1 - tied / (both * (both - 1)))
    if variance <= 0:
        return 1.0
    z = max(0.0, abs(u - n * m / 2) - 0.5) / math.sqrt(variance)
    return math.erfc(z / math.sqrt(2))
