"""A timeline's memory curve in → what it is held for, and the peak of any order.

A rank holds what its layers are made of, their gradients from the first backward pass on, the
activations of microbatches in flight, and for each microbatch of a step what the framework keeps:
receive buffers, outputs, the batch itself. A run tells all but the last, for which its messages
stand in.

What a layer weighs, where it is read from, and what torch keeps until a step ends:
docs/explanation/how-predictions-are-made.md, "Memory".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import floor
from statistics import median

import numpy as np

from debubble.errors import UsageError
from debubble.timeline.model import RankTimeline, Timeline
from debubble.timeline.schedules import Action, Order, hold

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
    uses_buffers_again: bool = False
    """Whether microbatches share what messages are received in: those of Megatron and DeepSpeed."""

    @property
    def microbatches(self) -> int:
        """How many microbatches a step had."""
        return microbatches_of(self.order)


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
    between_keeps_buffers: bool = False
    """Whether there are buffers for each microbatch beside that, as torch's pipelining has."""


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


def memory_run(
    timeline: Timeline, pipeline: int, order: Order, layers: Sequence[int] | None = None
) -> MemoryRun:
    """Take what a timeline tells of memory; `layers` of each stage where they are stated."""
    ranks = sorted(timeline.ranks_of(pipeline), key=lambda rank: min(rank.stages))
    transfers, received = timeline.transfers, []
    for rank in ranks:
        mine = transfers.destination == rank.rank
        steps = max(len(np.unique(transfers.step[mine])), 1)
        in_a_step = float(transfers.message_bytes[mine].sum()) / steps
        received.append(in_a_step / microbatches_of(order))
    inputs = [_inputs_of(order, position) for position in range(len(order))]
    sizes = [size / count for size, count in zip(received, inputs, strict=True) if count]
    return MemoryRun(
        order=order,
        ranks=tuple(
            _of_rank(rank, size, layers) for rank, size in zip(ranks, received, strict=True)
        ),
        message_bytes=float(np.median(sizes)) if sizes else 0.0,
        uses_buffers_again=ranks[0].parallelism.framework in {"megatron", "deepspeed"},
    )


def _of_rank(rank: RankTimeline, received: float, layers: Sequence[int] | None) -> RankMemory:
    memory = rank.memory
    if memory is None or memory.static_bytes is None or memory.per_microbatch_bytes is None:
        raise UsageError(
            f"rank {rank.rank} does not tell how its memory grows with microbatches",
            hint="capture with profile_memory=True, whole steps of two microbatches or more",
        )
    known = {stage.stage: stage.layers for stage in rank.layers} | dict(enumerate(layers or ()))
    return RankMemory(
        peak_bytes=memory.passes_peak_bytes or memory.peak_bytes,
        between_peak_bytes=memory.between_peak_bytes or 0,
        static_bytes=memory.static_bytes,
        gradient_bytes=memory.gradient_bytes or 0,
        per_microbatch_bytes=memory.per_microbatch_bytes,
        halfway_bytes=memory.halfway_bytes or 0,
        transient_bytes=memory.transient_bytes or 0,
        received_bytes=received,
        layers=tuple(known[stage] for stage in rank.stages)
        if known.keys() >= set(rank.stages)
        else None,
        reserved_bytes=memory.peak_reserved_bytes,
        limit_bytes=memory.limit_bytes,
    )


def fit_memory(run: MemoryRun) -> MemoryCosts:
    """Fit what a run's memory is held for."""
    trains = any(_trains(actions) for actions in run.order)
    # Forward only, a microbatch leaves its output behind, and nothing of its layers.
    activation = _per_layer(run, "per_microbatch_bytes", whole=False) if trains else 0.0
    gradient = _per_layer(run, "gradient_bytes", whole=True)
    layer_static, said = _static_a_layer(run, gradient)
    halfway = [
        rank.halfway_bytes / rank.per_microbatch_bytes
        for rank in run.ranks
        if rank.halfway_bytes > 0 and rank.per_microbatch_bytes > 0
    ]
    costs = MemoryCosts(
        ranks=(),
        layer_static_bytes=layer_static,
        layer_between_bytes=_per_layer(run, "between_peak_bytes", whole=True),
        layer_gradient_bytes=gradient,
        layer_activation_bytes=activation,
        loss_activation_bytes=_beyond_layers_of_last(run, activation),
        halfway_share=median(halfway) if halfway else HALFWAY_SHARE,
        message_bytes=run.message_bytes,
        assumptions=(
            said,
            "each rank keeps receive buffers and its share of the batch for every microbatch",
        ),
    )
    return replace(
        costs, ranks=tuple(_fit_rank(run, position, costs) for position in range(len(run.ranks)))
    )


