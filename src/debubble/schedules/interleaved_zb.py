"""Interleaved zero bubble (torch's ZB1P): interleaved 1F1B with weight gradients put off."""

from __future__ import annotations

from functools import partial

from debubble.schedules.model import Order
from debubble.schedules.rounds import round_size, take_turns


def interleaved_zb(ranks: int, microbatches: int, chunks: int) -> Order:
    """Alternate F and I after the warm-up, each rank's W as many passes late as its number.

    An input gradient alone is on its way back sooner than a full backward pass, so that one pass
    of warm-up per rank is enough; later ranks, which end first, keep weight gradients for then.
    """
    passes = partial(take_turns, ranks=ranks, microbatches=microbatches, chunks=chunks)
    order: Order = []
    for rank in range(ranks):
        ahead = (chunks - 1) * round_size(ranks, microbatches) + ranks - 1 - rank
        forwards, weights = passes("F", rank), passes("W", rank)
        actions = forwards[:ahead]
        for number, gradient in enumerate(passes("I", rank)):
            actions += [*forwards[ahead + number : ahead + number + 1], gradient]
            if number >= rank:
                actions.append(weights[number - rank])
        order.append(actions + weights[max(0, len(weights) - rank) :])
    return order
