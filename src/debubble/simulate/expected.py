"""A measured pipeline in → the bubble that theory gives for it."""

from __future__ import annotations

import msgspec

from debubble.simulate.theory import bubble_fraction, bubble_fraction_of_stream, ideal_bubble
from debubble.timeline.figures import PipelineFigures
from debubble.timeline.model import PassKind
from debubble.timeline.schedules import Order, order_of


class Theory(msgspec.Struct, frozen=True, kw_only=True):
    """What theory gives: the formula, and the schedule with equal stages and free transfers."""

    bubble_fraction: float | None
    """Where the formula applies: one stage a rank, a fixed batch."""
    schedule_bubble_fraction: float | None
    """Of the schedule, stated or else found."""


def theory_of(pipeline: PipelineFigures) -> Theory:
    """Return what theory gives for a pipeline with steps."""
    return Theory(
        bubble_fraction=_of_formula(pipeline), schedule_bubble_fraction=_of_schedule(pipeline)
    )


def _of_formula(pipeline: PipelineFigures) -> float | None:
    single = all(len(rank.stages) == 1 for rank in pipeline.ranks)
    if pipeline.stated is not None and pipeline.stated.agrees is not None:
        single = pipeline.stated.chunks == 1
    members = pipeline.ranks[0].members
    # Beyond an end that was not captured there may be more ranks.
    ends_known = not {*members[:1], *members[-1:]} & set(pipeline.absent)
    if pipeline.microbatches is None or not single or not ends_known or pipeline.stream:
        return None
    return bubble_fraction(len(pipeline.ranks) + len(pipeline.absent), pipeline.microbatches)


def _of_schedule(pipeline: PipelineFigures) -> float | None:
    if pipeline.kind == "stream" or pipeline.absent:
        return None
    if pipeline.stated is not None:
        order = pipeline.stated.order
    elif pipeline.schedule is None or pipeline.microbatches is None:
        order = None
    else:
        chunks = len(pipeline.ranks[0].stages)
        order = order_of(pipeline.schedule, len(pipeline.ranks), pipeline.microbatches, chunks)
    durations = None if order is None else _equal_stages(pipeline, order)
    return None if order is None or durations is None else ideal_bubble(order, durations)


def _equal_stages(pipeline: PipelineFigures, order: Order) -> dict[str, float] | None:
    """Share what all stages take equally among those of an order; None where a kind is unknown.

    A schedule that was stated may split backward passes that ran whole, or the other way round.
    """
    total = dict.fromkeys("FBIW", 0.0)
    for row in pipeline.stages:
        total[PassKind(row.kind).name] += row.median_ns
    whole, halves = total["B"], total["I"] + total["W"]
    if not whole:
        total["B"] = halves
    if not halves:
        total["I"] = total["W"] = whole / 2
    actions = [action for actions in order for action in actions]
    if not all(total[kind] for kind in {action.kind for action in actions}):
        return None
    stages = len({action.stage for action in actions})
    return {kind: total[kind] / stages for kind in "FBIW"}


def theory_of_stream(pipeline: PipelineFigures) -> float | None:
    """Return the share that equal stages would wait with so many batches in flight."""
    stream = pipeline.stream
    if stream is None or stream.first_sets_pace or not stream.sure or pipeline.absent:
        return None
    return bubble_fraction_of_stream(len(pipeline.ranks), stream.in_flight)
