"""What is run, without durations: events that wait for others, and the program they make.

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

from dataclasses import dataclass, field, fields
from itertools import pairwise

import numpy as np

from debubble.errors import DebubbleError
from debubble.timeline.model import I32, I64, U8, Flags

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
        floored: Flags | None = None,
        waits: Waits | None = None,
    ) -> None:
        """Without `floored` any event may have a floor; with it, those, and any without sources."""
        self.events = events
        level = (waits or Waits(events, target, source)).levels()
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
        held = (np.ones(events, dtype=bool) if floored is None else floored)[self._events]
        held = np.logical_or.reduceat(held, firsts[:-1]) if events else held
        self._levels = [
            _Level(firsts[number], firsts[number + 1], turns[number], bool(held[number]))
            for number in range(1, levels)
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
        """Return when each event happens in one run, without levels: see `EventGraph.run`."""
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


NONE = -1


def _nothing() -> I64:
    return np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class PassTable:
    """The passes of all ranks, by rank and then in the order that each rank runs them."""

    place: I32
    """Which of the pipeline's ranks, counted from the first."""
    stage: I32
    kind: U8
    microbatch: I32
    before: I64
    """The row of the pass before it on its rank; -1 for the first."""

    def __len__(self) -> int:
        return len(self.place)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTable:
    """Messages that a rank carries out as one: a kernel on a queue, that spins until it is done."""

    place: I32
    before: I64
    """The row of the batch before it on its queue, which it cannot overtake; -1 for none."""
    after: I64
    """The row of the last pass issued before it on its rank, which it waits for; -1 for none."""
    launched_after: I64
    """The row of the batch launched before it on another queue, where a device starts what it is
    given in that order (`CUDA_DEVICE_MAX_CONNECTIONS=1`, as Megatron asks for); -1 for none."""

    def __len__(self) -> int:
        return len(self.place)


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageTable:
    """Messages, each sent by a batch and received by another."""

    sent: I64
    """Row of the batch that sends it."""
    received: I64
    producer: I64
    """Row of the pass whose result it is; -1 where that is not known."""
    consumer: I64
    rendezvous: Flags
    """The sender waits for the receiver; otherwise the message is buffered on its way."""

    def __len__(self) -> int:
        return len(self.sent)


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncTable:
    """Calls that keep a host until its device is done, by rank and then in their order."""

    place: I32
    before: I64
    """The row of the call before it on its rank; -1 for the first."""
    after: I64
    """The row of the pass that it waits for; -1 for none."""
    inside: Flags
    """It lies in the midst of that pass: only what was launched of it until then is waited for."""
    batches: I64
    """Two columns: a call, and a batch that it waits for."""
    pass_call: I64
    """For each pass the last call before it was issued; -1 where there is none."""
    batch_call: I64

    def __len__(self) -> int:
        return len(self.place)


def no_syncs(passes: int, batches: int) -> SyncTable:
    """Return no call at all: hosts run ahead of their devices."""
    return SyncTable(
        place=_nothing().astype(np.int32),
        before=_nothing(),
        after=_nothing(),
        inside=_nothing().astype(bool),
        batches=_nothing().reshape(-1, 2),
        pass_call=np.full(passes, NONE),
        batch_call=np.full(batches, NONE),
    )


def in_exchange(sent: I64, received: I64) -> Flags:
    """Tell messages whose two batches carry one the other way, too."""
    size = int(max(sent.max(initial=-1), received.max(initial=-1))) + 1
    sends, receives = np.zeros((2, size), dtype=bool)
    sends[sent] = receives[received] = True
    there: Flags = receives[sent] & sends[received]
    some = np.flatnonzero(there)
    sent, received = sent[some], received[some]
    there[some] = np.isin(sent * size + received, received * size + sent)
    return there


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A step: passes, batches of messages, and passes that need others with no message known."""

    ranks: tuple[int, ...]
    passes: PassTable
    batches: BatchTable
    messages: MessageTable
    needs: I64
    """Two columns, one row a need: a pass, and the pass whose result it needs."""
    pairs: I64 = field(default_factory=_nothing)
    """Rows of forward passes that run as one with the pass after them, where a plan says so: what
    either needs is needed by the first, what either makes leaves after the second."""
    waits: I64 = field(default_factory=lambda: _nothing().reshape(-1, 2))
    """Two columns: a pass, and a batch that its host lets it wait for, needed or not."""
    syncs: SyncTable = field(default_factory=lambda: no_syncs(0, 0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """How long everything takes. A second dimension holds many runs at once."""

    passes: I64
    pass_gaps: I64
    """From the moment a pass could start to its start."""
    batch_gaps: I64
    sending: I64
    """Of each message: from its sending batch's start to that one's end."""
    wire: I64
    """From the sending batch's start to the receiving one's end, if that was there."""
    drain: I64
    """From the receiving batch's start to its end, if the message was there."""
    pass_floor: I64
    """When the host issued it: it cannot start before."""
    batch_floor: I64
    pass_lag: I64 = field(default_factory=_nothing)
    """From the end of the call that kept the host to when it issued the pass."""
    batch_lag: I64 = field(default_factory=_nothing)
    sync_host: I64 = field(default_factory=_nothing)
    """What the host does from one such call to the next."""
    sync_tail: I64 = field(default_factory=_nothing)
    """From when what is waited for is done, or its pass began, to the end of the call."""
    sync_floor: I64 = field(default_factory=_nothing)
    """When the first call of a rank began."""

    def columns(self) -> dict[str, I64]:
        """Return all of them by name."""
        return {column.name: getattr(self, column.name) for column in fields(self)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """When everything started and ended, in the order of the program's tables."""

    pass_start: I64
    pass_end: I64
    batch_start: I64
    batch_end: I64

    @property
    def window_ns(self) -> I64:
        """From the first pass's start to the last pass's end."""
        length: I64 = np.asarray(self.pass_end.max(axis=0) - self.pass_start.min(axis=0))
        return length
