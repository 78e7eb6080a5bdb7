"""1F1B: after a warm-up, each rank alternates one forward and one backward pass."""

from __future__ import annotations

from debubble.schedules.model import Action, Order


def one_f_one_b(ranks: int, microbatches: int) -> Order:
    """Let a rank run as many forward passes ahead as there are ranks from it to the end."""
    order: Order = []
    for rank in range(ranks):
        ahead = min(ranks - rank, microbatches)
        actions = [Action(rank, "F", m) for m in range(ahead)]
        for m in range(microbatches):
            actions.append(Action(rank, "B", m))
            if m + ahead < microbatches:
                actions.append(Action(rank, "F", m + ahead))
        order.append(actions)
    return order
