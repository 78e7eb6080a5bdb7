"""The lever of layers: a baseline and a change in → the best split found, a lower bound beside it.

Where there are few splits all are timed. Else: the splits that are best for the most expensive
stage, then steepest descent by the timed latency, one layer at a time from any stage to any other,
and two such moves at once where one gains nothing: with several stages a rank, or caps on memory,
one move often helps only after another. A split that cannot beat the best so far, by its lower
bound, is never timed.

Measured on 96 problems of 32 to 96 layers with uneven layers, heads and memory caps: two moves at
once gained nothing on the 60 with one stage a rank; without them the 36 with several lost up to
4 %, and on some no split was found that fits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import combinations
from math import comb

import numpy as np

from debubble.errors import NoSplitFits, UsageError
from debubble.plan.baseline import Baseline, even_split, stages_of
from debubble.plan.change import Change
from debubble.plan.split_problem import (
    Part,
    SplitMemory,
    SplitProblem,
    Work,
    bound_all,
    bound_blocks,
    bound_splits,
    fits_alone,
    min_max,
    overflow_by_rank,
    overflow_of,
    seconds_of_blocks,
    split_memory,
    split_problem,
    turns_of,
)
from debubble.simulate.costs.passes import PassModel
from debubble.simulate.predict import data_ns, extra_layers, mean_lengths, usual_factor
from debubble.timeline.model import F64, I64, PassKind
from debubble.units import NS_PER_S, show_bytes

# So many splits are timed in a tenth of a second: then the answer is exact.
EXHAUSTIVE_UP_TO = 2000
# Of two moves in a row: ten stages have no more than this; of more stages some are taken.
_MOST_PAIRS = 16_000
# Of those the most promising are timed, by their lower bound.
_MOST_TIMED = 1200
# Of one move: 24 stages have no more than this. Of 64 stages, with 4,000 moves, 300 of the most
# promising led to the same splits as all, on six problems of up to 290 layers.
_MOST_NEAR = 600
# And of a long step so many that their passes, of one kind, are no more than this: 300 of 64 ranks
# and 128 microbatches. Each takes a millisecond there; but some are always timed.
_MOST_PASSES, _FEWEST_TIMED = 2_500_000, 100
# Where stages share memory or may be empty, so many splits are drawn from all over.
_DRAWN = 2000
# Descents begin at the best few seeds: the others mostly end in the same split.
_DESCENTS = 3
# Relative: latencies are sums of floats, and a gain of a rounding error is none.
_ROUNDING = 1e-12
# Passes of all splits that are timed at a time: more fit no cache, and take longer to be given
# memory than to be timed.
_AT_ONCE = 1_000_000
# Ranks of one kind differ by a tenth or two; a layer counted wrongly, by a layer or more.
_MOST_APART = 2.5
# The split in use, or an even one, that takes as long within this is the one to take: repeated runs
# differ by as much, and no prediction tells them apart.
AS_GOOD = 0.03
_MORE_ROOM = "use more ranks, smaller microbatches, or recomputation"

Evaluate = Callable[[I64], F64]
"""Splits, a row each, in → the batch latency of each in seconds."""


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


def best_split(
    baseline: Baseline,
    change: Change,
    *,
    memory: SplitMemory | None = None,
    near: tuple[int, ...] | None = None,
    empty_ends: bool = False,
) -> Partition:
    """Return the best split for a change; the one in use is never bettered by a worse one.

    `memory` stands for what stages may hold; by default for what the change needs. `near` is the
    best split for a like change, which makes the search a short one. With `empty_ends` a first
    stage may be left with the embedding alone, and a last one with the head, where the run shows
    that they have one.
    """
    source = baseline.source
    if source.split is None:
        raise UsageError(
            "the layers of each stage are unknown",
            hint="give --layers, such as 4,4,4,4",
        )
    bases = [
        base
        for (kind, first, _), base in source.passes.base.items()
        if kind == PassKind.F and not first
    ]
    apart = float(np.exp(max(bases) - min(bases))) if bases else 1.0
    if apart > _MOST_APART:
        raise UsageError(
            f"a layer takes {apart:.1f} times as long on one stage as on another: these layers are"
            " not alike",
            hint="give the layers of each stage: --layers",
        )
    problem = _problem_of(baseline, change, sum(source.split), memory, empty_ends=empty_ends)
    given = source.split if problem.stage_count == len(source.split) else None
    timed = time_splits(baseline, change)
    found = find_partition(problem, timed, given=given, near=near)
    for plain in (given, even_split(problem.layer_count, problem.stage_count)):
        if (
            plain is not None
            and plain != found.split
            and not overflow_by_rank(problem, np.array([plain])).any()
        ):
            took = float(timed(np.array([plain]))[0])
            if took <= found.latency_s * (1 + AS_GOOD):
                return replace(found, split=plain, latency_s=took)
    return found


def time_splits(baseline: Baseline, change: Change) -> Evaluate:
    """Return a function from splits, a row each, to their latencies in seconds."""
    what_if = baseline.what_if(change)
    engine, model = baseline.engine(change), baseline.source.passes
    program, stages = engine.program, len(what_if.layers)
    extra = extra_layers(program, model)[:, None]
    unit = mean_lengths(engine, baseline.source, what_if, layers=(1.0,) * stages)
    # What a stage gathers and reduces it waits for, however its layers are cut.
    inside, before = data_ns(program, baseline.source)
    waits = (inside + before)[:, None]
    one_layer = (unit.passes[:, None] - waits) / (1 + extra)

    columns = max(1, _AT_ONCE // len(program.passes))

    def latencies(splits: I64) -> F64:
        found = []
        for begin in range(0, len(splits), columns):
            held = model.priced(splits[begin : begin + columns]).T[program.passes.stage] + extra
            passes = np.rint(one_layer * held + waits).astype(np.int64)
            found.append(engine.windows(replace(unit, passes=passes)))
        return np.concatenate(found) * baseline.correction / NS_PER_S

    return latencies


def ends_in_layers(baseline: Baseline) -> tuple[float, float]:
    """Return what the embedding and the head take of a microbatch, in layers."""
    passes = baseline.source.passes
    kinds = {int(kind) for kind, _, _ in passes.base} & set(map(int, PassKind))
    layer_s = {kind: _layer_s(passes, kind) for kind in kinds}
    whole = sum(layer_s.values())
    first, last = (
        sum(passes.besides_layers(kind)[end] * took for kind, took in layer_s.items()) / whole
        for end in (0, 1)
    )
    return first, last


def _problem_of(
    baseline: Baseline,
    change: Change,
    layers: int,
    memory: SplitMemory | None,
    *,
    empty_ends: bool,
) -> SplitProblem:
    """Write the run as layers to be cut; seeds and bounds are made of it."""
    passes, order = baseline.source.passes, baseline.what_if(change).order
    stages, scale = stages_of(order), baseline.microbatch_scale(change)
    home = {action.stage: rank for rank, actions in enumerate(order) for action in actions}
    often = baseline.correction * usual_factor(baseline.source) * scale
    halves = (PassKind.I, PassKind.W) if passes.splits_backward else (PassKind.B,)
    forward = _layer_s(passes, PassKind.F) * often
    backward = sum(_layer_s(passes, kind) for kind in halves) * often
    more = {kind: np.zeros(stages) for kind in (PassKind.F, PassKind.B)}
    for kind, extra in more.items():
        extra[0], extra[-1] = passes.besides_layers(kind)
    least = np.ones(stages, dtype=np.int64)
    if empty_ends and stages > 1:
        ends = np.minimum(more[PassKind.F], more[PassKind.B])[[0, -1]]
        least[[0, -1]] = np.where(ends > 0, 0, 1)
    now = baseline.source.split
    if now is not None and len(now) == stages:
        least = np.minimum(least, now)
    limits = [
        limit - (others or 0)
        for limit, others in zip(baseline.limits, baseline.others, strict=True)
        if limit is not None
    ]
    if memory is None and baseline.memory is not None and len(limits) == len(baseline.limits):
        memory = split_memory(
            baseline.memory, order, layers=layers, limit_bytes=limits, token_scale=scale
        )
    rank = np.array([home[stage] for stage in range(stages)], dtype=np.int64)
    slowness = _slowness(passes, len(order))[rank]
    prices = passes.priced(np.ones(layers, dtype=np.int64))
    return split_problem(
        prices * forward,
        prices * backward,
        rank=rank,
        microbatches=change.microbatches or baseline.source.microbatches,
        stages=Work(
            forward=more[PassKind.F] * forward * slowness,
            backward=more[PassKind.B] * backward * slowness,
            weight=np.zeros(stages),
        ),
        slowness=slowness,
        least=least,
        memory=memory,
        turns=turns_of(order),
    )


def _layer_s(model: PassModel, kind: int) -> float:
    """Return the least of the ranks: a bound must not exceed the truth."""
    bases = [base for (of, _, _), base in model.base.items() if of == kind]
    return float(np.exp(min(bases))) / NS_PER_S if bases else 0.0


def _slowness(model: PassModel, ranks: int) -> F64:
    """Return how many times as long a layer takes on each rank as on the quickest, at least."""
    quickest: dict[tuple[int, bool], float] = {}
    for (kind, first, _), base in model.base.items():
        quickest[kind, first] = min(base, quickest.get((kind, first), np.inf))
    slower = np.full(ranks, np.inf)
    for (kind, first, rank), base in model.base.items():
        slower[rank] = min(slower[rank], base - quickest[kind, first])
    found: F64 = np.exp(np.where(np.isfinite(slower), slower, 0.0))
    return found


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
    bound_s = bound_all(problem)
    if not np.isfinite(bound_s):
        raise _no_rank_fits(problem, exact=True)
    search = _Search(problem, evaluate, bound_s)
    given_latency = None if given is None else search.time_given(given)
    all_in_all = problem.layer_count + int((1 - problem.least).sum())
    exact = comb(all_in_all - 1, problem.stage_count - 1) <= exhaustive_up_to

    def look_around() -> None:
        if exact:
            search.time(all_splits(problem.layer_count, problem.stage_count, problem.least))
        else:
            search.descend_from_seeds(given, near)

    trusted = not search.undercut
    look_around()
    if trusted and search.undercut:
        look_around()  # what was ruled out is open again
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


def all_splits(layers: int, stages: int, least: I64 | int = 1) -> I64:
    """Return every way to cut layers into stages of one or more, or of `least` of each."""
    fewer = 1 - np.broadcast_to(least, stages)
    layers += int(fewer.sum())  # as if each that may be empty had one layer more
    cuts = np.array(list(combinations(range(1, layers), stages - 1)), dtype=np.int64)
    cuts = cuts.reshape(-1, stages - 1)
    edges = np.zeros((len(cuts), stages + 1), dtype=np.int64)
    edges[:, 1:-1], edges[:, -1] = cuts, layers
    splits: I64 = edges[:, 1:] - edges[:, :-1] - fewer
    return splits


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

    def time(self, splits: I64, most: int | None = None) -> F64:
        """Time those that fit and might be better than the best; the others count as infinite.

        Of more than `most` of them, only the most promising.
        """
        found = np.full(len(splits), np.inf)
        if not len(splits):
            return found
        bounds = bound_splits(self.problem, splits)
        may_win = overflow_of(self.problem, splits) == 0
        if not self.undercut:
            may_win &= bounds < self.latency_s * (1 - _ROUNDING)
        rows = np.flatnonzero(may_win)
        if most is not None:
            passes = self.problem.stage_count * self.problem.microbatches
            most = min(most, max(_FEWEST_TIMED, _MOST_PASSES // passes))
            if len(rows) > most:
                rows = rows[np.argsort(bounds[rows], kind="stable")[:most]]
        keys = {row: splits[row].tobytes() for row in rows.tolist()}
        fresh = {key: row for row, key in keys.items() if key not in self.known}
        if fresh:
            new = list(fresh.values())
            latencies = self.evaluate(splits[new])
            self.timed += len(new)
            floor = np.maximum(bounds[new], self.bound_s) * (1 - 1e-9)
            self.undercut |= bool((latencies < floor).any())
            self.known.update(zip(fresh, latencies.tolist(), strict=True))
        for row, key in keys.items():
            found[row] = self.known[key]
        row = int(found.argmin())
        if found[row] < self.latency_s * (1 - _ROUNDING):
            self.best, self.latency_s = splits[row].copy(), float(found[row])
        return found

    def time_given(self, given: tuple[int, ...]) -> float:
        """Time the split in use even if it does not fit, for comparison."""
        layers, stages = self.problem.layer_count, self.problem.stage_count
        if len(given) != stages or sum(given) != layers or (given < self.problem.least).any():
            raise UsageError(
                f"{','.join(map(str, given))} does not split {layers} layers into {stages} stages",
                hint="give one or more layers for each stage, all of them in all",
            )
        split = np.array([given], dtype=np.int64)
        if overflow_of(self.problem, split)[0] == 0:
            return float(self.time(split)[0])
        self.timed += 1
        return float(self.evaluate(split)[0])

    def descend_from_seeds(
        self, given: tuple[int, ...] | None, near: tuple[int, ...] | None
    ) -> None:
        """Go downhill from the best of a few seeds or, with `near`, from one, and briefly.

        With one stage a rank two moves at once seldom gain: there they are tried from the best.
        """
        seeds = [*([] if near is None else [near]), *_seeds(self.problem, given)]
        splits = np.unique(np.array(seeds, dtype=np.int64), axis=0)
        splits = np.stack([_make_fit(self.problem, split) for split in splits])
        rugged = self.problem.memory is not None or not self.problem.least.all()
        if rugged and not self.problem.one_stage_a_rank:
            splits = np.concatenate((splits, _from_all_over(self.problem)))
        order = np.lexsort((bound_splits(self.problem, splits), self.time(splits, _MOST_TIMED)))
        several = not self.problem.one_stage_a_rank
        for split in splits[order[: _DESCENTS if near is None else 1]]:
            if not self.done and overflow_of(self.problem, split[None])[0] == 0:
                self._descend(split, farther=several and near is None)
        if near is None and not several and self.best is not None and not self.done:
            self._descend(self.best, farther=True)

    def _descend(self, split: I64, *, farther: bool) -> None:
        latency = self.known.get(split.tobytes(), float("inf"))
        while True:
            near = neighbours(split, self.problem.least)
            latencies = self.time(near, _MOST_NEAR)
            if farther and not latencies.min(initial=np.inf) < latency * (1 - _ROUNDING):
                near = _two_moves_away(split, self.problem.least)
                latencies = self.time(near, _MOST_TIMED)
            if not latencies.min(initial=np.inf) < latency * (1 - _ROUNDING):
                return
            row = int(latencies.argmin())
            split, latency = near[row], float(latencies[row])


def _seeds(problem: SplitProblem, given: tuple[int, ...] | None) -> Iterator[tuple[int, ...]]:
    """Yield the given split, an even one, and the best for the longest stage by several costs."""
    if given is not None:
        yield given
    if problem.layer_count >= problem.stage_count:
        yield even_split(problem.layer_count, problem.stage_count)
    halves: tuple[Part, ...] = ("forward", "backward") if problem.trains else ()
    costs = [seconds_of_blocks(problem, "whole"), bound_blocks(problem)]
    fits = fits_alone(problem)
    for cost in (*costs, *(seconds_of_blocks(problem, part) for part in halves)):
        found = min_max(cost, fits)
        if found:
            yield found[0]


def _from_all_over(problem: SplitProblem) -> I64:
    """Return splits drawn at random that fit, always the same ones.

    Where stages share memory, or an end may be empty, no one seed leads there.
    """
    random = np.random.default_rng(problem.stage_count)
    fewer = 1 - problem.least
    layers = problem.layer_count + int(fewer.sum())
    cuts = random.random((_DRAWN, layers - 1)).argsort(axis=1) + 1
    edges = np.zeros((_DRAWN, problem.stage_count + 1), dtype=np.int64)
    edges[:, 1:-1] = np.sort(cuts[:, : problem.stage_count - 1], axis=1)
    edges[:, -1] = layers
    splits = edges[:, 1:] - edges[:, :-1] - fewer
    fitting: I64 = splits[overflow_of(problem, splits) == 0]
    return fitting


def _make_fit(problem: SplitProblem, split: I64) -> I64:
    """Move layers to where they overflow less, as far as that leads."""
    over = float(overflow_of(problem, split[None])[0])
    while over > 0:
        near = neighbours(split, problem.least)
        overflows = overflow_of(problem, near)
        if not overflows.min(initial=np.inf) < over:
            near = _two_moves_away(split, problem.least)
            overflows = overflow_of(problem, near)
        if not overflows.min(initial=np.inf) < over:
            break
        row = int(overflows.argmin())
        split, over = near[row], float(overflows[row])
    return split


def neighbours(split: I64, least: I64 | int = 1) -> I64:
    """Return the splits one move away: a layer from any stage to any other, or a cut moved by two.

    Between the two stages every cut moves, so that only their sizes change.
    """
    near: I64 = split + _moves(len(split))
    kept: I64 = near[(near >= least).all(axis=1) & (near != split).any(axis=1)]
    return kept


def _two_moves_away(split: I64, least: I64) -> I64:
    """Return splits two moves away, or where there are many some of them: always the same ones."""
    near = neighbours(split, least)
    shuffled = np.random.default_rng(len(split)).permutation(len(near))
    some = near[shuffled[: _MOST_PAIRS // max(len(near), 1)]]
    return np.concatenate([near, *(neighbours(other, least) for other in some)])


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


def _no_rank_fits(problem: SplitProblem, *, exact: bool) -> NoSplitFits:
    """Say which rank lacks most, and what, with the split that overflows least."""
    nearest = min(
        (_make_fit(problem, np.array(seed, dtype=np.int64)) for seed in _seeds(problem, None)),
        key=lambda split: float(overflow_of(problem, split[None])[0]),
    )
    lacking = overflow_by_rank(problem, nearest[None])[0]
    said = "no split fits memory" if exact else "no split was found that fits memory"
    return NoSplitFits(
        f"{said}: rank {int(lacking.argmax())} lacks {show_bytes(float(lacking.max()))} with "
        + ",".join(map(str, nearest.tolist())),
        hint=_MORE_ROOM,
    )
