"""An allocator played block by block: what the ranks of a pipeline hold, known exactly."""

from __future__ import annotations

from debubble.simulate.costs.memory import MemoryRun, RankMemory
from debubble.timeline.schedules import order_of

PARAMS, STATES, ACTIVATION, MESSAGE, WORK = 64.0, 3, 20.0, 4.0, 37.0
# Inputs and targets, as large as messages.
BATCH = 2 * MESSAGE


def allocator_peak(actions, layers, microbatches, stages, states=STATES):
    """Play an allocator block by block; gradients come and activations go layer by layer.

    The outputs of the last stage are kept, and put together in the end. Forward only, every stage
    keeps its outputs and nothing else.
    """
    mine = {action.stage for action in actions}
    trains = any(action.kind != "F" for action in actions)
    now = sum(layers[stage] for stage in mine) * PARAMS * (1 + (states if trains else 0))
    now += microbatches * (BATCH + MESSAGE * sum(s > 0 for s in mine))
    now += microbatches * MESSAGE * sum(s < stages - 1 for s in mine) * trains
    peak, reduced = now, set()
    last = stages - 1
    for action in actions:
        for _ in range(layers[action.stage] * trains):
            if action.kind == "F":
                now += ACTIVATION
            else:
                now -= ACTIVATION
                now += PARAMS * (action.stage not in reduced)
            peak = max(peak, now)
        if action.kind == "F" and (action.stage == last or not trains):
            now += MESSAGE
            peak = max(peak, now)
        if action.kind == "B":
            reduced.add(action.stage)
    return max(peak + WORK, now + microbatches * MESSAGE * (last in mine))


def allocator_run(name, p, m, layers, chunks=None):
    order = order_of(name, p, m, chunks)
    stages, trains = len(layers), name != "forward-only"
    ranks = []
    for actions in order:
        mine = sorted({action.stage for action in actions})
        gradients = sum(layers[stage] for stage in mine) * PARAMS * trains
        inputs = sum((s > 0) + (s < stages - 1) * trains for s in mine)
        always = m * (BATCH + MESSAGE * inputs)
        weights = sum(layers[s] for s in mine) * PARAMS
        states = STATES * weights * trains
        ranks.append(
            RankMemory(
                peak_bytes=allocator_peak(actions, layers, m, stages),
                static_bytes=weights + states + gradients + always,
                gradient_bytes=gradients,
                per_microbatch_bytes=ACTIVATION * sum(layers[s] for s in mine) / len(mine)
                if trains
                else MESSAGE,
                halfway_bytes=0,
                transient_bytes=WORK,
                received_bytes=MESSAGE * inputs,
                layers=tuple(layers[stage] for stage in mine),
            )
        )
    return MemoryRun(order=order, ranks=tuple(ranks), message_bytes=MESSAGE)
