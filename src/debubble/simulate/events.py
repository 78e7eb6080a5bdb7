"""Events that wait for others → when each happens: the engine under everything that is run.

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

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from debubble.errors import DebubbleError
from debubble.timeline.model import I64, Flags

# Before everything, and far enough from the smallest number to have durations added to it.
NEVER_NS = -(2**61)
# Levels of fewer events are gone through one event after the other, by the mean of so many levels.
_WIDE, _LOOK_EVERY = 24, 256


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

    def __init__(
        self,
        events: int,
        target: I64,
        source: I64,
        floored: Flags,
        waits: Waits,
    ) -> None:
        """Only `floored` events, and those without sources, may have a floor."""
        self.events = events
        level = waits.levels()
        sources = np.bincount(target, minlength=events)
        most = int(sources.max(initial=0)) + 1
        # By level, then by most sources: one key sorts quicker than two.
        self._events = np.argsort(level * most - sources, kind="stable")
        self._row = np.empty(events, dtype=np.int64)
        self._row[self._events] = np.arange(events)
        # The number of each edge among those into its target.
        count = len(target)
        by_target = np.argsort(target, kind="stable")
        begin = np.cumsum(sources) - sources
        turn = np.empty(count, dtype=np.int64)
        turn[by_target] = np.arange(count) - begin[target[by_target]]
        by_row = np.argsort(self._row[target], kind="stable")
        self.edge_order = by_row[np.argsort((level[target] * most + turn)[by_row], kind="stable")]
        """Which edge stands where in the order in which they are followed."""
        self._source = self._row[source[self.edge_order]]
        self._roots = int((sources == 0).sum())
        edge_level, turn = level[target[self.edge_order]], turn[self.edge_order]
        changes = (np.diff(edge_level, prepend=-1) != 0) | (np.diff(turn, prepend=-1) != 0)
        self._cuts = np.append(np.flatnonzero(changes), len(turn))
        """Where each turn begins among the edges, and where the last ends."""
        levels = int(level.max(initial=0)) + 1
        turns: list[list[tuple[int, int, int]]] = [[] for _ in range(levels)]
        for number, (first, end) in enumerate(pairwise(self._cuts.tolist())):
            turns[int(edge_level[first])].append((first, end, number))
        firsts = np.searchsorted(level[self._events], np.arange(levels + 1)).tolist()
        held = floored[self._events]
        held = np.logical_or.reduceat(held, firsts[:-1]) if events else held
        self._levels = [
            _Level(firsts[number], firsts[number + 1], turns[number], bool(held[number]))
            for number in range(1, levels)
        ]
        self._widest = max((level.end - level.first for level in self._levels), default=0)

    def run_delays(self, delays: Delays, floor_ns: I64, wanted: I64 | None = None) -> I64:
        """Return when each event happens, or each `wanted`: no event before its floor.

        Edges are in the order of `edge_order`; what varies has a column for each of many runs.
        """
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


class Waits:
    """Which events wait for each: who happens next, and on which level."""

    def __init__(self, events: int, target: I64, source: I64) -> None:
        self._by_source = np.argsort(source, kind="stable")
        self._reached = target[self._by_source]
        self._begin = np.append(0, np.cumsum(np.bincount(source, minlength=events)))
        self._sources = np.bincount(target, minlength=events)
        self._level = np.zeros(events, dtype=np.int64)
        self._missing = self._sources.copy()
        self._ready, self._done = _level_by_level(
            self._level, self._missing, self._reached, self._begin
        )

    @property
    def narrow(self) -> bool:
        """Whether so few events of many are on a level that one run goes event by event."""
        return len(self._ready) > 0 and len(self._level) >= _LOOK_EVERY * _WIDE

    def levels(self) -> I64:
        """Return how many edges the longest way to each event has."""
        lengths = np.ones(len(self._reached), dtype=np.int64)
        if len(self._ready):
            self._level, self._done = _event_by_event(
                self._level,
                self._missing,
                (self._reached, self._begin, lengths),
                self._ready,
                self._done,
            )
            self._ready = self._ready[:0]
        _refuse_circle(self._done, len(self._level))
        return self._level

    def run_once(self, after_ns: I64, floor_ns: I64) -> I64:
        """Return when each event happens in one run, without levels."""
        ready = np.flatnonzero(self._sources == 0)
        ways = self._reached, self._begin, after_ns[self._by_source]
        moments, done = _event_by_event(floor_ns, self._sources, ways, ready, 0)
        _refuse_circle(done, len(moments))
        return moments


def _refuse_circle(done: int, events: int) -> None:
    if done < events:
        raise OrderCycle(
            "passes and messages wait for each other in a circle",
            hint="the traces are of different runs or steps, or their order was not understood",
        )


def _level_by_level(level: I64, missing: I64, reached: I64, begin: I64) -> tuple[I64, int]:
    """Give events their levels while those are wide; return who is next, and how many have one."""
    ready, number, done, before = np.flatnonzero(missing == 0), 0, 0, 0
    counts, mark = np.diff(begin), np.empty(len(level), dtype=np.int64)
    while len(ready):
        if number % _LOOK_EVERY == 0:
            if len(level) < _LOOK_EVERY * _WIDE or (number and done - before < _LOOK_EVERY * _WIDE):
                break
            before = done
        done += len(ready)
        number += 1
        some = counts[ready]
        ends = np.cumsum(some)
        edges = np.repeat(begin[ready] - ends + some, some) + np.arange(ends[-1])
        later = reached[edges]
        np.subtract.at(missing, later, 1)
        later = later[missing[later] == 0]
        mark[later] = every = np.arange(len(later))
        ready = later[mark[later] == every]  # what was reached twice is there once
        level[ready] = number
    return ready, done


def _event_by_event(
    known: I64, missing: I64, ways: tuple[I64, I64, I64], ready: I64, done: int
) -> tuple[I64, int]:
    """Give each event the longest way to it, or what is known if that is more; count them.

    Of `ways`: the events that each reaches, where those of each begin, and how long they are.
    """
    longest, lacking, waiting = known.tolist(), missing.tolist(), ready.tolist()
    targets, begins, lengths = (column.tolist() for column in ways)
    while waiting:
        event = waiting.pop()
        done += 1
        here = longest[event]
        for way in range(begins[event], begins[event + 1]):
            later, there = targets[way], here + lengths[way]
            if longest[later] < there:  # noqa: PLR1730 (`max` takes three times as long here)
                longest[later] = there
            lacking[later] -= 1
            if not lacking[later]:
                waiting.append(later)
    return np.array(longest, dtype=np.int64), done


@dataclass(frozen=True, slots=True)
class Edges:
    """Events that wait for others, and which rows of which lengths lie between."""

    target: I64
    source: I64
    length: str
    rows: I64


class Stretch(NamedTuple):
    """A part of a wait in which one event was all that was waited for."""

    event: int
    waiting: int
    """The event that waited for it; -1 where a rank itself does."""
    begin_ns: int
    """Its own last source was there from here on."""
    end_ns: int


class Happened:
    """Events that have happened, and the one that each waited for: the last of its sources.

    The way back from a wait is one chain, in which times never grow:

        a [····]──► c [··]──► e          e waited for c, c for b, which was later than a:
        b [······]─►                     until b was there the wait is b's own, from then on c's
    """

    def __init__(self, moments_ns: I64, edges: tuple[Edges, ...]) -> None:
        """Of sources that came at the same moment, the first edge's counts."""
        target = np.concatenate([part.target for part in edges])
        source = np.concatenate([part.source for part in edges])
        order = np.lexsort((-np.arange(len(target)), moments_ns[source], target))
        ends = np.append(np.flatnonzero(np.diff(target[order])), len(target) - 1)
        latest = order[ends[ends >= 0]]
        last = np.full(len(moments_ns), -1)
        last[target[latest]] = source[latest]
        # As lists: they are asked once a wait and stage, which in a long pipeline is millions.
        self.moments_ns: list[int] = moments_ns.tolist()
        self.last_source: list[int] = last.tolist()
        """Of each event; -1 where it waited for none."""

    def way_back(self, event: int, begin_ns: int, end_ns: int) -> Iterator[Stretch]:
        """Yield what a wait for an event comes down to, the latest first.

        Where a trace leads in a circle, which only one that contradicts itself does, what is left
        has no event: -1.
        """
        waiting = -1
        for _ in self.moments_ns:
            source = self.last_source[event]
            there = begin_ns if source < 0 else max(self.moments_ns[source], begin_ns)
            if there < end_ns:
                yield Stretch(event, waiting, there, end_ns)
                end_ns = there
            if end_ns <= begin_ns:
                return
            waiting, event = event, source
        yield Stretch(-1, -1, begin_ns, end_ns)


