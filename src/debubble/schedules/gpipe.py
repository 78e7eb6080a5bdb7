"""GPipe: all forward passes, then all backward passes."""

from __future__ import annotations

from debubble.schedules.model import Action, Order


def gpipe(ranks: int, microbatches: int) -> Order:
    """Let every rank run all of F, then all of B, microbatches in order."""
    return [
        [Action(rank, kind, m) for kind in ("F", "B") for m in range(microbatches)]
        for rank in range(ranks)
    ]
