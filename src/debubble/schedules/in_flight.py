"""An order in → how many microbatches' activations each rank holds, by counting."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from debubble.schedules.model import Action, Order


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What one rank holds, a row before its first pass and after each: [row, stage of the rank]."""

    stages: tuple[int, ...]
    in_flight: NDArray[np.int64]
    """Microbatches whose activations the stage still needs: until B, or until W."""
    halfway: NDArray[np.int64]
    """Those of them that had I and wait for W."""
    reduced: NDArray[np.bool_]
    """Whether the stage has gradients: from its first B or W on."""


def hold(actions: list[Action]) -> Held:
    """Count over the passes of one rank."""
    stages = tuple(sorted({action.stage for action in actions}))
    column = {stage: number for number, stage in enumerate(stages)}
    shape = (len(actions) + 1, len(stages))
    change, waits, grads = (np.zeros(shape, dtype=np.int64) for _ in range(3))
    for row, action in enumerate(actions, start=1):
        at = row, column[action.stage]
        change[at] = {"F": 1, "I": 0}.get(action.kind, -1)
        waits[at] = {"I": 1, "W": -1}.get(action.kind, 0)
        grads[at] = action.kind in {"B", "W"}
    return Held(
        stages=stages,
        in_flight=np.cumsum(change, axis=0),
        halfway=np.cumsum(waits, axis=0),
        reduced=np.cumsum(grads, axis=0) > 0,
    )


def most_in_flight(order: Order) -> tuple[int, ...]:
    """Return the most microbatches that each rank has in flight, those of all its chunks together.

    Forward only, torch keeps the outputs of a step: all its microbatches.
    """
    return tuple(int(hold(actions).in_flight.sum(axis=1).max()) for actions in order)


def most_with_gradients(order: Order) -> tuple[int, ...]:
    """Return the same from when all gradients are there: there the peak of memory is.

    Gradients appear during the first backward pass, while its activations go.
    """
    return tuple(
        int(held.in_flight.sum(axis=1)[held.reduced.all(axis=1)].max(initial=0))
        for held in map(hold, order)
    )