class Network:
    """Runs one set of events with any lengths; events that follow one other alone are skipped."""

    def __init__(
        self,
        events: int,
        edges: tuple[Edges, ...],
        *,
        floored: Flags,
        asked: I64,
        used: Flags | None = None,
    ) -> None:
        """Only `floored` events, and such without sources, may have floors; unused edges go.

        Events that are `asked` for alone, by `run_for`, are never skipped.
        """
        self._events = events
        names = list(dict.fromkeys(part.length for part in edges))
        target = np.concatenate([part.target for part in edges])
        source = np.concatenate([part.source for part in edges])
        name = np.concatenate([np.full(len(part.rows), names.index(part.length)) for part in edges])
        rows = np.concatenate([part.rows for part in edges])
        if used is not None:
            target, source, name, rows = target[used], source[used], name[used], rows[used]
        skips = ~floored & (np.bincount(target, minlength=events) == 1)
        skips[asked] = False
        # The edge into each event that is skipped.
        into = np.zeros(events, dtype=np.int64)
        only = np.flatnonzero(skips[target])
        into[target[only]] = only
        self._kept, self._skipped = np.flatnonzero(~skips), np.flatnonzero(skips)
        self._number = np.where(skips, -1, np.cumsum(~skips) - 1)
        """Of each event among those that are kept; -1 where it is skipped."""
        edge = np.flatnonzero(~skips[target])
        anchor, starts, passed = _walk_back(source[edge], skips, into, source)
        # A new edge is as long as the old one that it ends with, and those that it goes past.
        new, old = np.concatenate((np.arange(len(edge)), starts)), np.concatenate((edge, passed))
        target, anchor = self._number[target[edge]], self._number[anchor]
        left = _Left(
            target=target,
            source=anchor,
            lengths=(new, names, name[old], rows[old]),
            floored=floored[self._kept],
            waits=Waits(len(self._kept), target, anchor),
        )
        # On many levels of few events one run takes longer than without, and may be the only one.
        self._left = left if left.waits.narrow else left.put_on_levels()
        anchor, starts, passed = _walk_back(self._skipped, skips, into, source)
        self._anchor = self._number[anchor]
        """The event, by its new number, that each skipped one follows."""
        self._of_later = len(self._skipped), starts, names, name[passed], rows[passed]

    @cached_property
    def _later(self) -> _Totals:
        """When what was skipped happens, after its anchor; many runs never ask."""
        return _Totals(*self._of_later)

    def refuse_circle(self) -> None:
        """Raise `OrderCycle` where events wait for each other; what is on levels does not."""
        if isinstance(self._left, _Left):
            self._left.waits.levels()

    def run(self, columns: Mapping[str, I64], floor_ns: I64) -> I64:
        """Return when every event happens; a second dimension of lengths holds many runs."""
        kept = self._run_kept(columns, floor_ns)
        later = self._later.of(columns)
        if kept.ndim == 1 and later.varied.ndim > 1:  # all that varies was skipped
            kept = np.repeat(kept[:, None], later.varied.shape[1], axis=1)
        moments = np.empty((self._events, *kept.shape[1:]), dtype=np.int64)
        moments[self._kept] = kept
        steady = later.steady[:, None] if kept.ndim > 1 else later.steady
        moments[self._skipped] = kept[self._anchor] + steady
        if len(later.rows):
            moments[self._skipped[later.rows]] += later.varied
        return moments

    def run_for(self, wanted: I64, columns: Mapping[str, I64], floor_ns: I64) -> I64:
        """Return when some of the events that are asked for happen, and no others."""
        return self._run_kept(columns, floor_ns, self._number[wanted])

    def _run_kept(
        self, columns: Mapping[str, I64], floor_ns: I64, wanted: I64 | None = None
    ) -> I64:
        floor, left = floor_ns[self._kept], self._left
        if isinstance(left, _Left):
            if all(column.ndim == 1 for column in (floor, *columns.values())):
                after = _Totals(len(left.target), *left.lengths).of(columns)
                moments = left.waits.run_once(after.steady, floor)
                return moments if wanted is None else moments[wanted]
            self._left = left = left.put_on_levels()
        graph, totals = left
        return graph.run_delays(totals.of(columns), floor, wanted)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Left:
    """Events that are kept, by their new numbers, and the edges between them."""

    target: I64
    source: I64
    lengths: tuple[I64, list[str], I64, I64]
    """To which edge to add which length: of a name, by its number, in a row."""
    floored: Flags
    waits: Waits

    def put_on_levels(self) -> tuple[EventGraph, _Totals]:
        """Return what runs many runs at once, and the lengths of edges in its order."""
        graph = EventGraph(len(self.floored), self.target, self.source, self.floored, self.waits)
        stands = np.empty(len(self.target), dtype=np.int64)
        stands[graph.edge_order] = np.arange(len(stands))
        new, names, name, rows = self.lengths
        return graph, _Totals(len(stands), stands[new], names, name, rows)