def predict_peaks(
    costs: MemoryCosts,
    order: Order,
    *,
    layers: Sequence[float] | None = None,
    token_scale: float = 1.0,
    recompute: bool = False,
) -> tuple[PeakMemory, ...]:
    """Predict the peak of each rank in another order, with other layers a stage.

    Without `layers` each rank keeps those it has. `token_scale` is the size of a microbatch
    against the measured one. Where backward passes `recompute`, a layer keeps what it is given.
    """
    given = min(costs.layer_activation_bytes, costs.message_bytes)
    spared = costs.layer_activation_bytes - given if recompute else 0.0
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
        _predict_rank(costs, rank, order, position, layers=layers, scale=token_scale, spared=spared)
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
    spared: float = 0.0,
) -> PeakMemory:
    """Walk over a rank's passes: a row before the first and after each, the highest is the peak.

    `spared` is what a layer does not hold of a microbatch in flight.
    """
    actions, last, microbatches = order[position], last_stage(order), microbatches_of(order)
    held = hold(actions)
    mine = _layers_here(rank.layers, held.stages, layers)
    each = rank.activation_bytes + costs.layer_activation_bytes * np.array(mine)
    each[np.array(held.stages) == last] += costs.loss_activation_bytes
    activation = scale * ((held.in_flight + costs.halfway_share * held.halfway) @ each)
    # The one layer at work has all of it, for frameworks recompute layer by layer, and so has a
    # microbatch between its I and its W.
    waiting = np.maximum(np.array(mine) * (held.in_flight - held.halfway) - 1, 0)
    activation -= scale * spared * waiting.sum(axis=1)
    gradients = rank.gradient_bytes / len(mine) + costs.layer_gradient_bytes * np.array(mine)
    # Torch keeps until a step ends the outputs of the last stage, and of each I the gradients that
    # it sent to another rank. Forward only, outputs are what is in flight.
    trains = _trains(actions)
    keeps = [
        (action.kind == "F" and action.stage == last and trains)
        or (action.kind == "I" and action.stage > 0 and action.stage - 1 not in held.stages)
        for action in actions
    ]
    kept = scale * costs.message_bytes * np.concatenate(([0.0], np.cumsum(keeps)))
    # By what share the pass after each row needs more work space than others do.
    split = {action.stage for action in actions if action.kind == "I"}
    more = [_SPLIT_WORK_SPACE * (a.kind == "W" and a.stage in split) for a in actions]
    work_space = scale * rank.transient_bytes * np.array([*more, 0.0])
    level = activation + kept + held.reduced @ gradients + work_space
    if last in held.stages:
        # The outputs are put together once more when all are there; no pass works then.
        outputs = costs.message_bytes * microbatches
        level[-1] += scale * max(outputs - rank.transient_bytes, 0.0)
    highest = int(level.argmax())
    more_buffers = costs.message_bytes * _stage_ends(order, position)
    buffers = scale * microbatches * (rank.buffer_bytes + more_buffers)
    static = sum(mine) * costs.layer_static_bytes
    fixed = rank.fixed_bytes - (1 - scale) * rank.transient_bytes
    moved = sum(mine) - sum(rank.layers or mine)
    between = rank.between_bytes + costs.layer_between_bytes * moved
    between += buffers if rank.between_keeps_buffers else 0.0
    return PeakMemory(
        peak_bytes=max(fixed + static + buffers + float(level[highest]), between),
        activation_bytes=float(activation[highest]),
        buffer_bytes=buffers,
    )


def _layers_here(
    measured: tuple[int, ...] | None, stages: Sequence[int], layers: Sequence[float] | None
) -> list[float]:
    """Return the layers of each stage of a rank: as given, or as many as it has."""
    if layers is not None:
        return [float(layers[stage]) for stage in stages]
    if measured is not None and len(measured) == len(stages):
        return [float(count) for count in measured]
    return [sum(measured or ()) / len(stages)] * len(stages)


def _fit_rank(run: MemoryRun, position: int, costs: MemoryCosts) -> RankCosts:
    """Let what is left of the peak, without layers, activations and buffers, be fixed."""
    rank, stages = run.ranks[position], _stages_of(run.order, position)
    work_space = rank.transient_bytes
    if not any(each.gradient_bytes for each in run.ranks):
        # Forward only, the last stage's peak may be where outputs are put together: others tell.
        work_space = min(work_space, median(each.transient_bytes for each in run.ranks))
    of_loss = costs.loss_activation_bytes * (last_stage(run.order) in stages) / len(stages)
    bare = RankCosts(
        fixed_bytes=0.0,
        transient_bytes=work_space,
        buffer_bytes=0.0,
        activation_bytes=_beyond_layers(run, position, costs.layer_activation_bytes) - of_loss,
        gradient_bytes=rank.gradient_bytes - costs.layer_gradient_bytes * sum(rank.layers or ()),
        layers=rank.layers,
    )
    bare_peak = _predict_rank(costs, bare, run.order, position, layers=_all_layers(run), scale=1.0)
    batch, between = _batch_share(run, position, costs), rank.between_peak_bytes
    if not run.uses_buffers_again:
        of_messages = costs.message_bytes * _stage_ends(run.order, position)
        between -= (batch + of_messages) * run.microbatches
    return replace(
        bare,
        fixed_bytes=rank.peak_bytes - bare_peak.peak_bytes - batch * run.microbatches,
        buffer_bytes=batch,
        between_bytes=between,
        between_keeps_buffers=not run.uses_buffers_again,
    )


