"""What memory is held for, an order and limits in → the room that a split has."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from debubble.costs.memory import MemoryCosts, predict_peaks
from debubble.plan.split_problem import Room
from debubble.schedules import Order, hold


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
