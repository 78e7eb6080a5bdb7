"""A split problem in → the best split found, with a lower bound beside it.

A rank has to do all of its passes. Before its first, a microbatch comes through the stages before
it; after its last backward pass it has to go back through them. Forward only, it goes on through
the stages after it. Where the order is known, so is how long a stage waits to turn. Transfers are
taken to be free, so that what is said holds for any link.

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
from numpy.typing import NDArray

from debubble.errors import NoSplitFits, UsageError
from debubble.plan.split_problem import (
    SplitProblem,
    bytes_of_blocks,
    fits_alone,
    overflow_by_rank,
    overflow_of,
    seconds_of_blocks,
    seconds_of_splits,
    span_at_least,
)
from debubble.timeline.model import F64, I64
from debubble.units import show_bytes

Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class MinMax:
    """The best that splits can do for their dearest stage; exact."""

    split: tuple[int, ...]
    cost: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Misfit:
    """Why no split fits."""

    stage: int
    """The stage that lacks least; where no one stage's memory would help, the first to overflow."""
    lacking_bytes: float | None
    """How much more this stage alone would need; None where more than one needs more."""


def min_max(blocks: F64, fits: Flags) -> MinMax | None:
    """Return the split with the least maximum of `blocks[stage, i, j]`; None if none fits."""
    cost = np.where(fits, blocks, np.inf)
    stages, size, _ = cost.shape
    best = np.full(size, np.inf)
    best[0] = -np.inf
    chosen: list[I64] = []
    for stage in range(stages):
        reach = np.maximum(best[:, None], cost[stage])
        first = reach.argmin(axis=0)
        chosen.append(first)
        best = reach[first, np.arange(size)]
    if not np.isfinite(best[-1]):
        return None
    split, end = [], size - 1
    for first in reversed(chosen):
        split.append(end - int(first[end]))
        end = int(first[end])
    return MinMax(split=tuple(reversed(split)), cost=float(best[-1]))


def find_misfit(problem: SplitProblem) -> Misfit | None:
    """Return the stage that keeps every split from fitting; None where stage by stage one fits."""
    if problem.room is None:
        return None
    fits = fits_alone(problem)
    stages, layers = problem.stage_count, problem.layer_count
    ahead = np.zeros((stages + 1, layers + 1), dtype=bool)
    """Whether the stages before one can hold the layers before a place."""
    behind = np.zeros((stages + 1, layers + 1), dtype=bool)
    ahead[0, 0] = behind[stages, layers] = True
    for stage in range(stages):
        ahead[stage + 1] = (ahead[stage][:, None] & fits[stage]).any(axis=0)
    if ahead[stages, layers]:
        return None
    for stage in reversed(range(stages)):
        behind[stage] = (fits[stage] & behind[stage + 1][None, :]).any(axis=1)
    return _least_lacking(problem, ahead, behind)


def _least_lacking(problem: SplitProblem, ahead: Flags, behind: Flags) -> Misfit:
    assert problem.room is not None  # noqa: S101 (for the type checker: the caller looked)
    size = problem.layer_count + 1
    over = (
        bytes_of_blocks(problem.room)
        - problem.room.cap_bytes[problem.rank][:, None, None]
        + np.where(np.triu(np.ones((size, size), dtype=bool), k=1), 0.0, np.inf)
    )
    lacking = np.array(
        [
            np.where(ahead[stage][:, None] & behind[stage + 1][None, :], over[stage], np.inf).min()
            for stage in range(problem.stage_count)
        ]
    )
    stage = int(lacking.argmin())
    if np.isfinite(lacking[stage]):
        return Misfit(stage=stage, lacking_bytes=float(lacking[stage]))
    held = [bool(ahead[stage + 1].any()) for stage in range(problem.stage_count)]
    first = held.index(False) if False in held else problem.stage_count - 1
    return Misfit(stage=first, lacking_bytes=None)


def bound_splits(problem: SplitProblem, splits: I64) -> F64:
    """Return a time for each split that no order of its passes can beat."""
    layers, stages = problem.layers, problem.stages
    forward, backward, weight = (
        seconds_of_splits(problem, splits, of_layers, of_stages)
        for of_layers, of_stages in (
            (layers.forward, stages.forward),
            (layers.backward, stages.backward),
            (layers.weight, stages.weight),
        )
    )
    both = forward + backward
    away = np.cumsum(both, axis=1) - both
    bounds = [both.sum(axis=1), (problem.microbatches * both + away).max(axis=1)]
    for rank in range(problem.ranks):
        mine = np.flatnonzero(problem.rank == rank)
        first, last = int(mine[0]), int(mine[-1])
        waited = both[:, mine].sum(axis=1)
        lead = forward[:, :first].sum(axis=1)
        back = backward[:, :first].sum(axis=1)
        on = 0.0 if problem.trains else forward[:, last + 1 :].sum(axis=1)
        bounds += [
            problem.microbatches * waited + lead + back + on,
            problem.microbatches * (waited + weight[:, mine].sum(axis=1)) + lead,
        ]
    if problem.turns is not None:
        after = both.sum(axis=1, keepdims=True) - both - away
        of_stages = (forward.T, backward.T, after.T)
        spans = span_at_least(problem.turns, problem.microbatches, *of_stages)
        bounds.append((spans.T + away).max(axis=1))
    best: F64 = np.max(bounds, axis=0)
    return best


