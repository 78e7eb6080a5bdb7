"""ZB-H1 (arXiv 2401.10241): 1F1B's memory, a third of its bubble where F, I and W are equal."""

from __future__ import annotations

from debubble.schedules.deferred_weights import defer_weights
from debubble.schedules.model import Order


def zb_h1(ranks: int, microbatches: int) -> Order:
    """Warm up as 1F1B does and let every rank hold as many microbatches as 1F1B's first."""
    return [
        defer_weights(rank, microbatches, ahead=ranks - rank, limit=ranks) for rank in range(ranks)
    ]