def _walk_back(start: I64, skips: Flags, into: I64, source: I64) -> tuple[I64, I64, I64]:
    """Go back from events to the first that is kept.

    Return it for each, and the edges passed: by which of the starts, and which edge.
    """
    at = start.copy()
    rows, edges = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
    while len(going := np.flatnonzero(skips[at])):
        passed = into[at[going]]
        rows.append(going)
        edges.append(passed)
        at[going] = source[passed]
    return at, np.concatenate(rows), np.concatenate(edges)


class _Totals:
    """Adds up lengths by name."""

    def __init__(self, count: int, new: I64, names: list[str], name: I64, rows: I64) -> None:
        """Add to each of `new` totals the length of a name, by its number, in a row."""
        self._count = count
        self._parts: dict[str, list[tuple[I64, I64]]] = {}
        """What to add to which total, and from which rows; totals in ascending order."""
        for number, text in enumerate(names):
            mine = np.flatnonzero(name == number)
            chosen = [mine[part] for part in _without_repeats(new[mine])]
            self._parts[text] = [(new[part], rows[part]) for part in chosen]

    def of(self, columns: Mapping[str, I64]) -> Delays:
        """Return the totals; those alone in two dimensions of which a part is."""
        total = np.zeros(self._count, dtype=np.int64)
        varies = np.zeros(self._count, dtype=bool)
        wide = []
        for name, parts in self._parts.items():
            for new, rows in parts:
                if columns[name].ndim > 1:
                    varies[new] = True
                    wide.append((new, rows, columns[name]))
                else:
                    total[new] += columns[name][rows]
        chosen = np.flatnonzero(varies)
        if not wide:
            return Delays(steady=total, rows=chosen, varied=total[:0])
        varied = np.empty((len(chosen), wide[0][2].shape[1]), dtype=np.int64)
        number = np.cumsum(varies) - 1
        for new, rows, column in wide:
            first = varies[new]
            varies[new] = False
            varied[number[new[first]]] = column.take(rows[first], axis=0)
            if not first.all():
                varied[number[new[~first]]] += column.take(rows[~first], axis=0)
        return Delays(steady=total, rows=chosen, varied=varied)


def _without_repeats(numbers: I64) -> Iterator[I64]:
    """Yield rows of numbers, in as many parts as a number is there, none twice in a part."""
    order = np.argsort(numbers, kind="stable")
    ordered = numbers[order]
    time = np.arange(len(order)) - np.searchsorted(ordered, ordered)
    for part in range(int(time.max(initial=-1)) + 1):
        yield order[time == part]
