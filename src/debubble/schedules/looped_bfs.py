"""Looped breadth-first (arXiv 2211.05953): GPipe over several chunks a rank."""

from __future__ import annotations

from debubble.schedules.model import Action, Order


def looped_bfs(ranks: int, microbatches: int, chunks: int) -> Order:
    """Let every rank run all of F chunk by chunk, then all of B the same way back."""
    order: Order = []
    for rank in range(ranks):
        stages = range(rank, ranks * chunks, ranks)
        forwards = [Action(stage, "F", m) for stage in stages for m in range(microbatches)]
        backwards = [Action(action.stage, "B", action.microbatch) for action in forwards[::-1]]
        order.append(forwards + backwards)
    return order
