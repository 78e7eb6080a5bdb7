"""Closed forms, in the papers' letters: p ranks in a pipeline, m microbatches in a step."""

from __future__ import annotations


def bubble_fraction(p: int, m: int) -> float:
    """Return the share of a step that ranks wait: equal stages, free transfers, one stage a rank.

    It holds for forward-only, GPipe and 1F1B alike.
    """
    return (p - 1) / (m + p - 1)


def bubble_fraction_of_stream(p: int, k: float) -> float:
    """Return the share of time that ranks wait with k batches in flight at all times."""
    return max(0.0, 1 - k / p)
