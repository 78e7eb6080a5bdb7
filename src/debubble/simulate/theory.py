"""Sizes or an order in → the bubble that theory gives."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from itertools import cycle

from debubble.timeline.schedules import Action, Order
from debubble.timeline.schedules.named import cells_of


def bubble_fraction(p: int, m: int) -> float:
    """Return the share of a step that ranks wait: equal stages, free transfers, one stage a rank.

    It holds for forward-only, GPipe and 1F1B alike.
    """
    return (p - 1) / (m + p - 1)


def bubble_fraction_of_stream(p: int, k: float) -> float:
    """Return the share of time that ranks wait with k batches in flight at all times."""
    return max(0.0, 1 - k / p)


def ideal_bubble(order: Order, duration: Mapping[str, float]) -> float:
    """Return the share of time that ranks wait when nothing but the order makes them wait.

    Each rank runs its passes in order; a pass begins when its rank is free and what it needs is
    there. Two passes that overlap are one: both inputs are needed, both results come at the end.

    Ranks are gone through up and down in turn: forward passes follow each other up the ranks,
    backward passes down, and so one turn takes a microbatch through all of them.
    """
    ended: dict[tuple[int, str, int], float] = {}
    free = [0.0] * len(order)
    waiting = [deque(cells_of(actions)) for actions in order]
    turns = cycle((list(enumerate(waiting)), list(enumerate(waiting))[::-1]))
    last_stage = max(action.stage for actions in order for action in actions)
    while any(waiting):
        before = len(ended)
        for rank, cells in next(turns):
            while cells:
                moments = [
                    moment for action in cells[0] for moment in _needs(action, last_stage, ended)
                ]
                if None in moments:
                    break
                length = sum(duration[action.kind] for action in cells[0])
                free[rank] = max([free[rank], *(m for m in moments if m is not None)]) + length
                for action in cells.popleft():
                    ended[action.stage, action.kind, action.microbatch] = free[rank]
        if len(ended) == before:
            raise ValueError("this order cannot finish")
    busy = sum(duration[action.kind] for actions in order for action in actions)
    return 1 - busy / (len(order) * max(free))


def _needs(
    action: Action, last_stage: int, ended: Mapping[tuple[int, str, int], float]
) -> Iterator[float | None]:
    """Yield when each input of a pass was there; None for one that is not there yet."""
    stage, kind, number = action.stage, action.kind, action.microbatch
    if kind == "F":
        if stage:
            yield ended.get((stage - 1, "F", number))
    elif kind == "W":
        yield ended.get((stage, "I", number))
    else:
        yield ended.get((stage, "F", number))
        if stage < last_stage:
            whole = ended.get((stage + 1, "B", number))
            yield whole if whole is not None else ended.get((stage + 1, "I", number))
