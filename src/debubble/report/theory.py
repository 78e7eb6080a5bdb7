"""A measured pipeline in → the bubble that theory gives it: the formula's, and its schedule's."""

from __future__ import annotations

from collections import defaultdict

from debubble.schedules import Order, order_of
from debubble.simulate.theory import bubble_fraction, ideal_bubble
from debubble.timeline.figures import PipelineFigures
from debubble.timeline.model import PassKind


def theory_of(one: PipelineFigures) -> float | None:
    """Return the formula's bubble, where it applies: one stage a rank, a fixed batch."""
    single = all(len(rank.stages) == 1 for rank in one.ranks)
    if one.stated is not None and one.stated.agrees is not None:
        single = one.stated.chunks == 1
    members = one.ranks[0].members
    # Beyond an end that was not captured there may be more ranks.
    ends_known = not {*members[:1], *members[-1:]} & set(one.absent)
    if one.microbatches is None or not single or not ends_known or one.kind == "stream":
        return None
    return bubble_fraction(len(one.ranks) + len(one.absent), one.microbatches)


def theory_of_schedule(one: PipelineFigures) -> float | None:
    """Return the bubble of the schedule, stated or else found: equal stages, free transfers."""
    if one.kind == "stream" or one.absent:
        return None
    order = one.stated.order if one.stated is not None else _order_found(one)
    durations = None if order is None else _equal_stages(one, order)
    return None if order is None or durations is None else ideal_bubble(order, durations)


def _order_found(one: PipelineFigures) -> Order | None:
    if one.schedule is None or one.microbatches is None:
        return None
    return order_of(one.schedule, len(one.ranks), one.microbatches, len(one.ranks[0].stages))


def _equal_stages(one: PipelineFigures, order: Order) -> dict[str, float] | None:
    """Share what all stages take equally among those of an order; None where a kind is unknown.

    A schedule that was stated may split backward passes that ran whole, or the other way round.
    """
    total: defaultdict[str, float] = defaultdict(float)
    for row in one.stages:
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
