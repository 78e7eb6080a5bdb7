"""A timeline's memory curve in → what it is held for, and the peak of any order.

A rank holds what its layers are made of, their gradients from the first backward pass on, the
activations of microbatches in flight, and for each microbatch of a step what the framework keeps:
receive buffers, outputs, the batch itself. One run tells all but the last, for which its messages
stand in; two runs with different numbers of microbatches tell that, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import floor
from statistics import median

import numpy as np

from debubble.errors import UsageError
from debubble.schedules import Action, Order, hold
from debubble.timeline.model import F64, RankTimeline, Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """What the allocator of one rank was seen to hold."""

    peak_bytes: float
    """While passes ran."""
    static_bytes: float
    """With no microbatch in flight; gradients are in it."""
    gradient_bytes: float
    """0 where they never go, and where there are none."""
    per_microbatch_bytes: float
    """Of one chunk."""
    halfway_bytes: float
    """More than that once it had I and waits for W."""
    transient_bytes: float
    received_bytes: float
    """Of one microbatch, over all its messages: where buffers are kept, so much of them."""
    layers: tuple[int, ...] | None
    """Of each of its stages; None where they could not be counted."""
    between_peak_bytes: float = 0.0
    """Between the passes of two steps: an optimizer's, and what it works with."""
    reserved_bytes: float | None = None
    """The most that the allocator took from the device, used or not."""
    limit_bytes: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRun:
    """One measured run of a pipeline."""

    order: Order
    ranks: tuple[RankMemory, ...]
    message_bytes: float
    """Of one microbatch between two stages."""

    @property
    def microbatches(self) -> int:
        """How many microbatches a step had."""
        return microbatches_of(self.order)


def microbatches_of(order: Order) -> int:
    """Return how many microbatches an order has."""
    return 1 + max(action.microbatch for actions in order for action in actions)


def last_stage(order: Order) -> int:
    """Return the number of an order's last stage."""
    return max(action.stage for actions in order for action in actions)


def has_last(order: Order, position: int) -> bool:
    """Return whether a rank holds the last stage."""
    last = last_stage(order)
    return any(action.stage == last for action in order[position])


def memory_run(timeline: Timeline, pipeline: int, order: Order) -> MemoryRun:
    """Take what a timeline tells of memory."""
    ranks = sorted(timeline.ranks_of(pipeline), key=lambda rank: min(rank.stages))
    received = [_received(timeline, rank.rank) / microbatches_of(order) for rank in ranks]
    inputs = [_inputs_of(order, position) for position in range(len(order))]
    sizes = [size / count for size, count in zip(received, inputs, strict=True) if count]
    return MemoryRun(
        order=order,
        ranks=tuple(_of_rank(rank, size) for rank, size in zip(ranks, received, strict=True)),
        message_bytes=float(np.median(sizes)) if sizes else 0.0,
    )


def _of_rank(rank: RankTimeline, received: float) -> RankMemory:
    memory = rank.memory
    if memory is None or memory.static_bytes is None or memory.per_microbatch_bytes is None:
        raise UsageError(
            f"rank {rank.rank} does not tell how its memory grows with microbatches",
            hint="capture with profile_memory=True, whole steps of two microbatches or more",
        )
    counted = {one.stage: one.layers for one in rank.layers}
    return RankMemory(
        peak_bytes=memory.passes_peak_bytes or memory.peak_bytes,
        between_peak_bytes=memory.between_peak_bytes or 0,
        static_bytes=memory.static_bytes,
        gradient_bytes=memory.gradient_bytes or 0,
        per_microbatch_bytes=memory.per_microbatch_bytes,
        halfway_bytes=memory.halfway_bytes or 0,
        transient_bytes=memory.transient_bytes or 0,
        received_bytes=received,
        layers=tuple(counted[stage] for stage in rank.stages)
        if set(counted) >= set(rank.stages)
        else None,
        reserved_bytes=memory.peak_reserved_bytes,
        limit_bytes=memory.limit_bytes,
    )


def _received(timeline: Timeline, rank: int) -> float:
    """Return the bytes that came to a rank in a step."""
    transfers = timeline.transfers
    mine = transfers.destination == rank
    steps = len(np.unique(transfers.step[mine]))
    return float(transfers.message_bytes[mine].sum()) / max(steps, 1)


