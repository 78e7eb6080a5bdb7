"""Intervals that overlap in → tracks on which nothing does out."""

from __future__ import annotations

import numpy as np

from debubble.timeline.model import I64


def assign_tracks(start: I64, end: I64) -> list[int]:
    """Give each interval, in the order of starts, the first track that is free by then."""
    free_from: list[int] = []
    chosen = np.zeros(len(start), dtype=np.int64)
    for row in np.lexsort((end, start)).tolist():
        track = next((n for n, free in enumerate(free_from) if free <= start[row]), len(free_from))
        free_from[track : track + 1] = [max(int(end[row]), int(start[row]) + 1)]
        chosen[row] = track
    return chosen.tolist()
