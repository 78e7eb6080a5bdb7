"""Costs and caps in → the problem of dividing layers among stages.

A stage's first backward pass waits for a microbatch that goes to the end and comes back. Until then
the stage has only so many forward passes to do. It is the same at the end, the other way round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from debubble.costs.memory import MemoryCosts, predict_peaks
from debubble.errors import UsageError
from debubble.schedules import Order, hold
from debubble.timeline.model import F64, I64


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """By stage, where each is alone on its rank."""

    ahead: I64
    """Forward passes before the first backward one."""
    behind: I64
    """Backward passes after the last forward one; W does not count."""


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


def span_at_least(turns: Turns, microbatches: int, forward: F64, backward: F64, after: F64) -> F64:
    """Return the least from a stage's first pass to its last: the stage first among the axes.

    `after` is what one microbatch takes from the stage to the end and back to it.
    """
    shape = (-1, *(1,) * (forward.ndim - 1))
    ahead, behind = turns.ahead.reshape(shape), turns.behind.reshape(shape)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Seconds of one microbatch, by kind of pass; a number a layer, or a number a stage."""

    forward: F64
    backward: F64
    """B, or I where the backward pass is in two: what the stage before waits for. 0 without."""
    weight: F64
    """W, for which nobody waits. 0 where B is whole."""

    @property
    def whole(self) -> F64:
        """All of it."""
        return self.forward + self.backward + self.weight


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Bytes that layers take, and that there are."""

    layer_bytes: F64
    """By stage and layer: a stage that has more microbatches in flight takes more for a layer."""
    stage_bytes: F64
    """Taken on a stage however few its layers."""
    cap_bytes: F64
    """By rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitProblem:
    """Layers in their order, to be cut into stages of one layer or more."""

    layers: Work
    stages: Work
    """What a stage takes besides its layers: an embedding on the first, a head on the last."""
    rank: I64
    """Who holds each stage."""
    slowness: F64
    """By stage: how many times longer than stated a layer takes there. 2: half as fast."""
    microbatches: int
    room: Room | None = None
    """None: everything fits."""
    turns: Turns | None = None
    """What the order tells besides; None: any order."""

    def __post_init__(self) -> None:
        if self.stage_count > self.layer_count:
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


def split_problem(  # noqa: PLR0913 (one argument for each thing that may differ)
    forward: F64,
    backward: F64 | None = None,
    weight: F64 | None = None,
    *,
    rank: I64,
    microbatches: int,
    stages: Work | None = None,
    slowness: F64 | None = None,
    room: Room | None = None,
    turns: Turns | None = None,
) -> SplitProblem:
    """Fill in what is not there: no backward pass, nothing besides layers, equal devices."""
    nothing = np.zeros(len(forward))
    none = np.zeros(len(rank))
    return SplitProblem(
        layers=Work(
            forward=forward,
            backward=nothing if backward is None else backward,
            weight=nothing if weight is None else weight,
        ),
        stages=stages or Work(forward=none, backward=none, weight=none),
        rank=rank,
        slowness=np.ones(len(rank)) if slowness is None else slowness,
        microbatches=microbatches,
        room=room,
        turns=turns,
    )


def seconds_of_blocks(problem: SplitProblem, layers: F64, stages: F64) -> F64:
    """Return what each stage takes with layers i to j - 1: [stage, i, j], where j > i."""
    sums = _sums(layers)
    lengths = sums[None, None, :] - sums[None, :, None]
    return problem.slowness[:, None, None] * lengths + stages[:, None, None]


def bytes_of_blocks(room: Room) -> F64:
    """Return what each stage holds with layers i to j - 1: [stage, i, j]."""
    sums = np.stack([_sums(row) for row in room.layer_bytes])
    return sums[:, None, :] - sums[:, :, None] + room.stage_bytes[:, None, None]


def seconds_of_splits(problem: SplitProblem, splits: I64, layers: F64, stages: F64) -> F64:
    """Return what each stage takes in each split: [split, stage]."""
    edges = edges_of(splits)
    sums = _sums(layers)
    return problem.slowness * (sums[edges[:, 1:]] - sums[edges[:, :-1]]) + stages


def overflow_of(problem: SplitProblem, splits: I64) -> F64:
    """Return by how many bytes each split overflows, over all ranks; 0 where it fits."""
    over: F64 = overflow_by_rank(problem, splits).sum(axis=1)
    return over


def overflow_by_rank(problem: SplitProblem, splits: I64) -> F64:
    """Return by how many bytes each split overflows each rank."""
    room = problem.room
    if room is None:
        return np.zeros((len(splits), problem.ranks))
    edges = edges_of(splits)
    sums = np.stack([_sums(row) for row in room.layer_bytes])
    stage = np.arange(problem.stage_count)
    held = sums[stage, edges[:, 1:]] - sums[stage, edges[:, :-1]] + room.stage_bytes
    by_rank = np.stack(
        [held[:, problem.rank == rank].sum(axis=1) for rank in range(problem.ranks)], axis=1
    )
    over: F64 = np.maximum(by_rank - room.cap_bytes - _slack(room), 0.0)
    return over


def edges_of(splits: I64) -> I64:
    """Return the first layer of each stage, and the number of layers after the last."""
    start = np.zeros((len(splits), 1), dtype=np.int64)
    return np.concatenate((start, np.cumsum(splits, axis=1)), axis=1)


def fits_alone(problem: SplitProblem) -> NDArray[np.bool_]:
    """Tell where a stage could hold layers i to j - 1 if its rank held nothing else."""
    shape = (problem.stage_count, problem.layer_count + 1, problem.layer_count + 1)
    fits = np.broadcast_to(np.triu(np.ones(shape[1:], dtype=bool), k=1), shape)
    if problem.room is None:
        return fits
    caps = problem.room.cap_bytes[problem.rank] + _slack(problem.room)[problem.rank]
    return fits & (bytes_of_blocks(problem.room) <= caps[:, None, None])


def _slack(room: Room) -> F64:
    """Return what sums of floats may be off by: a layer that just fits does fit."""
    slack: F64 = 1e-9 * np.abs(room.cap_bytes)
    return slack


def _sums(values: F64) -> F64:
    return np.concatenate((np.zeros(1), np.cumsum(values)))


def room_for(
    costs: MemoryCosts,
    order: Order,
    *,
    layers: int,
    limit_bytes: Sequence[float],
    token_scale: float = 1.0,
) -> Room:
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
        mine = list(held.stages)
        each[mine] = costs.layer_static_bytes + level[row]
        fixed[mine] = (peak.peak_bytes - float(each[mine].sum()) * layers / stages) / len(mine)
    return Room(
        layer_bytes=np.repeat(each[:, None], layers, axis=1),
        stage_bytes=fixed,
        cap_bytes=np.array(limit_bytes, dtype=np.float64),
    )