def _inputs_of(order: Order, position: int) -> int:
    """Return how many messages of a microbatch come to a rank from other ranks."""
    holder = {action.stage: rank for rank, actions in enumerate(order) for action in actions}
    trains = any(action.kind != "F" for action in order[position])
    mine = [stage for stage, rank in holder.items() if rank == position]
    ahead = sum(holder.get(stage - 1, position) != position for stage in mine)
    behind = sum(holder.get(stage + 1, position) != position for stage in mine) if trains else 0
    return ahead + behind


# Torch keeps a microbatch's whole graph until W, and from I on the gradients of its outputs as
# well: so much more of its activations, where no run with I and W was measured.
HALFWAY_SHARE = 0.5
# A weight gradient alone has the gradients of two weights at hand, a backward pass those of one:
# so much more work space, of a backward pass's. Measured.
_SPLIT_WORK_SPACE = 0.37
# The batch as the loop makes it: inputs and targets. More than these two are something else.
_MOST_BATCHES = 2
# Gradients are fitted to within a few percent; optimizer states are whole multiples of them.
_GRADIENT_TOLERANCE = 1.05
# In bf16 with states in float32, gradients are a ninth of what a layer holds, or more.
_LEAST_GRADIENTS = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCosts:
    """What one rank holds besides its layers."""

    fixed_bytes: float
    """Whatever the number of layers and microbatches; the work space of a pass is in it."""
    transient_bytes: float
    """That work space."""
    buffer_bytes: float
    """For each microbatch of a step, in flight or not, beyond its messages' buffers."""
    activation_bytes: float
    """For each microbatch in flight, beyond its layers and the last stage's loss."""
    gradient_bytes: float
    """Beyond its layers."""
    layers: tuple[int, ...] | None
    """Of each stage, in the first run."""
    between_bytes: float = 0.0
    """What it holds at most between the passes of two steps, as an optimizer's step does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCosts:
    """What memory is held for; the layer's shares are 0 where layers could not be counted."""

    ranks: tuple[RankCosts, ...]
    layer_static_bytes: float
    """Parameters and optimizer state of a layer."""
    layer_between_bytes: float
    """Of what a rank holds at most between the passes of two steps, that of a layer."""
    layer_gradient_bytes: float
    layer_activation_bytes: float
    """Of a layer, for each microbatch in flight."""
    loss_activation_bytes: float
    """Of the last stage, for each microbatch in flight, beyond its layers."""
    halfway_share: float
    """What a microbatch takes more between I and W, as a share of its activations."""
    message_bytes: float
    assumptions: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakMemory:
    """What a rank is predicted to hold at most."""

    peak_bytes: float
    activation_bytes: float
    """Of it, for microbatches in flight, at the peak."""
    buffer_bytes: float
    """Of it, for each microbatch of the step."""


def fit_memory(
    runs: Sequence[MemoryRun], *, layer_static_bytes: float | None = None
) -> MemoryCosts:
    """Fit one run, or several of the same model on as many ranks."""
    if len({len(run.ranks) for run in runs}) != 1:
        raise UsageError(
            "these runs do not have the same number of ranks",
            hint="give runs of one model on one number of ranks",
        )
    said: list[str] = []
    trains = any(one.kind != "F" for run in runs for actions in run.order for one in actions)
    # Forward only, a microbatch leaves its output behind, and nothing of its layers.
    activation = _per_layer(runs, "per_microbatch_bytes", whole=False) if trains else 0.0
    gradient = _per_layer(runs, "gradient_bytes", whole=True)
    if layer_static_bytes is None:
        layer_static_bytes = _static_a_layer(runs, gradient, said)
    if len({run.microbatches for run in runs}) == 1:
        said.append("for each microbatch a rank keeps its receive buffers and its share of a batch")
    costs = MemoryCosts(
        ranks=(),
        layer_static_bytes=layer_static_bytes,
        layer_between_bytes=_per_layer(runs, "between_peak_bytes", whole=True),
        layer_gradient_bytes=gradient,
        layer_activation_bytes=activation,
        loss_activation_bytes=_beyond_layers_of_last(runs, activation),
        halfway_share=_halfway(runs),
        message_bytes=median(run.message_bytes for run in runs),
        assumptions=tuple(said),
    )
    positions = range(len(runs[0].ranks))
    return replace(costs, ranks=tuple(_fit_rank(runs, position, costs) for position in positions))


