"""Sizes in → the order of passes per rank out. Order only: no durations, no idle slots."""

from __future__ import annotations

from debubble.schedules.forward_only import forward_only
from debubble.schedules.gpipe import gpipe
from debubble.schedules.model import Action, Order
from debubble.schedules.one_f_one_b import one_f_one_b

__all__ = ["Action", "Order", "forward_only", "gpipe", "one_f_one_b"]


def orders_of_single_stage_schedules(ranks: int, microbatches: int) -> dict[str, Order]:
    """Return the schedules that give each rank one stage, by name."""
    return {
        "forward-only": forward_only(ranks, microbatches),
        "1f1b": one_f_one_b(ranks, microbatches),
        "gpipe": gpipe(ranks, microbatches),
    }