def _static_a_layer(run: MemoryRun, gradient: float) -> tuple[float, str]:
    """Return what a layer holds always, its gradients left out, and how that is told.

    Parameters, and every state of the optimizer, are as large as gradients or a whole multiple.
    """
    known = [rank for rank in _of_layers_alone(run) if rank.layers and sum(rank.layers)]
    if not known:
        return 0.0, "layers could not be counted: memory per layer is unknown"
    held = [(_without_buffers(run, rank), rank) for rank in known]
    # Less is not all of them: Megatron keeps gradients in buffers that are always there.
    multiples = [
        static / rank.gradient_bytes
        for static, rank in held
        if rank.gradient_bytes > _LEAST_GRADIENTS * static
    ]
    if gradient > 0 and multiples:
        multiple = floor(min(multiples) * _GRADIENT_TOLERANCE)
        return max(multiple - 1, 1) * gradient, (
            f"a layer holds {multiple} times its gradients (parameters, gradients, optimizer state)"
        )
    inputs = run.microbatches * run.message_bytes
    most = [max(static - inputs, 0.0) / sum(rank.layers or ()) for static, rank in held]
    between = [rank for rank in _of_layers_alone(run) if rank.layers]
    for rank, fewer in product(run.ranks, between if len(between) < len(run.ranks) else ()):
        # Ends may hold more than layers: what a rank has beyond one between them bounds these.
        more = sum(rank.layers or ()) - sum(fewer.layers or ())
        if more > 0:
            beyond = _without_buffers(run, rank) - _without_buffers(run, fewer)
            most.append(max(beyond, 0.0) / more)
    said = "static memory without buffers and inputs is spread evenly over the layers"
    return min(most), said


def _without_buffers(run: MemoryRun, rank: RankMemory) -> float:
    """Return what a rank holds always, what messages are received in left out."""
    return rank.static_bytes - run.microbatches * rank.received_bytes


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
    for position, rank in enumerate(run.ranks):
        stages = _stages_of(run.order, position)
        counts.update(zip(stages, rank.layers or (0,) * len(stages), strict=True))
    return [counts[stage] for stage in range(len(counts))]


def _beyond_layers(run: MemoryRun, position: int, layer: float) -> float:
    """Return what a microbatch in flight holds on a rank that is not of its layers."""
    rank = run.ranks[position]
    return rank.per_microbatch_bytes - layer * _mean_layers(rank)


def _beyond_layers_of_last(run: MemoryRun, layer: float) -> float:
    """Return the same of the last stage, where all that is more than other ranks have is its."""
    last = last_stage(run.order)
    stages = [_stages_of(run.order, position) for position in range(len(run.ranks))]
    (holder,) = (position for position, held in enumerate(stages) if last in held)
    beyond = [_beyond_layers(run, position, layer) for position in range(len(run.ranks))]
    others = beyond[:holder] + beyond[holder + 1 :]
    usual = median(others) if others else 0.0
    return max((beyond[holder] - usual) * len(stages[holder]), 0.0)


def _mean_layers(rank: RankMemory) -> float:
    return sum(rank.layers) / len(rank.layers) if rank.layers else 0.0


def _per_layer(run: MemoryRun, what: str, *, whole: bool) -> float:
    """Return the median share of a layer, over the ranks that hold nothing else."""
    shares = [
        getattr(rank, what) / (sum(rank.layers) if whole else _mean_layers(rank))
        for rank in _of_layers_alone(run)
        if rank.layers and sum(rank.layers)
    ]
    return median(shares) if shares else 0.0


def _of_layers_alone(run: MemoryRun) -> Sequence[RankMemory]:
    """Return the ranks without embedding and head, the ends of the model; all where none is."""
    ends = {0, last_stage(run.order)}
    between = [
        rank
        for position, rank in enumerate(run.ranks)
        if ends.isdisjoint(_stages_of(run.order, position))
    ]
    return between or run.ranks


def microbatches_of(order: Order) -> int:
    """Return how many microbatches an order has."""
    return 1 + max(action.microbatch for actions in order for action in actions)


def last_stage(order: Order) -> int:
    """Return the number of an order's last stage."""
    return max(action.stage for actions in order for action in actions)


def _stages_of(order: Order, position: int) -> list[int]:
    return sorted({action.stage for action in order[position]})


def _trains(actions: Sequence[Action]) -> bool:
    return any(action.kind != "F" for action in actions)


def _inputs_of(order: Order, position: int) -> int:
    """Return how many messages of a microbatch come to a rank from other ranks."""
    holder = {action.stage: rank for rank, actions in enumerate(order) for action in actions}
    mine = _stages_of(order, position)
    ahead = sum(holder.get(stage - 1, position) != position for stage in mine)
    behind = sum(holder.get(stage + 1, position) != position for stage in mine)
    return ahead + behind * _trains(order[position])


def _stage_ends(order: Order, position: int) -> int:
    """Return how many inputs of a microbatch the stages of a rank have, over all directions.

    Torch makes a buffer for each, also where the neighbouring stage is on the same rank.
    """
    last, trains = last_stage(order), _trains(order[position])
    return sum((stage > 0) + (trains and stage < last) for stage in _stages_of(order, position))