def recomputed(costs: MemoryCosts) -> MemoryCosts:
    """Return what is held where backward passes recompute: of a layer, what it is given."""
    least = min(costs.layer_activation_bytes, costs.message_bytes)
    return replace(costs, layer_activation_bytes=least)


def predict_peaks(
    costs: MemoryCosts,
    order: Order,
    *,
    layers: Sequence[float] | None = None,
    token_scale: float = 1.0,
) -> tuple[PeakMemory, ...]:
    """Predict the peak of each rank in another order, with other layers a stage.

    Without `layers` each rank keeps those it has. `token_scale` is the size of a microbatch
    against the measured one.
    """
    if len(order) != len(costs.ranks):
        raise UsageError(
            f"{len(costs.ranks)} ranks were measured, not {len(order)}",
            hint="memory is predicted for the measured number of ranks",
        )
    stages = 1 + last_stage(order)
    if layers is not None and len(layers) != stages:
        raise UsageError(
            f"{len(layers)} numbers of layers do not fit {stages} stages",
            hint="give one for each stage",
        )
    return tuple(
        _predict_rank(costs, rank, order, position, layers=layers, scale=token_scale)
        for position, rank in enumerate(costs.ranks)
    )


def _predict_rank(  # noqa: PLR0913 (a rank, its place, and the two things that may change)
    costs: MemoryCosts,
    rank: RankCosts,
    order: Order,
    position: int,
    *,
    layers: Sequence[float] | None,
    scale: float,
) -> PeakMemory:
    mine = _layers_here(rank.layers, order, position, layers)
    highest, activation = _highest(costs, rank, order, position, mine=mine, scale=scale)
    more_buffers = costs.message_bytes * _stage_ends(order, position)
    buffers = scale * microbatches_of(order) * (rank.buffer_bytes + more_buffers)
    static = sum(mine) * costs.layer_static_bytes
    fixed = rank.fixed_bytes - (1 - scale) * rank.transient_bytes
    moved = sum(mine) - sum(rank.layers or mine)
    between = rank.between_bytes + costs.layer_between_bytes * moved
    return PeakMemory(
        peak_bytes=max(fixed + static + buffers + highest, between),
        activation_bytes=activation,
        buffer_bytes=buffers,
    )


def _highest(  # noqa: PLR0913 (as above)
    costs: MemoryCosts,
    rank: RankCosts,
    order: Order,
    position: int,
    *,
    mine: Sequence[float],
    scale: float,
) -> tuple[float, float]:
    """Walk over a rank's passes; return the most of activations and gradients, and the former."""
    held = hold(order[position])
    each = rank.activation_bytes + costs.layer_activation_bytes * np.array(mine)
    each[np.array(held.stages) == last_stage(order)] += costs.loss_activation_bytes
    gradients = rank.gradient_bytes / len(mine) + costs.layer_gradient_bytes * np.array(mine)
    activation = scale * ((held.in_flight + costs.halfway_share * held.halfway) @ each)
    kept = scale * costs.message_bytes * _kept_messages(order, position)
    work_space = scale * rank.transient_bytes * _more_work_space(order[position])
    level = activation + kept + held.reduced @ gradients + work_space
    if has_last(order, position):
        # The outputs are put together once more when all are there; no pass works then.
        outputs = costs.message_bytes * microbatches_of(order)
        level[-1] += scale * max(outputs - rank.transient_bytes, 0.0)
    row = int(level.argmax())
    return float(level[row]), float(activation[row])


def _kept_messages(order: Order, position: int) -> F64:
    """Count what torch keeps until a step ends, a row before a rank's first pass and after each.

    The outputs of the last stage; of each I the gradients that it sent to another rank. Forward
    only, outputs are what is in flight.
    """
    last = last_stage(order)
    mine = {action.stage for action in order[position]}
    trains = any(action.kind != "F" for action in order[position])
    keeps = [
        (action.kind == "F" and action.stage == last and trains)
        or (action.kind == "I" and action.stage - 1 not in mine)
        for action in order[position]
    ]
    return np.concatenate(([0.0], np.cumsum(keeps)))


