"""A `Timeline` and the order it ran in → what its ranks held, ready to be fitted."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from debubble.errors import UsageError
from debubble.schedules import Order
from debubble.timeline.model import RankTimeline, Timeline


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
