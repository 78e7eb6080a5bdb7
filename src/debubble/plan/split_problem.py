"""Costs and caps in → the problem of dividing layers among stages, and what no split can beat.

A rank has to do all of its passes. Before its first, a microbatch comes through the stages before
it; after its last backward pass it has to go back through them. Forward only, it goes on through
the stages after it. Where the order is known, so is how long a stage waits to turn. Transfers are
taken to be free, so that what is said holds for any link.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from debubble.errors import UsageError
from debubble.simulate.costs.memory import MemoryCosts, predict_peaks
from debubble.timeline.model import F64, I64
from debubble.timeline.schedules import Order, hold

Part = Literal["forward", "backward", "weight", "round_trip", "whole"]
"""Of the work of a microbatch: a field or property of `Work`."""
Flags = NDArray[np.bool_]
# Splits whose bounds are worked out at a time: what they take fits a processor's cache.
_BOUND_AT_ONCE = 500
_EVERY = slice(None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Seconds of one microbatch, by kind of pass; a number a layer, or a number a stage."""

    forward: F64
    backward: F64
    """B, or I where the backward pass is in two: what the stage before waits for. 0 without."""
    weight: F64
    """W, for which nobody waits. 0 where B is whole."""

    @property
    def round_trip(self) -> F64:
        """What a microbatch spends here on its way to the end and back."""
        return self.forward + self.backward

    @property
    def whole(self) -> F64:
        """All of it."""
        return self.forward + self.backward + self.weight


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitMemory:
    """Bytes that layers take, and that there are."""

    layer_bytes: F64
    """By stage and layer: a stage that has more microbatches in flight takes more for a layer."""
    stage_bytes: F64
    """Taken on a stage however few its layers."""
    cap_bytes: F64
    """By rank."""

    @property
    def most_bytes(self) -> F64:
        """The caps, and what sums of floats may be off by: a layer that just fits does fit."""
        return self.cap_bytes + 1e-9 * np.abs(self.cap_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """By stage, where each is alone on its rank."""

    ahead: I64
    """Forward passes before the first backward one."""
    behind: I64
    """Backward passes after the last forward one; W does not count."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SplitProblem:
    """Layers in their order, to be cut into stages."""

    layers: Work
    stages: Work
    """What a stage takes besides its layers: an embedding on the first, a head on the last."""
    rank: I64
    """Who holds each stage."""
    slowness: F64
    """By stage: how many times longer than stated a layer takes there. 2: half as fast."""
    microbatches: int
    least: I64
    """By stage: the fewest layers, 1; or 0 where it has something else to do, such as a head."""
    memory: SplitMemory | None = None
    """None: everything fits."""
    turns: Turns | None = None
    """What the order tells besides; None: any order."""

    def __post_init__(self) -> None:
        if self.least.sum() > self.layer_count:
            raise UsageError(
                f"{self.layer_count} layers cannot fill {self.stage_count} stages",
                hint="a stage has one layer or more",
            )

    @property
    def stage_count(self) -> int:
        """How many stages there are to fill."""
        return len(self.rank)

    @property
    def layer_count(self) -> int:
        """How many layers there are."""
        return len(self.layers.forward)

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return int(self.rank.max()) + 1

    @property
    def one_stage_a_rank(self) -> bool:
        """Whether no rank holds two stages."""
        return self.ranks == self.stage_count

    @property
    def trains(self) -> bool:
        """Whether anything goes backward."""
        return bool((self.layers.backward + self.layers.weight > 0).any())

    def work(self, part: Part) -> tuple[F64, F64]:
        """Return a part of the work, of each layer and of each stage besides."""
        return getattr(self.layers, part), getattr(self.stages, part)


def split_problem(  # noqa: PLR0913 (one argument for each thing that may differ)
    forward: F64,
    backward: F64 | None = None,
    weight: F64 | None = None,
    *,
    rank: I64,
    microbatches: int,
    stages: Work | None = None,
    slowness: F64 | None = None,
    least: I64 | None = None,
    memory: SplitMemory | None = None,
    turns: Turns | None = None,
) -> SplitProblem:
    """Fill in what is not there: no backward pass, nothing besides layers, equal devices."""
    nothing, none = np.zeros(len(forward)), np.zeros(len(rank))
    return SplitProblem(
        layers=Work(
            forward=forward,
            backward=nothing if backward is None else backward,
            weight=nothing if weight is None else weight,
        ),
        stages=stages or Work(forward=none, backward=none, weight=none),
        rank=rank,
        slowness=np.ones(len(rank)) if slowness is None else slowness,
        least=np.ones(len(rank), dtype=np.int64) if least is None else least,
        microbatches=microbatches,
        memory=memory,
        turns=turns,
    )


def split_memory(
    costs: MemoryCosts,
    order: Order,
    *,
    layers: int,
    limit_bytes: Sequence[float],
    token_scale: float = 1.0,
) -> SplitMemory:
    """Take each rank at the moment of its peak, with layers in equal parts.

    Another split may move that moment where a rank has several stages: ask `predict_peaks` about
    the split that is chosen.
    """
    stages = 1 + max(action.stage for actions in order for action in actions)
    each, fixed = np.zeros(stages), np.zeros(stages)
    equal = [layers / stages] * stages
    peaks = predict_peaks(costs, order, layers=equal, token_scale=token_scale)
    for actions, peak in zip(order, peaks, strict=True):
        held = hold(actions)
        activation = token_scale * costs.layer_activation_bytes
        level = (
            activation * (held.in_flight + costs.halfway_share * held.halfway)
            + costs.layer_gradient_bytes * held.reduced
        )
        row = int(level.sum(axis=1).argmax())
        own_slots = list(held.stages)
        each[own_slots] = costs.layer_static_bytes + level[row]
        fixed[own_slots] = (peak.peak_bytes - float(each[own_slots].sum()) * layers / stages) / len(
            own_slots
        )
    return SplitMemory(
        layer_bytes=np.repeat(each[:, None], layers, axis=1),
        stage_bytes=fixed,
        cap_bytes=np.array(limit_bytes, dtype=np.float64),
    )


def turns_of(order: Order) -> Turns | None:
    """Count; None where a rank has several stages, or nothing goes backward."""
    ahead, behind = [], []
    for rank, actions in enumerate(order):
        kinds = "".join(action.kind for action in actions).replace("I", "B").replace("W", "")
        if "B" not in kinds or {action.stage for action in actions} != {rank}:
            return None
        ahead.append(kinds.index("B"))
        behind.append(len(kinds) - 1 - kinds.rindex("F"))
    return Turns(ahead=np.array(ahead), behind=np.array(behind))


def min_max(blocks: F64, fits: Flags) -> tuple[tuple[int, ...], float] | None:
    """Return the split with the least maximum of `blocks[stage, i, j]`, and that; None: none fits.

    It is exact: the best that splits can do for their most expensive stage.
    """
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
    return tuple(reversed(split)), float(best[-1])


def bound_splits(problem: SplitProblem, splits: I64) -> F64:
    """Return a time for each split that no order of its passes can beat."""
    parts = range(0, len(splits), _BOUND_AT_ONCE)
    return np.concatenate(
        [_bound_some(problem, splits[begin : begin + _BOUND_AT_ONCE]) for begin in parts]
    )


def _bound_some(problem: SplitProblem, splits: I64) -> F64:
    m = problem.microbatches
    forward, backward, weight = (
        _seconds_of_splits(problem, splits, part) for part in ("forward", "backward", "weight")
    )
    both = forward + backward
    # What one microbatch takes there and back before it is at each stage, and forward through it.
    away, through = np.cumsum(both, axis=1) - both, np.cumsum(forward, axis=1)
    # The stages of each rank follow each other here.
    of_rank = np.argsort(problem.rank, kind="stable")
    count = np.bincount(problem.rank)
    begin = np.cumsum(count) - count
    first, last = of_rank[begin], of_rank[begin + count - 1]
    waited, later = np.zeros((2, len(splits), problem.ranks))
    for number in range(int(count.max())):
        ranks = np.flatnonzero(count > number)
        waited[:, ranks] += both[:, of_rank[begin[ranks] + number]]
        later[:, ranks] += weight[:, of_rank[begin[ranks] + number]]
    on = 0.0 if problem.trains else through[:, -1:] - through[:, last]
    bounds = [
        both.sum(axis=1),
        (m * both + away).max(axis=1),
        (m * waited + away[:, first] + on).max(axis=1),
        (m * (waited + later) + through[:, first] - forward[:, first]).max(axis=1),
    ]
    if problem.turns is not None:
        after = both.sum(axis=1, keepdims=True) - both - away
        spans = _span_at_least(problem.turns, m, forward.T, backward.T, after.T)
        bounds.append((spans.T + away).max(axis=1))
    best: F64 = np.max(bounds, axis=0)
    return best


def bound_all(problem: SplitProblem) -> float:
    """Return a time that no split can beat, whatever the order: the largest of four bounds.

    It is infinite where no split fits, stage by stage.
    """
    lead, both = _least_before(problem, "forward"), _least_before(problem, "round_trip")
    alone = min_max(bound_blocks(problem), fits_alone(problem))
    return max(
        float(both[-1, -1]),  # one microbatch goes all the way, alone
        alone[1] if alone else float("inf"),  # each stage is alone on its rank
        _bound_by_average(problem, "round_trip", both),
        _bound_by_average(problem, "whole", lead),
    )


@lru_cache(maxsize=1)
def bound_blocks(problem: SplitProblem) -> F64:
    """Return, of each stage with layers i to j - 1, a time that no run can beat: [stage, i, j]."""
    m = problem.microbatches
    lead, both = _least_before(problem, "forward"), _least_before(problem, "round_trip")
    after = _least_after(problem, "round_trip")[1:, None, :]
    bounds = np.full(
        (problem.stage_count, problem.layer_count + 1, problem.layer_count + 1), np.inf
    )
    # The stages before it hold at least so many layers, those after it leave so many.
    begins = np.cumsum(problem.least) - problem.least
    most = max(-1, problem.layer_count - int(problem.least.sum()))
    # One stage at a time: what it takes fits a processor's cache.
    for stage, begin in enumerate(begins.tolist()):
        one, first = slice(stage, stage + 1), slice(begin, begin + most + 1)
        end = slice(begin + int(problem.least[stage]), begin + int(problem.least[stage]) + most + 1)
        waited = seconds_of_blocks(problem, "round_trip", one, first, end)
        whole = seconds_of_blocks(problem, "whole", one, first, end)
        behind = after[one, :, end]
        span = m * waited + (0.0 if problem.trains else behind)
        if problem.turns is not None:
            forward = seconds_of_blocks(problem, "forward", one, first, end)
            backward = waited - forward
            at_least = _span_at_least(problem.turns, m, forward, backward, behind, one)
            span = np.maximum(span, at_least)
        bounds[one, first, end] = np.maximum(
            span + both[one, first, None], m * whole + lead[one, first, None]
        )
    return _only_runs(problem, np.where(np.isfinite(bounds), bounds, np.inf))


def _bound_by_average(problem: SplitProblem, part: Part, away: F64) -> float:
    """Let layers be cut anywhere: at best all ranks work from when they can begin to the end.

    Work is shared out by speed, while each rank waits for the stages before its first.
    """
    of_layers, of_stages = problem.work(part)
    waits = away.min(axis=1)
    total, speed = problem.microbatches * float(of_layers.sum()), 0.0
    for rank in range(problem.ranks):
        own_slots = np.flatnonzero(problem.rank == rank)
        slowness = float(problem.slowness[own_slots].min())
        fixed = problem.microbatches * float(of_stages[own_slots].sum())
        total += (float(waits[own_slots[0]]) + fixed) / slowness
        speed += 1 / slowness
    return total / speed


def _span_at_least(  # noqa: PLR0913, PLR0917 (an order, what its passes take, and of which stages)
    turns: Turns,
    microbatches: int,
    forward: F64,
    backward: F64,
    after: F64,
    stages: slice = _EVERY,
) -> F64:
    """Return the least from a stage's first pass to its last: the stage first among the axes.

    A stage's first backward pass waits for a microbatch that goes to the end and comes back, which
    takes `after`. Until then the stage has only so many forward passes to do. It is the same at the
    end, the other way round:

        this stage    F0 F1 .......... B0 F2 B1 F3 B2 .......... B3    ahead 2, behind 2
        those after     └── after ────┘           └── after ────┘
    """
    shape = (-1, *(1,) * (forward.ndim - 1))
    ahead, behind = turns.ahead[stages].reshape(shape), turns.behind[stages].reshape(shape)
    work = microbatches * (forward + backward)
    if turns.ahead[-1] == microbatches:
        # The last stage turns when it has done all: forward and backward are two pipelines.
        return work + after
    mixed = (
        np.maximum(forward + after, ahead * forward)
        + (microbatches - ahead) * forward
        + (microbatches - behind) * backward
        + np.maximum(after + backward, behind * backward)
    )
    apart = after + np.maximum(forward + microbatches * backward, microbatches * forward + backward)
    span: F64 = np.maximum(work, np.where(ahead < microbatches, mixed, apart))
    return span


@lru_cache(maxsize=2)
def _least_before(problem: SplitProblem, part: Part) -> F64:
    """Return the least that the stages before one can take for the layers before a cut."""
    blocks = _only_runs(problem, seconds_of_blocks(problem, part))
    least = np.full((problem.stage_count + 1, problem.layer_count + 1), np.inf)
    least[0, 0] = 0.0
    for stage in range(problem.stage_count):
        least[stage + 1] = (least[stage][:, None] + blocks[stage]).min(axis=0)
    return least


def _least_after(problem: SplitProblem, part: Part) -> F64:
    """Return the least that a stage and those after it can take for the layers from a cut on."""
    blocks = _only_runs(problem, seconds_of_blocks(problem, part))
    least = np.full((problem.stage_count + 1, problem.layer_count + 1), np.inf)
    least[problem.stage_count, problem.layer_count] = 0.0
    for stage in reversed(range(problem.stage_count)):
        least[stage] = (blocks[stage] + least[stage + 1][None, :]).min(axis=1)
    return least


def seconds_of_blocks(
    problem: SplitProblem,
    part: Part,
    of: slice = _EVERY,
    first: slice = _EVERY,
    end: slice = _EVERY,
) -> F64:
    """Return what each stage takes with layers i to j - 1: [stage, i, j], where j >= i."""
    layers, stages = problem.work(part)
    sums = _sums(layers)
    lengths = sums[None, None, end] - sums[None, first, None]
    return problem.slowness[of, None, None] * lengths + stages[of, None, None]


def _seconds_of_splits(problem: SplitProblem, splits: I64, part: Part) -> F64:
    """Return what each stage takes in each split: [split, stage]."""
    layers, stages = problem.work(part)
    edges, sums = _edges_of(splits), _sums(layers)
    return problem.slowness * (sums[edges[:, 1:]] - sums[edges[:, :-1]]) + stages


def fits_alone(problem: SplitProblem) -> Flags:
    """Tell where a stage could hold layers i to j - 1 if its rank held nothing else."""
    fits = _runs(problem)
    if problem.memory is None:
        return fits
    most = problem.memory.most_bytes[problem.rank]
    return fits & (_bytes_of_blocks(problem.memory) <= most[:, None, None])


def overflow_of(problem: SplitProblem, splits: I64) -> F64:
    """Return by how many bytes each split overflows, over all ranks; 0 where it fits."""
    over: F64 = overflow_by_rank(problem, splits).sum(axis=1)
    return over


def overflow_by_rank(problem: SplitProblem, splits: I64) -> F64:
    """Return by how many bytes each split overflows each rank."""
    memory = problem.memory
    if memory is None:
        return np.zeros((len(splits), problem.ranks))
    edges = _edges_of(splits)
    sums = np.stack([_sums(row) for row in memory.layer_bytes])
    stage = np.arange(problem.stage_count)
    held = sums[stage, edges[:, 1:]] - sums[stage, edges[:, :-1]] + memory.stage_bytes
    by_rank = np.stack(
        [held[:, problem.rank == rank].sum(axis=1) for rank in range(problem.ranks)], axis=1
    )
    over: F64 = np.maximum(by_rank - memory.most_bytes, 0.0)
    return over


def _bytes_of_blocks(memory: SplitMemory) -> F64:
    """Return what each stage holds with layers i to j - 1: [stage, i, j]."""
    sums = np.stack([_sums(row) for row in memory.layer_bytes])
    return sums[:, None, :] - sums[:, :, None] + memory.stage_bytes[:, None, None]


def _runs(problem: SplitProblem) -> Flags:
    """Tell which runs of layers i to j - 1 are enough for a stage: [stage, i, j]."""
    edges = np.arange(problem.layer_count + 1)
    lengths = edges[None, :] - edges[:, None]
    runs: Flags = lengths[None] >= problem.least[:, None, None]
    return runs


def _only_runs(problem: SplitProblem, blocks: F64) -> F64:
    """Leave only runs of as many layers as a stage has at least."""
    return np.where(_runs(problem), blocks, np.inf)


def _edges_of(splits: I64) -> I64:
    """Return the first layer of each stage, and the number of layers after the last."""
    start = np.zeros((len(splits), 1), dtype=np.int64)
    return np.concatenate((start, np.cumsum(splits, axis=1)), axis=1)


def _sums(values: F64) -> F64:
    return np.concatenate((np.zeros(1), np.cumsum(values)))
