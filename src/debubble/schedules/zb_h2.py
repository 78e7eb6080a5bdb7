"""ZB-H2 (arXiv 2401.10241): twice 1F1B's memory, and no rank waits between its first and last."""

from __future__ import annotations

from debubble.schedules.deferred_weights import defer_weights
from debubble.schedules.model import Order


def zb_h2(ranks: int, microbatches: int) -> Order:
    """Fill the warm-up with forward passes until the first input gradient can be back."""
    limit = 2 * ranks - 1
    return [
        defer_weights(rank, microbatches, ahead=2 * (ranks - rank) - 1, limit=limit)
        for rank in range(ranks)
    ]
