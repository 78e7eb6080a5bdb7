"""Orders, and the engines that run them, each made once: many levers ask for the same ones."""

from __future__ import annotations

from functools import lru_cache
from itertools import chain
from operator import attrgetter

from debubble.schedules import Order, order_of
from debubble.simulate.communication import Communication
from debubble.simulate.engine import Engine
from debubble.simulate.planned import plan_program

# More than a plan asks for; an engine of 4,000 passes takes a few megabytes.
_KEPT = 32


@lru_cache(maxsize=_KEPT)
def order_for(schedule: str, ranks: int, microbatches: int, chunks: int | None) -> Order:
    """Return the order of a schedule; it is shared, so leave it as it is."""
    return order_of(schedule, ranks, microbatches, chunks)


@lru_cache(maxsize=_KEPT)
def stages_for(schedule: str, ranks: int, microbatches: int, chunks: int | None) -> int:
    """Return how many stages that order has."""
    return stages_of(order_for(schedule, ranks, microbatches, chunks))


def stages_of(order: Order) -> int:
    """Return how many stages an order has."""
    last: int = max(map(attrgetter("stage"), chain.from_iterable(order)))
    return 1 + last


@lru_cache(maxsize=_KEPT)
def engine_for(
    sizes: tuple[str, int, int, int | None], communication: Communication, *, rendezvous: bool
) -> Engine:
    """Return what runs the order of these sizes."""
    return Engine(plan_program(order_for(*sizes), communication, rendezvous=rendezvous))