def bound_all(problem: SplitProblem) -> float:
    """Return a time that no split can beat, whatever the order."""
    return max(_bound_by_path(problem), _bound_by_stages(problem), _bound_by_average(problem))


def blocks_bound(problem: SplitProblem) -> F64:
    """Return, of each stage with layers i to j - 1, a time that no run can beat: [stage, i, j]."""
    layers, stages, m = problem.layers, problem.stages, problem.microbatches
    to_and_fro = layers.forward + layers.backward, stages.forward + stages.backward
    waited = seconds_of_blocks(problem, *to_and_fro)
    whole = seconds_of_blocks(problem, layers.whole, stages.whole)
    lead = least_before(problem, layers.forward, stages.forward)
    both = least_before(problem, *to_and_fro)
    after = least_after(problem, *to_and_fro)[1:, None, :]
    span = m * waited + (0.0 if problem.trains else after)
    if problem.turns is not None:
        forward = seconds_of_blocks(problem, layers.forward, stages.forward)
        span = np.maximum(span, span_at_least(problem.turns, m, forward, waited - forward, after))
    bounds = np.maximum(span + both[:-1, :, None], m * whole + lead[:-1, :, None])
    possible = np.triu(np.ones(bounds.shape[1:], dtype=bool), k=1)
    return np.where(possible & np.isfinite(bounds), bounds, np.inf)


def least_before(problem: SplitProblem, layers: F64, stages: F64) -> F64:
    """Return the least that stages before one can take for the layers before a place."""
    blocks = _possible(seconds_of_blocks(problem, layers, stages))
    least = np.full((problem.stage_count + 1, problem.layer_count + 1), np.inf)
    least[0, 0] = 0.0
    for stage in range(problem.stage_count):
        least[stage + 1] = (least[stage][:, None] + blocks[stage]).min(axis=0)
    return least


def least_after(problem: SplitProblem, layers: F64, stages: F64) -> F64:
    """Return the least that a stage and those after it can take for the layers from a place on."""
    blocks = _possible(seconds_of_blocks(problem, layers, stages))
    least = np.full((problem.stage_count + 1, problem.layer_count + 1), np.inf)
    least[problem.stage_count, problem.layer_count] = 0.0
    for stage in reversed(range(problem.stage_count)):
        least[stage] = (blocks[stage] + least[stage + 1][None, :]).min(axis=1)
    return least


def _bound_by_path(problem: SplitProblem) -> float:
    """Let one microbatch go all the way, alone."""
    layers, stages = problem.layers, problem.stages
    least = least_before(
        problem, layers.forward + layers.backward, stages.forward + stages.backward
    )
    return float(least[-1, -1])


def _bound_by_stages(problem: SplitProblem) -> float:
    """Let each stage be alone on its rank: then the best split for the bound is found exactly."""
    found = min_max(blocks_bound(problem), fits_alone(problem))
    return found.cost if found else float("inf")


def _bound_by_average(problem: SplitProblem) -> float:
    """Let layers be cut anywhere: at best all ranks work from when they can begin to the end."""
    layers, stages = problem.layers, problem.stages
    to_and_fro = layers.forward + layers.backward, stages.forward + stages.backward
    return max(
        _average(problem, to_and_fro, least_before(problem, *to_and_fro)),
        _average(
            problem,
            (layers.whole, stages.whole),
            least_before(problem, layers.forward, stages.forward),
        ),
    )


def _average(problem: SplitProblem, work: tuple[F64, F64], away: F64) -> float:
    """Share work out by speed, while each rank waits for the stages before its first."""
    of_layers, of_stages = work
    waits = away.min(axis=1)
    total, speed = problem.microbatches * float(of_layers.sum()), 0.0
    for rank in range(problem.ranks):
        mine = np.flatnonzero(problem.rank == rank)
        slowness = float(problem.slowness[mine].min())
        fixed = problem.microbatches * float(of_stages[mine].sum())
        total += (float(waits[mine[0]]) + fixed) / slowness
        speed += 1 / slowness
    return total / speed


def _possible(blocks: F64) -> F64:
    """Leave only runs of one layer or more."""
    return np.where(np.triu(np.ones(blocks.shape[1:], dtype=bool), k=1), blocks, np.inf)


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
