"""Events and what each waits for in → when each happens: one pass of max and add.

All semantics of a pipeline come down to it: an event happens at the latest of its sources, each a
while after. Many sets of durations are run at once, a column each.

    a ──3──► c ──1──► e      a and b wait for nothing: they happen at their floors, here 0
    b ──2──► c        ▲      c at max(0 + 3, 0 + 2) = 3, d at 5, e at max(3 + 1, 5 + 4) = 9
    b ──5──► d ──4────┘

    level 1   c d            events whose sources all lie in levels before; most sources first
    turns     a→c b→d | b→c  an edge into each from its first source, then from its second, ...
    cuts      0         2    where turns begin among all edges; level 2 goes on: 3 (c→e), 4 (d→e)

So a turn is one addition over rows that follow each other, and one maximum with the first rows of
its level: a thousand splits of a step take numpy calls by the turn, not by the event. Why a run can
be rebuilt so: docs/explanation/where-the-time-goes.md, "What it would buy".
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from debubble.errors import DebubbleError
from debubble.timeline.model import I64, Flags

# Before everything, and far enough from the smallest number to have durations added to it.
NEVER_NS = -(2**61)


class OrderCycle(DebubbleError):
    """Events that wait for each other in a circle: no run can have gone so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delays:
    """How long after its source each edge lets its target happen, in the order of the graph."""

    steady: I64
    """What is the same in all runs."""
    rows: I64
    """Edges, in ascending order, that add something else in each run."""
    varied: I64
    """What they add: a row each, a column for each run."""


@dataclass(frozen=True, slots=True)
class _Level:
    """Events whose sources all lie in levels before it: rows that follow each other."""

    first: int
    end: int
    turns: list[tuple[int, int, int]]
    """Edges, from and to, with the turn's number among the turns of all levels."""
    floored: bool


class EventGraph:
    """Events 0 to n - 1; edge i says that `target[i]` waits for `source[i]`."""

    def __init__(self, events: int, target: I64, source: I64, floored: Flags | None = None) -> None:
        """Without `floored` any event may have a floor; with it, those, and any without sources."""
        self.events = events
        level = _levels(events, target, source)
        sources = np.bincount(target, minlength=events)
        self._events = np.lexsort((-sources, level))
        self._row = np.empty(events, dtype=np.int64)
        self._row[self._events] = np.arange(events)
        # The number of each edge among those into its target.
        by_target = np.argsort(target, kind="stable")
        begin = np.searchsorted(target[by_target], np.arange(events))
        turn = np.empty(len(target), dtype=np.int64)
        turn[by_target] = np.arange(len(target)) - begin[target[by_target]]
        self.edge_order = np.lexsort((self._row[target], turn, level[target]))
        """Which edge stands where in the order in which they are followed."""
        self._source = self._row[source[self.edge_order]]
        self._roots = int((sources == 0).sum())
        edge_level, turn = level[target[self.edge_order]], turn[self.edge_order]
        changes = (np.diff(edge_level, prepend=-1) != 0) | (np.diff(turn, prepend=-1) != 0)
        self._cuts = np.append(np.flatnonzero(changes), len(turn))
        """Where each turn begins among the edges, and where the last ends."""
        count = int(level.max(initial=0)) + 1
        turns: list[list[tuple[int, int, int]]] = [[] for _ in range(count)]
        for number, (first, end) in enumerate(pairwise(self._cuts.tolist())):
            turns[int(edge_level[first])].append((first, end, number))
        firsts = np.searchsorted(level[self._events], np.arange(count + 1)).tolist()
        held = (np.ones(events, dtype=bool) if floored is None else floored)[self._events]
        held = np.logical_or.reduceat(held, firsts[:-1]) if events else held
        self._levels = [
            _Level(firsts[number], firsts[number + 1], turns[number], bool(held[number]))
            for number in range(1, count)
        ]
        self._widest = max((level.end - level.first for level in self._levels), default=0)

    def run(self, after_ns: I64, floor_ns: I64) -> I64:
        """Return when each event happens: `after_ns` of each edge, no event before its floor.

        Both may have a second dimension, a column for each of many runs.
        """
        after, every = after_ns[self.edge_order], np.arange(len(after_ns))
        if after.ndim > 1:
            delays = Delays(steady=np.zeros(len(after), dtype=np.int64), rows=every, varied=after)
        else:
            delays = Delays(steady=after, rows=every[:0], varied=after[:0])
        return self.run_delays(delays, floor_ns)

    def run_delays(self, delays: Delays, floor_ns: I64, wanted: I64 | None = None) -> I64:
        """Do the same with edges in the order of `edge_order`; of `wanted` events alone."""
        runs = delays.varied.shape[1:] or floor_ns.shape[1:]
        floor = (floor_ns[:, None] if floor_ns.ndim <= len(runs) else floor_ns)[self._events]
        steady = delays.steady[:, None] if runs else delays.steady
        added = _Added(delays, self._cuts) if len(delays.rows) else None
        moments = np.empty((self.events, *runs), dtype=np.int64)
        moments[: self._roots] = floor[: self._roots]
        spare = np.empty((self._widest, *runs), dtype=np.int64)
        for level in self._levels:
            here = moments[level.first : level.end]
            for begin, end, number in level.turns:
                arrivals = spare[: end - begin]
                # `clip` writes straight to `out`; all rows are there.
                moments.take(self._source[begin:end], axis=0, out=arrivals, mode="clip")
                first = begin == level.turns[0][0]
                latest = here if first else arrivals
                np.add(arrivals, steady[begin:end], out=latest)
                if added is not None:
                    added.add(latest, number)
                if not first:
                    earlier = here[: end - begin]
                    np.maximum(earlier, latest, out=earlier)
            if level.floored:
                np.maximum(here, floor[level.first : level.end], out=here)
        return moments[self._row if wanted is None else self._row[wanted]]


class _Added:
    """What varies from run to run, cut into the turns in which it is added."""

    def __init__(self, delays: Delays, cuts: I64) -> None:
        self._varied = delays.varied
        parts = np.searchsorted(delays.rows, cuts)
        self._within = delays.rows - np.repeat(cuts[:-1], np.diff(parts))
        begin, end = parts[:-1], parts[1:]
        padded = np.append(self._within, 0)
        first, last = padded[begin], padded[end - 1]
        unbroken = last - first == end - begin - 1
        columns = (column.tolist() for column in (begin, end, first, unbroken))
        self._turns = list(zip(*columns, strict=True))

    def add(self, latest: I64, number: int) -> None:
        """Add it to the arrivals of a turn."""
        begin, end, first, unbroken = self._turns[number]
        if begin == end:
            return
        if unbroken:  # all that lie between, as is usual
            latest[first : first + end - begin] += self._varied[begin:end]
        else:
            latest[self._within[begin:end]] += self._varied[begin:end]


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
        for later in reached[begin[event] : begin[event + 1]]:
            if level[later] < after:  # noqa: PLR1730 (`max` takes three times as long here)
                level[later] = after
            missing[later] -= 1
            if not missing[later]:
                ready.append(later)
    if done < events:
        raise OrderCycle(
            "passes and messages wait for each other in a circle",
            hint="the traces are of different runs or steps, or their order was not understood",
        )
    return np.array(level, dtype=np.int64)