def _more_work_space(actions: Sequence[Action]) -> F64:
    """Return by what share the pass after each row needs more work space than others do."""
    split = {action.stage for action in actions if action.kind == "I"}
    more = [_SPLIT_WORK_SPACE * (one.kind == "W" and one.stage in split) for one in actions]
    return np.array([*more, 0.0])


def _layers_here(
    measured: tuple[int, ...] | None, order: Order, position: int, layers: Sequence[float] | None
) -> list[float]:
    """Return the layers of each stage of a rank: as given, or as many as it has."""
    stages = sorted({action.stage for action in order[position]})
    if layers is not None:
        return [float(layers[stage]) for stage in stages]
    if measured is not None and len(measured) == len(stages):
        return [float(count) for count in measured]
    return [sum(measured or ()) / len(stages)] * len(stages)


def _stage_ends(order: Order, position: int) -> int:
    """Return how many inputs of a microbatch the stages of a rank have, over all directions.

    Torch makes a buffer for each, also where the neighbouring stage is on the same rank.
    """
    last = last_stage(order)
    stages = {action.stage for action in order[position]}
    trains = any(action.kind != "F" for action in order[position])
    return sum((stage > 0) + (trains and stage < last) for stage in stages)


def _fit_rank(runs: Sequence[MemoryRun], position: int, costs: MemoryCosts) -> RankCosts:
    """Let what is left of the peaks, without layers and activations, be a line over microbatches.

    Of one number of microbatches the line's slope is the buffers that messages need.
    """
    seen = [run.ranks[position] for run in runs]
    bare = RankCosts(
        fixed_bytes=0.0,
        transient_bytes=_work_space(runs, position),
        buffer_bytes=0.0,
        activation_bytes=median(
            _beyond_layers(run, position, costs.layer_activation_bytes)
            - costs.loss_activation_bytes * has_last(run.order, position) / _chunks(run, position)
            for run in runs
        ),
        gradient_bytes=median(
            one.gradient_bytes - costs.layer_gradient_bytes * sum(one.layers or ()) for one in seen
        ),
        layers=seen[0].layers,
    )
    left = [
        one.peak_bytes
        - _predict_rank(
            costs,
            bare,
            run.order,
            position,
            layers=_all_layers(run),
            scale=1.0,
        ).peak_bytes
        for run, one in zip(runs, seen, strict=True)
    ]
    counts = [run.microbatches for run in runs]
    if len(set(counts)) == 1:
        slope = _batch_share(runs[0], position, costs)
    else:
        columns = np.stack((np.ones(len(counts)), counts), axis=1)
        slope = float(np.linalg.lstsq(columns, np.array(left), rcond=None)[0][1])
    fixed = float(np.mean([one - slope * m for one, m in zip(left, counts, strict=True)]))
    between = seen[0].between_peak_bytes
    return replace(bare, fixed_bytes=fixed, buffer_bytes=slope, between_bytes=between)


def _work_space(runs: Sequence[MemoryRun], position: int) -> float:
    """Return what a rank's passes need for a moment.

    Forward only, the last stage's peak may be where outputs are put together: other ranks tell.
    """
    mine = median(run.ranks[position].transient_bytes for run in runs)
    if any(rank.gradient_bytes for run in runs for rank in run.ranks):
        return mine
    others = (rank.transient_bytes for run in runs for rank in run.ranks)
    return min(mine, median(others))


def _batch_share(run: MemoryRun, position: int, costs: MemoryCosts) -> float:
    """Return what a rank holds of the batch itself for each microbatch, in messages' sizes.

    A loop makes a batch's inputs and targets, on all ranks often. Of a training run, whatever is
    held beyond layers and buffers may be them. Forward only, nothing tells layers from the rest:
    inputs alone are taken to be there.
    """
    rank = run.ranks[position]
    if not costs.layer_gradient_bytes or not rank.layers:
        return costs.message_bytes
    layers = sum(rank.layers) * (costs.layer_static_bytes + costs.layer_gradient_bytes)
    buffers = run.microbatches * costs.message_bytes * _stage_ends(run.order, position)
    batch = run.microbatches * costs.message_bytes
    if not batch:
        return 0.0
    left = (rank.static_bytes - layers - buffers) / batch
    return costs.message_bytes * min(max(floor(left), 0), _MOST_BATCHES)


