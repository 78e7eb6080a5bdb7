"""Layers, stages and a way to time a split in → the best split, and how far it can be from best.

Where there are few splits all are timed. Else: the splits that are best for the dearest stage, then
steepest descent by the timed latency, one layer at a time from any stage to any other. A split
that cannot beat the best so far, by its lower bound, is never timed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import combinations
from math import comb

import numpy as np

from debubble.errors import NoSplitFits, UsageError
from debubble.plan.lower_bound import blocks_bound, bound_all, bound_splits
from debubble.plan.min_max import find_misfit, min_max
from debubble.plan.split_problem import (
    SplitProblem,
    fits_alone,
    overflow_by_rank,
    overflow_of,
    seconds_of_blocks,
)
from debubble.timeline.model import F64, I64
from debubble.units import show_bytes

Evaluate = Callable[[I64], F64]
"""Splits, a row each, in → the batch latency of each in seconds."""

# So many splits are timed in a tenth of a second: then the answer is exact.
EXHAUSTIVE_UP_TO = 2000
# Splits farther away lead out of dead ends; timed are the most promising, by their lower bound.
_MOST_FAR = 600
# How many splits are taken with several cuts moved at once, and how far a cut moves.
_SCATTERED = 2000
_FAR = 3
# Of two moves in a row: ten stages have no more than this; of more stages some are taken.
_MOST_PAIRS = 16_000
# Descents begin at the best few seeds: the others mostly end in the same place.
_DESCENTS = 3
# Relative: latencies are sums of floats, and a gain of a rounding error is none.
_ROUNDING = 1e-12
_MORE_ROOM = "use more ranks, smaller microbatches, or recomputation"


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """The best split that was found."""

    split: tuple[int, ...]
    """Layers of each stage."""
    latency_s: float
    given_latency_s: float | None
    """Of the split that the run has now; None where none was given."""
    lower_bound_s: float | None
    """No split can be quicker. None where the timing undercuts it: then its costs are others."""
    exact: bool
    """No split that fits is quicker: all were timed or ruled out."""
    timed: int
    """How many splits were timed."""


def find_partition(
    problem: SplitProblem,
    evaluate: Evaluate,
    *,
    given: tuple[int, ...] | None = None,
    near: tuple[int, ...] | None = None,
    exhaustive_up_to: int = EXHAUSTIVE_UP_TO,
) -> Partition:
    """Return a split never slower than the given one, where that fits.

    `evaluate` may add to the costs of the problem, such as transfers, but not undercut them. With
    `near`, the best split of a like problem, the search goes downhill once and looks no farther.
    """
    _check_fit(problem)
    search = _Search(problem, evaluate, bound_all(problem))
    given_latency = None
    if given is not None:
        _check_given(problem, given)
        given_latency = search.look_at(np.array([given], dtype=np.int64))
    exact = comb(problem.layer_count - 1, problem.stage_count - 1) <= exhaustive_up_to
    trusted = not search.undercut
    _look_around(search, given, near, all_of_them=exact)
    if trusted and search.undercut:
        _look_around(search, given, near, all_of_them=exact)  # what was ruled out is open again
    if search.best is None:
        raise _no_rank_fits(problem, exact=exact)
    return Partition(
        split=tuple(search.best.tolist()),
        latency_s=search.latency_s,
        given_latency_s=given_latency,
        lower_bound_s=None if search.undercut else min(search.bound_s, search.latency_s),
        exact=exact or search.done,
        timed=search.timed,
    )


def all_splits(layers: int, stages: int) -> I64:
    """Return every way to cut layers into stages of one or more."""
    cuts = np.array(list(combinations(range(1, layers), stages - 1)), dtype=np.int64)
    cuts = cuts.reshape(-1, stages - 1)
    edges = np.zeros((len(cuts), stages + 1), dtype=np.int64)
    edges[:, 1:-1], edges[:, -1] = cuts, layers
    return edges[:, 1:] - edges[:, :-1]


@dataclass(slots=True)
class _Search:
    """The best split so far, and what was timed on the way to it."""

    problem: SplitProblem
    evaluate: Evaluate
    bound_s: float
    """No split can be quicker."""
    best: I64 | None = None
    latency_s: float = float("inf")
    timed: int = 0
    undercut: bool = False
    """A split was timed below its lower bound: the bound is of no use."""
    known: dict[bytes, float] = field(default_factory=dict)

    @property
    def done(self) -> bool:
        """Whether nothing better is to be found."""
        return not self.undercut and self.latency_s <= self.bound_s * (1 + 1e-9)

    def time(self, splits: I64) -> F64:
        """Time those that fit and might be better than the best; the others count as infinite."""
        found = np.full(len(splits), np.inf)
        if not len(splits):
            return found
        bounds = bound_splits(self.problem, splits)
        open_rows = overflow_of(self.problem, splits) == 0
        if not self.undercut:
            open_rows &= bounds < self.latency_s * (1 - _ROUNDING)
        fresh = []
        for row in np.flatnonzero(open_rows).tolist():
            latency = self.known.get(splits[row].tobytes())
            if latency is None:
                fresh.append(row)
            else:
                found[row] = latency
        if fresh:
            found[fresh] = self.evaluate(splits[fresh])
            self.timed += len(fresh)
            floor = np.maximum(bounds[fresh], self.bound_s) * (1 - 1e-9)
            self.undercut |= bool((found[fresh] < floor).any())
            for row in fresh:
                self.known[splits[row].tobytes()] = float(found[row])
            row = int(found.argmin())
            if found[row] < self.latency_s * (1 - _ROUNDING):
                self.best, self.latency_s = splits[row].copy(), float(found[row])
        return found

    def look_at(self, given: I64) -> float:
        """Time one split even if it does not fit, for comparison."""
        if overflow_of(self.problem, given)[0] == 0:
            return float(self.time(given)[0])
        self.timed += 1
        return float(self.evaluate(given)[0])


def _look_around(
    search: _Search,
    given: tuple[int, ...] | None,
    near: tuple[int, ...] | None,
    *,
    all_of_them: bool,
) -> None:
    if all_of_them:
        search.time(all_splits(search.problem.layer_count, search.problem.stage_count))
    elif near is None:
        _descend_from_seeds(search, _seeds(search.problem, given), descents=_DESCENTS)
        while search.best is not None and not search.done and _escape(search):
            _descend(search, search.best)
    else:
        _descend_from_seeds(search, [near, *_seeds(search.problem, given)], descents=1)


def _descend_from_seeds(
    search: _Search, seeds: Iterable[tuple[int, ...]], *, descents: int
) -> None:
    splits = np.unique(np.array(list(seeds), dtype=np.int64), axis=0)
    splits = np.stack([_make_fit(search.problem, split) for split in splits])
    if search.problem.room is not None and not search.problem.one_stage_a_rank:
        splits = np.concatenate((splits, _anywhere(search.problem)))
    bounds = bound_splits(search.problem, splits)
    latencies = search.time(splits)
    order = np.lexsort((bounds, latencies))
    for row in order[:descents].tolist():
        if not search.done and overflow_of(search.problem, splits[row : row + 1])[0] == 0:
            _descend(search, splits[row])


def _seeds(problem: SplitProblem, given: tuple[int, ...] | None) -> Iterator[tuple[int, ...]]:
    """Yield the given split, an even one, and the best for the dearest stage by several costs."""
    if given is not None:
        yield given
    each, more = divmod(problem.layer_count, problem.stage_count)
    yield tuple(each + (stage < more) for stage in range(problem.stage_count))
    layers, stages, fits = problem.layers, problem.stages, fits_alone(problem)
    costs = [seconds_of_blocks(problem, layers.whole, stages.whole), blocks_bound(problem)]
    if problem.trains:
        costs += [
            seconds_of_blocks(problem, layers.forward, stages.forward),
            seconds_of_blocks(problem, layers.backward, stages.backward),
        ]
    for cost in costs:
        found = min_max(cost, fits)
        if found:
            yield found.split


def _anywhere(problem: SplitProblem) -> I64:
    """Return splits from all over that fit: where stages share memory, no one seed leads there."""
    random = np.random.default_rng(problem.stage_count)
    order = random.random((_SCATTERED, problem.layer_count - 1)).argsort(axis=1) + 1
    edges = np.zeros((_SCATTERED, problem.stage_count + 1), dtype=np.int64)
    edges[:, 1:-1] = np.sort(order[:, : problem.stage_count - 1], axis=1)
    edges[:, -1] = problem.layer_count
    splits = np.unique(edges[:, 1:] - edges[:, :-1], axis=0)
    splits = splits[overflow_of(problem, splits) == 0]
    promising: I64 = splits[np.argsort(bound_splits(problem, splits), kind="stable")[:_MOST_FAR]]
    return promising


def _make_fit(problem: SplitProblem, split: I64) -> I64:
    """Move layers to where they overflow less, as far as that leads."""
    over = float(overflow_of(problem, split[None])[0])
    while over > 0:
        for near in (neighbours(split), _farther(split)):
            overflows = overflow_of(problem, near)
            if overflows.min(initial=np.inf) < over:
                break
        else:
            break
        row = int(overflows.argmin())
        over = float(overflows[row])
        split = near[row]
    return split


def _descend(search: _Search, split: I64) -> None:
    latency = search.known.get(split.tobytes(), float("inf"))
    while True:
        near = neighbours(split)
        latencies = search.time(near)
        if not latencies.min(initial=np.inf) < latency * (1 - _ROUNDING):
            return
        row = int(latencies.argmin())
        split, latency = near[row], float(latencies[row])


def _escape(search: _Search) -> bool:
    """Look farther away from the best split; say whether something better was there."""
    assert search.best is not None  # noqa: S101 (for the type checker: the caller looked)
    before = search.latency_s
    far = _farther(search.best)
    far = far[overflow_of(search.problem, far) == 0]
    bounds = bound_splits(search.problem, far)
    search.time(far[np.argsort(bounds, kind="stable")[:_MOST_FAR]])
    return search.latency_s < before


def _farther(split: I64) -> I64:
    """Return splits two moves away, and some with several cuts moved; always the same ones."""
    near = neighbours(split)
    cuts = np.cumsum(split)[:-1]
    random = np.random.default_rng(len(split))
    shape = (_SCATTERED, len(cuts))
    shift = random.integers(-_FAR, _FAR, shape, endpoint=True) * (random.random(shape) < 0.5)
    edges = np.zeros((_SCATTERED, len(split) + 1), dtype=np.int64)
    edges[:, 1:-1], edges[:, -1] = cuts + shift, split.sum()
    scattered = edges[:, 1:] - edges[:, :-1]
    scattered = scattered[(scattered >= 1).all(axis=1)]
    some = near[random.permutation(len(near))[: _MOST_PAIRS // max(len(near), 1)]]
    return _each_once(np.concatenate([scattered, *map(neighbours, some)]))


def _each_once(splits: I64) -> I64:
    """Return splits without repeats, in their order; `np.unique` takes thirty times as long."""
    short = np.zeros((len(splits), -(-splits.shape[1] // 4) * 4), dtype=">u2")
    short[:, : splits.shape[1]] = splits
    words = short.view(">u8").astype(np.uint64)
    order = np.lexsort(words.T[::-1])
    fresh = np.ones(len(order), dtype=bool)
    fresh[1:] = (words[order[1:]] != words[order[:-1]]).any(axis=1)
    once: I64 = splits[order[fresh]]
    return once


def neighbours(split: I64) -> I64:
    """Return the splits one move away: a layer from any stage to any other, or a cut moved by two.

    Between the two stages every cut moves, so that only their sizes change.
    """
    near: I64 = split + _moves(len(split))
    kept: I64 = near[(near >= 1).all(axis=1) & (near != split).any(axis=1)]
    return kept


@cache
def _moves(stages: int) -> I64:
    one = np.eye(stages, dtype=np.int64)
    moves = [one[to] - one[source] for source in range(stages) for to in range(stages)]
    moves += [
        2 * (one[to] - one[source])
        for source in range(stages)
        for to in (source - 1, source + 1)
        if 0 <= to < stages
    ]
    return np.array(moves, dtype=np.int64)


def _check_given(problem: SplitProblem, given: tuple[int, ...]) -> None:
    if len(given) != problem.stage_count or sum(given) != problem.layer_count or min(given) < 1:
        raise UsageError(
            f"{','.join(map(str, given))} does not split {problem.layer_count} layers"
            f" into {problem.stage_count} stages",
            hint="give one or more layers for each stage, all of them in all",
        )


def _check_fit(problem: SplitProblem) -> None:
    misfit = find_misfit(problem)
    if misfit is None:
        return
    if misfit.lacking_bytes is None:
        raise NoSplitFits(
            f"no split fits memory: stage {misfit.stage} is full, and so are others",
            hint=_MORE_ROOM,
        )
    raise NoSplitFits(
        f"no split fits memory: stage {misfit.stage} lacks {show_bytes(misfit.lacking_bytes)}",
        hint=_MORE_ROOM,
    )


def _no_rank_fits(problem: SplitProblem, *, exact: bool) -> NoSplitFits:
    """Say which rank's stages overflow where each of them would fit alone."""
    nearest = min(
        (_make_fit(problem, np.array(seed, dtype=np.int64)) for seed in _seeds(problem, None)),
        key=lambda split: float(overflow_of(problem, split[None])[0]),
    )
    lacking = overflow_by_rank(problem, nearest[None])[0]
    rank = int(lacking.argmax())
    stages = " and ".join(map(str, np.flatnonzero(problem.rank == rank).tolist()))
    said = "no split fits memory" if exact else "no split was found that fits memory"
    return NoSplitFits(
        f"{said}: rank {rank}, with stages {stages}, lacks {show_bytes(float(lacking[rank]))}"
        f" with {','.join(map(str, nearest.tolist()))}",
        hint=_MORE_ROOM,
    )
