"""An order in → how far each stage runs ahead before it turns back, which bounds how long it waits.

A stage's first backward pass waits for a microbatch that goes to the end and comes back. Until then
the stage has only so many forward passes to do. It is the same at the end, the other way round.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from debubble.schedules import Order
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