def _all_layers(run: MemoryRun) -> list[int]:
    """Return the layers of every stage of a run; 0 where they are not known."""
    counts: dict[int, int] = {}
    for actions, rank in zip(run.order, run.ranks, strict=True):
        stages = sorted({action.stage for action in actions})
        counts.update(zip(stages, rank.layers or (0,) * len(stages), strict=True))
    return [counts[stage] for stage in range(len(counts))]


def _beyond_layers(run: MemoryRun, position: int, layer: float) -> float:
    """Return what a microbatch in flight holds on a rank that is not of its layers."""
    rank = run.ranks[position]
    return rank.per_microbatch_bytes - layer * _mean_layers(rank)


def _beyond_layers_of_last(runs: Sequence[MemoryRun], layer: float) -> float:
    """Return the same of the last stage, where all that is more than other ranks have is its."""
    beyond = []
    for run in runs:
        ranks = range(len(run.ranks))
        (holder,) = (position for position in ranks if has_last(run.order, position))
        others = [_beyond_layers(run, one, layer) for one in ranks if one != holder]
        usual = median(others) if others else 0.0
        mine = _beyond_layers(run, holder, layer) - usual
        beyond.append(mine * _chunks(run, holder))
    return max(median(beyond), 0.0)


def _chunks(run: MemoryRun, position: int) -> int:
    return len({action.stage for action in run.order[position]})


def _mean_layers(rank: RankMemory) -> float:
    return sum(rank.layers) / len(rank.layers) if rank.layers else 0.0


def _per_layer(runs: Sequence[MemoryRun], what: str, *, whole: bool) -> float:
    """Return the median share of a layer, over the ranks of all runs that hold nothing else."""
    shares = [
        getattr(rank, what) / (sum(rank.layers) if whole else _mean_layers(rank))
        for run in runs
        for rank in _of_layers_alone(run)
        if rank.layers and sum(rank.layers)
    ]
    return median(shares) if shares else 0.0


def _of_layers_alone(run: MemoryRun) -> Sequence[RankMemory]:
    """Return the ranks without embedding and head, the ends of the model; all where none is."""
    last = last_stage(run.order)
    ends = [{0, last} & {action.stage for action in actions} for actions in run.order]
    between = [rank for rank, end in zip(run.ranks, ends, strict=True) if not end]
    return between or run.ranks


def _halfway(runs: Sequence[MemoryRun]) -> float:
    shares = [
        rank.halfway_bytes / rank.per_microbatch_bytes
        for run in runs
        for rank in run.ranks
        if rank.halfway_bytes > 0 and rank.per_microbatch_bytes > 0
    ]
    return median(shares) if shares else HALFWAY_SHARE


def _static_a_layer(runs: Sequence[MemoryRun], gradient: float, said: list[str]) -> float:
    """Return what a layer holds always, its gradients left out.

    Parameters, and every state of the optimizer, are as large as gradients or a whole multiple.
    """
    held = [
        (rank.static_bytes - run.microbatches * rank.received_bytes, rank)
        for run in runs
        for rank in _of_layers_alone(run)
        if rank.layers and sum(rank.layers)
    ]
    if not held:
        said.append("layers could not be counted: what moves with a layer is not known")
        return 0.0
    # Less is not all of them: Megatron keeps gradients in buffers that are always there.
    multiples = [
        static / rank.gradient_bytes
        for static, rank in held
        if rank.gradient_bytes > _LEAST_GRADIENTS * static
    ]
    if gradient > 0 and multiples:
        multiple = floor(min(multiples) * _GRADIENT_TOLERANCE)
        said.append(f"a layer holds {multiple} times its gradients: parameters, states and them")
        return max(multiple - 1, 1) * gradient
    said.append("what is held always, buffers and inputs aside, is taken to be in equal layers")
    inputs = min(run.microbatches * run.message_bytes for run in runs)
    return min(max(static - inputs, 0.0) / sum(rank.layers or ()) for static, rank in held)
