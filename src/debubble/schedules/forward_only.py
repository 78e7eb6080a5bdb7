"""Forward passes alone, in order: inference."""

from __future__ import annotations

from debubble.schedules.model import Action, Order


def forward_only(ranks: int, microbatches: int) -> Order:
    """Let every rank run the microbatches one after the other."""
    return [[Action(rank, "F", m) for m in range(microbatches)] for rank in range(ranks)]
