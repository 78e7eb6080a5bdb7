"""A pipeline in → what no order of it can be under: the search's certificate."""

from __future__ import annotations

from math import ceil, inf, isfinite

from debubble.orders.pipeline import Pipeline


def lower_bound(pipeline: Pipeline) -> int:
    """Return the highest of what each rank cannot be under.

    A rank starts when the first microbatch has come to it, and then has all of its work to do. Its
    last gradient has a way to go. Its first gradient has a round trip to make, meanwhile only as
    many F can run as memory has room for. And a microbatch of one stage a rank stays that long in
    memory: with room for k of them, a rank needs ⌈m / k⌉ such stays.
    """
    count, stages, home = pipeline.microbatches, pipeline.stages, pipeline.home
    last = len(stages) - 1

    def hop(delay: tuple[int, ...], here: int, there: int) -> int:
        return delay[here] if home[here] != home[there] else 0

    # A gradient leaves after I, or after B, whichever is the shorter.
    gradient = [min(stage.input_gradient, stage.backward) for stage in stages]
    both = [
        min(stage.input_gradient + stage.weight_gradient, stage.backward)
        if pipeline.can_split
        else stage.backward
        for stage in stages
    ]
    if not pipeline.can_split:
        gradient = [stage.backward for stage in stages]
    arrives, leaves = [0] * (last + 1), [0] * (last + 1)
    for stage in range(1, last + 1):
        before = arrives[stage - 1] + stages[stage - 1].forward
        arrives[stage] = before + hop(pipeline.up, stage - 1, stage)
    # From the end of a stage's last gradient to the end of all: stage 0 has its weights to do.
    leaves[0] = both[0] - gradient[0]
    for stage in range(1, last + 1):
        leaves[stage] = hop(pipeline.down, stage, stage - 1) + gradient[stage - 1]
        leaves[stage] += leaves[stage - 1]
    # From the end of a stage's F to when the gradient of that microbatch is back.
    back = [0] * (last + 1)
    for stage in range(last - 1, -1, -1):
        back[stage] = hop(pipeline.up, stage, stage + 1) + stages[stage + 1].forward
        back[stage] += back[stage + 1] + gradient[stage + 1] + hop(pipeline.down, stage + 1, stage)
    highest = 0
    for own, limit in zip(pipeline.placement, pipeline.limits, strict=True):
        begins = min(arrives[stage] for stage in own)
        work = count * sum(stages[stage].forward + both[stage] for stage in own)
        needed = count * sum(stages[stage].forward + gradient[stage] for stage in own)
        last_leaves = min(leaves[stage] for stage in own)
        bounds = [begins + work, begins + needed + last_leaves]
        if len(own) == 1:
            stage = own[0]
            bounds.append(begins + _with_memory(pipeline, stage, both[stage], back[stage], limit))
        else:
            area = sum(
                count * stages[stage].held * (stages[stage].forward + back[stage] + both[stage])
                for stage in own
            )
            bounds.append(begins + ceil(area / limit) if isfinite(limit) and limit > 0 else 0)
        highest = max(highest, *bounds)
    return highest


def _with_memory(pipeline: Pipeline, stage: int, both: int, back: int, limit: float) -> int:
    """Return what a rank of one stage takes at least, from its start, with room for few."""
    cost, count = pipeline.stages[stage], pipeline.microbatches
    room = (
        count if not isfinite(limit) or not cost.held else min(count, int(limit / cost.held + 1e-9))
    )
    if cost.halfway < 0 or room < 1:
        # Where I sets memory free a stay is shorter than until W.
        room, stay = min(count, room), cost.forward + back + cost.input_gradient
        return ceil(count / room) * stay if room else 0
    work = count * (cost.forward + both)
    stay = cost.forward + back + both
    waits = max(0, cost.forward + back - room * cost.forward)
    return max(work + waits, ceil(count / room) * stay)


def gap(found: int, bound: int) -> float:
    """Return by what share an order may be above the best there is."""
    return found / bound - 1 if bound else inf
