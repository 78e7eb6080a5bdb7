"""Events and what each waits for in → when each happens: one pass of max and add.

All semantics of a pipeline come down to it: an event happens at the latest of its sources, each a
while after. Many sets of durations are run at once, a column each.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from debubble.errors import DebubbleError
from debubble.timeline.model import I64

# Before everything, and far enough from the smallest number to have durations added to it.
NEVER_NS = -(2**61)


class OrderCycle(DebubbleError):
    """Events that wait for each other in a circle: no run can have gone so."""


@dataclass(frozen=True, slots=True)
class _Level:
    """Events whose sources all lie in levels before it."""

    events: I64
    edges: slice
    first_edge: I64
    """Of each event, counted from the level's first."""


class EventGraph:
    """Events 0 to n - 1; edge i says that `target[i]` waits for `source[i]`."""

    def __init__(self, events: int, target: I64, source: I64) -> None:
        self.events = events
        level = _levels(events, target, source)
        self.edge_order = np.lexsort((target, level[target]))
        """Which edge stands where when they are sorted by level and target."""
        self._source = source[self.edge_order]
        self._levels = _group(level, target[self.edge_order])

    def run(self, after_ns: I64, floor_ns: I64) -> I64:
        """Return when each event happens: `after_ns` of each edge, no event before its floor.

        Both may have a second dimension, a column for each of many runs.
        """
        moments = np.broadcast_to(
            floor_ns[:, None] if floor_ns.ndim < after_ns.ndim else floor_ns,
            (self.events, *after_ns.shape[1:]),
        ).copy()
        after = after_ns[self.edge_order]
        for level in self._levels:
            arrivals = moments[self._source[level.edges]] + after[level.edges]
            latest = np.maximum.reduceat(arrivals, level.first_edge, axis=0)
            moments[level.events] = np.maximum(moments[level.events], latest)
        return moments


def _levels(events: int, target: I64, source: I64) -> I64:
    """Return how many edges the longest way to each event has."""
    order = np.argsort(source, kind="stable")
    reached = target[order].tolist()
    begin = np.searchsorted(source[order], np.arange(events + 1)).tolist()
    missing = np.bincount(target, minlength=events).tolist()
    level = [0] * events
    ready = [event for event, count in enumerate(missing) if not count]
    done = 0
    while ready:
        event = ready.pop()
        done += 1
        after = level[event] + 1
        for one in reached[begin[event] : begin[event + 1]]:
            if level[one] < after:  # noqa: PLR1730 (`max` takes three times as long here)
                level[one] = after
            missing[one] -= 1
            if not missing[one]:
                ready.append(one)
    if done < events:
        raise OrderCycle(
            "passes and messages wait for each other in a circle",
            hint="the traces are of different runs or steps, or their order was not understood",
        )
    return np.array(level, dtype=np.int64)


def _group(level: I64, target: I64) -> list[_Level]:
    """Cut edges, sorted by the level of their targets, into levels."""
    found = []
    cuts = np.flatnonzero(np.diff(level[target], prepend=-1))
    firsts = np.flatnonzero(np.diff(target, prepend=-1))
    bounds = np.searchsorted(firsts, [*cuts.tolist(), len(target)]).tolist()
    ends = [*cuts.tolist(), len(target)]
    for (begin, end), (low, high) in zip(pairwise(ends), pairwise(bounds), strict=True):
        first = firsts[low:high]
        found.append(_Level(target[first], slice(begin, end), first - begin))
    return found
