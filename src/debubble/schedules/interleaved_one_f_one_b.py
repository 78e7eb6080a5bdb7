"""Interleaved 1F1B (Megatron): 1F1B over several chunks a rank, which shortens the warm-up."""

from __future__ import annotations

from functools import partial

from debubble.schedules.model import Order
from debubble.schedules.rounds import round_size, take_turns

# For each rank between it and the last, a rank runs two passes further ahead: a forward pass has
# to get there, and a backward pass back.
AHEAD_PER_RANK = 2


def interleaved_one_f_one_b(ranks: int, microbatches: int, chunks: int) -> Order:
    """Let a rank run ahead to its last chunk's first round, then alternate F and B."""
    passes = partial(take_turns, ranks=ranks, microbatches=microbatches, chunks=chunks)
    order: Order = []
    for rank in range(ranks):
        ahead = (chunks - 1) * round_size(ranks, microbatches)
        ahead += AHEAD_PER_RANK * (ranks - 1 - rank)
        forwards = passes("F", rank)
        actions = forwards[:ahead]
        for number, backward in enumerate(passes("B", rank), start=ahead):
            actions += [*forwards[number : number + 1], backward]
        order.append(actions)
    return order
