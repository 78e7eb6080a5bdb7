"""What spans of time cover, for counts that share no code with debubble."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from math import inf

Span = tuple[float, float]


def merge(spans: Iterable[Span]) -> list[Span]:
    """Join spans that touch each other; they come by their beginnings."""
    merged: list[Span] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((begin, end))
    return merged


def covered(spans: Iterable[Span], low: float = -inf, high: float = inf) -> float:
    """Return how much of a window spans cover."""
    inside = [(max(begin, low), min(end, high)) for begin, end in spans]
    return sum(end - begin for begin, end in merge(span for span in inside if span[0] < span[1]))


def bubble_of(ranks: Collection[Iterable[Span]], low: float, high: float) -> float:
    """Return the share of a window that no span of a rank covers, over all ranks."""
    busy = sum(covered(spans, low, high) for spans in ranks)
    return 1 - busy / (len(ranks) * (high - low))
