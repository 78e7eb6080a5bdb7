"""A program and lengths in → when each thing happens: one pass of max and add, for many runs.

It happens a fixed while after that one, so edges can go past it, as long as the sum of the edges
they stand for.

A rank runs its passes one after the other. A batch of messages starts after the batch before it on
its queue and after all passes issued before it. A pass waits for the batches that bring its inputs,
and for those that its host waited for. Where a host synchronises with its device, what it issues
afterwards follows what the call waited for.

What a rank gains by waiting less, the others lose in part: it is at work while they are. A measured
pass holds the slowdown of the run that it was measured in, and no other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from debubble.costs.passes import trailing_activity
from debubble.simulate.events import NEVER_NS, Delays, EventGraph
from debubble.simulate.program import Lengths, Program, Times
from debubble.timeline.model import F64, I64, Flags


@dataclass(frozen=True, slots=True, kw_only=True)
class Sums:
    """Which old edges each new one is the sum of, a pair a part."""

    new: I64
    old: I64


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortened:
    """A graph with fewer events, numbered anew."""

    kept: I64
    """The old number of each event."""
    target: I64
    source: I64
    sums: Sums
    skipped: I64
    """The old numbers of the other events."""
    anchor: I64
    """The event, by its new number, that each of them follows."""
    skipped_sums: Sums


def shorten(events: int, target: I64, source: I64, may_skip: Flags) -> Shortened:
    """Skip events that wait for one other alone, where they may be skipped."""
    skipped = may_skip & (np.bincount(target, minlength=events) == 1)
    into = np.zeros(events, dtype=np.int64)
    """The edge into each event that is skipped."""
    only = np.flatnonzero(skipped[target])
    into[target[only]] = only
    number = np.cumsum(~skipped) - 1
    edges = np.flatnonzero(~skipped[target])
    anchors, sums = _walk_back(source[edges], skipped, into, source)
    away = np.flatnonzero(skipped)
    away_anchors, away_sums = _walk_back(away, skipped, into, source)
    return Shortened(
        kept=np.flatnonzero(~skipped),
        target=number[target[edges]],
        source=number[anchors],
        sums=Sums(
            new=np.concatenate((np.arange(len(edges)), sums.new)),
            old=np.concatenate((edges, sums.old)),
        ),
        skipped=away,
        anchor=number[away_anchors],
        skipped_sums=away_sums,
    )


def _walk_back(start: I64, skipped: Flags, into: I64, source: I64) -> tuple[I64, Sums]:
    """Go back from events to the first that is not skipped; return it, and the edges passed."""
    at = start.copy()
    rows, edges = [np.zeros(0, dtype=np.int64)], [np.zeros(0, dtype=np.int64)]
    while len(going := np.flatnonzero(skipped[at])):
        passed = into[at[going]]
        rows.append(going)
        edges.append(passed)
        at[going] = source[passed]
    return at, Sums(new=np.concatenate(rows), old=np.concatenate(edges))


Columns = Mapping[str, I64]
"""Lengths by name; a second dimension holds many runs."""


@dataclass(frozen=True, slots=True)
class Edges:
    """Events that wait for others, and which rows of which lengths lie between."""

    target: I64
    source: I64
    length: str
    rows: I64


class Network:
    """Runs one set of events with any lengths."""

    def __init__(
        self, events: int, edges: tuple[Edges, ...], *, floored: Flags, used: Flags | None = None
    ) -> None:
        """Only `floored` events, and such without sources, may have floors; unused edges go."""
        self._events = events
        target = np.concatenate([one.target for one in edges])
        source = np.concatenate([one.source for one in edges])
        number = np.concatenate([np.full(len(one.rows), n) for n, one in enumerate(edges)])
        rows = np.concatenate([one.rows for one in edges])
        if used is not None:
            target, source, number, rows = (one[used] for one in (target, source, number, rows))
        short = shorten(events, target, source, ~floored)
        self._kept, self._skipped, self._anchor = short.kept, short.skipped, short.anchor
        self._graph = EventGraph(len(short.kept), short.target, short.source, floored[short.kept])
        stands = np.argsort(self._graph.edge_order)
        names = [one.length for one in edges]
        sums = Sums(new=stands[short.sums.new], old=short.sums.old)
        self._after = _Totals(len(short.target), sums, names, number, rows)
        self._of_later = len(short.skipped), short.skipped_sums, names, number, rows
        self._number = np.full(events, -1)
        self._number[short.kept] = np.arange(len(short.kept))

    @cached_property
    def _later(self) -> _Totals:
        """When what was skipped happens; many runs never ask."""
        return _Totals(*self._of_later)

    def run(self, columns: Columns, floor_ns: I64) -> I64:
        """Return when every event happens."""
        kept = self._graph.run_delays(self._after.of(columns), floor_ns[self._kept])
        later = self._later.of(columns)
        moments = np.empty((self._events, *kept.shape[1:]), dtype=np.int64)
        moments[self._kept] = kept
        steady = later.steady[:, None] if kept.ndim > 1 else later.steady
        moments[self._skipped] = kept[self._anchor] + steady
        if len(later.rows):
            moments[self._skipped[later.rows]] += later.varied
        return moments

    def run_for(self, wanted: I64, columns: Columns, floor_ns: I64) -> I64:
        """Return when some events happen that may have floors, and no others."""
        after, floor = self._after.of(columns), floor_ns[self._kept]
        return self._graph.run_delays(after, floor, self._number[wanted])


class _Totals:
    """Adds up lengths by name."""

    def __init__(self, count: int, sums: Sums, names: list[str], number: I64, rows: I64) -> None:
        self._count = count
        self._parts: dict[str, list[tuple[I64, I64]]] = {}
        """What to add to which total, and from which rows; totals in ascending order."""
        for name in dict.fromkeys(names):
            numbers = [one for one, other in enumerate(names) if other == name]
            mine = np.flatnonzero(np.isin(number[sums.old], numbers))
            chosen = [mine[part] for part in _without_repeats(sums.new[mine])]
            self._parts[name] = [(sums.new[one], rows[sums.old[one]]) for one in chosen]

    def of(self, columns: Columns) -> Delays:
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
        return Delays(steady=total, rows=chosen, varied=_add_up(chosen, wide))


def _add_up(chosen: I64, parts: list[tuple[I64, I64, I64]]) -> I64:
    """Return what is added to the chosen totals in each run."""
    new, rows, column = parts[0]
    if len(new) == len(chosen):
        total, parts = column[rows], parts[1:]
    else:
        total = np.zeros((len(chosen), column.shape[1]), dtype=np.int64)
    for new, rows, column in parts:
        total[np.searchsorted(chosen, new)] += column[rows]
    return total


def _without_repeats(numbers: I64) -> Iterator[I64]:
    """Yield rows of numbers, in as many parts as a number is there, none twice in a part."""
    order = np.argsort(numbers, kind="stable")
    ordered = numbers[order]
    place = np.arange(len(order)) - np.searchsorted(ordered, ordered)
    for part in range(int(place.max(initial=-1)) + 1):
        yield order[place == part]


# Many runs go through in blocks that a processor's cache can hold.
_RUNS_AT_ONCE = 256


class Engine:
    """Runs one program with any durations; refuses, when run, one that waits in a circle."""

    def __init__(self, program: Program, *, queues: bool = True) -> None:
        """Without `queues` messages overtake each other."""
        self.program = program
        p, b = len(program.passes), len(program.batches)
        # Events: starts of passes, their ends, starts of batches, their ends, ends of calls.
        self._pass_start, self._pass_end = np.arange(p), np.arange(p, 2 * p)
        self._batch_start = np.arange(2 * p, 2 * p + b)
        self._batch_end = np.arange(2 * p + b, 2 * p + 2 * b)
        self._call_end = np.arange(2 * (p + b), 2 * (p + b) + len(program.syncs))
        self._events = 2 * (p + b) + len(program.syncs)
        self._edges = (
            *self._of_passes(),
            *self._of_batches(queues=queues),
            *(self._of_hosts() if len(program.syncs) else ()),
        )
        self._first = np.flatnonzero(program.passes.before < 0)
        self._last = np.setdiff1d(np.arange(p), program.passes.before)

    def _of_passes(self) -> tuple[Edges, ...]:
        """Let a pass start after the pass before it and its inputs, and end after its start."""
        passes, messages, needs = self.program.passes, self.program.messages, self.program.needs
        waits = self.program.waits
        every, follows = np.arange(len(passes)), np.flatnonzero(passes.before >= 0)
        used = np.flatnonzero(messages.consumer >= 0)
        start, end, consumer = self._pass_start, self._pass_end, messages.consumer[used]
        arrived = self._batch_end[messages.received[used]]
        return (
            Edges(end, start, "passes", every),
            Edges(start[follows], end[passes.before[follows]], "pass_gaps", follows),
            Edges(start[consumer], arrived, "pass_gaps", consumer),
            Edges(start[needs[:, 0]], end[needs[:, 1]], "pass_gaps", needs[:, 0]),
            Edges(start[waits[:, 0]], self._batch_end[waits[:, 1]], "pass_gaps", waits[:, 0]),
        )

    def _of_batches(self, *, queues: bool) -> tuple[Edges, ...]:
        """Let a batch start after the passes before it, in its queue's order; both sides end it."""
        batches, messages = self.program.batches, self.program.messages
        after = np.flatnonzero(batches.after >= 0)
        queued = np.flatnonzero((batches.before >= 0) & queues)
        launched = np.flatnonzero((batches.launched_after >= 0) & queues)
        every, meets = np.arange(len(messages)), np.flatnonzero(messages.rendezvous)
        start, end = self._batch_start, self._batch_end
        sent, received = messages.sent, messages.received
        return (
            Edges(start[after], self._pass_end[batches.after[after]], "batch_gaps", after),
            Edges(start[queued], end[batches.before[queued]], "batch_gaps", queued),
            Edges(start[launched], start[batches.launched_after[launched]], "batch_gaps", launched),
            Edges(end[sent], start[sent], "sending", every),
            Edges(end[sent[meets]], start[received[meets]], "sending", meets),
            Edges(end[received], start[received], "drain", every),
            Edges(end[received], start[sent], "wire", every),
        )

    def _of_hosts(self) -> tuple[Edges, ...]:
        """Let a call end when the host has come to it and the device is done; and let go on."""
        syncs, end = self.program.syncs, self._call_end
        follows = np.flatnonzero(syncs.before >= 0)
        whole = np.flatnonzero((syncs.after >= 0) & ~syncs.inside)
        within = np.flatnonzero((syncs.after >= 0) & syncs.inside)
        passes = np.flatnonzero(syncs.pass_call >= 0)
        batches = np.flatnonzero(syncs.batch_call >= 0)
        call, batch = syncs.batches[:, 0], syncs.batches[:, 1]
        return (
            Edges(end[follows], end[syncs.before[follows]], "sync_host", follows),
            Edges(end[whole], self._pass_end[syncs.after[whole]], "sync_tail", whole),
            Edges(end[within], self._pass_start[syncs.after[within]], "sync_tail", within),
            Edges(end[call], self._batch_end[batch], "sync_tail", call),
            Edges(self._pass_start[passes], end[syncs.pass_call[passes]], "pass_lag", passes),
            Edges(self._batch_start[batches], end[syncs.batch_call[batches]], "batch_lag", batches),
        )

    @cached_property
    def _held(self) -> Network:
        """Events with hosts that may hold up any start."""
        starts = np.zeros(self._events, dtype=bool)
        starts[self._pass_start] = starts[self._batch_start] = starts[self._call_end] = True
        return Network(self._events, self._edges, floored=starts)

    @cached_property
    def _free(self) -> Network:
        """Events with nothing to hold up but first passes: a batch that waits for none is there."""
        passes = np.zeros(self._events, dtype=bool)
        passes[self._pass_start] = True
        waits = np.zeros(self._events, dtype=bool)
        for one in self._edges:
            waits[one.target] = True
        there = ~waits
        there[self._pass_start] = False
        used = np.concatenate([~there[one.source] for one in self._edges])
        return Network(self._events, self._edges, floored=passes, used=used)

    def run(self, lengths: Lengths) -> Times:
        """Return when everything happens; a column for each of many runs."""
        floor = self._floor(lengths)
        moments = self._network(lengths).run(lengths.columns(), floor)
        return Times(
            pass_start=moments[self._pass_start],
            pass_end=moments[self._pass_end],
            batch_start=moments[self._batch_start],
            batch_end=moments[self._batch_end],
        )

    def windows(self, lengths: Lengths) -> I64:
        """Return the window of each of many runs, and keep nothing else."""
        columns = lengths.columns()
        runs = max((one.shape[1] for one in columns.values() if one.ndim > 1), default=1)
        network, floor = self._network(lengths), self._floor(lengths)
        ends = np.concatenate((self._first, self._last))
        found = []
        for first in range(0, runs, _RUNS_AT_ONCE):
            block = slice(first, first + _RUNS_AT_ONCE)
            chosen: Columns = {
                name: one[:, block] if one.ndim > 1 else one for name, one in columns.items()
            }
            here = floor[:, block] if floor.ndim > 1 else floor
            starts = network.run_for(self._pass_start[ends], chosen, here)
            begun, last = starts[: len(self._first)], starts[len(self._first) :]
            lasted = chosen["passes"][self._last]
            last = last + (lasted[:, None] if lasted.ndim < last.ndim else lasted)
            found.append(np.atleast_1d(last.max(axis=0) - begun.min(axis=0)))
        return np.concatenate(found)

    def _network(self, lengths: Lengths) -> Network:
        held = (lengths.pass_floor > NEVER_NS)[self.program.passes.before >= 0].any()
        held |= bool(len(self._call_end)) or (lengths.batch_floor > NEVER_NS).any()
        return self._held if held else self._free

    def _floor(self, lengths: Lengths) -> I64:
        """Return the floors of all events."""
        wide = max(lengths.pass_floor.shape[1:], lengths.batch_floor.shape[1:])
        floor = np.full((self._events, *wide), NEVER_NS, dtype=np.int64)
        for rows, given in (
            (self._pass_start, lengths.pass_floor),
            (self._batch_start, lengths.batch_floor),
            (self._call_end, lengths.sync_floor),
        ):
            floor[rows] = given[:, None] if given.ndim < floor.ndim else given
        return floor


# When passes are at work follows from how long they take: from here on windows move by less than
# a thousandth, on the recorded runs.
_ROUNDS = 4


def run_shared(engine: Engine, lengths: Lengths, *, measured_activity: F64, slope: float) -> Times:
    """Run with passes as much slower as more ranks are at work than when they were measured.

    A second dimension of the lengths holds many runs.
    """
    times = engine.run(lengths)
    measured = measured_activity.reshape(-1, *[1] * (lengths.passes.ndim - 1))
    for _ in range(_ROUNDS):
        more = trailing_activity(times.pass_start, times.pass_end) - measured
        slowed = np.rint(lengths.passes * np.exp(slope * more)).astype(np.int64)
        times = engine.run(replace(lengths, passes=slowed))
    return times


def covered_ns(program: Program, times: Times) -> F64:
    """Return it for each pass, and each of many runs; waiting for the other side is no message."""
    messages, place = program.messages, program.batches.place
    begun = np.maximum(times.batch_start[messages.sent], times.batch_start[messages.received])
    over = times.batch_end[messages.received]
    covered = np.zeros(times.pass_start.shape)
    for rank in range(len(program.ranks)):
        mine = program.passes.place == rank
        touches = (place[messages.sent] == rank) | (place[messages.received] == rank)
        covered[mine] = under(
            times.pass_start[mine], times.pass_end[mine], begun[touches], over[touches]
        )
    return covered


def under(start_ns: I64, end_ns: I64, begun_ns: I64, over_ns: I64) -> F64:
    """Return how much of each stretch lies under some others; a second dimension holds runs."""
    if start_ns.ndim == 1:
        return _of_one_run(start_ns, end_ns, begun_ns, over_ns)
    runs = range(start_ns.shape[1])
    columns = (start_ns, end_ns, begun_ns, over_ns)
    return np.stack([_of_one_run(*(one[:, run] for one in columns)) for run in runs], axis=1)


def _of_one_run(start_ns: I64, end_ns: I64, begun_ns: I64, over_ns: I64) -> F64:
    begun, over = np.sort(begun_ns).astype(np.float64), np.sort(over_ns).astype(np.float64)
    sums = [np.concatenate(([0.0], np.cumsum(one))) for one in (begun, over)]

    def passed(moment: I64) -> F64:
        first = np.searchsorted(begun, moment, side="right")
        last = np.searchsorted(over, moment, side="right")
        here: F64 = (first * moment - sums[0][first]) - (last * moment - sums[1][last])
        return here

    length = (end_ns - start_ns).astype(np.float64)
    # Two messages at once cover no more than one does.
    return np.clip(passed(end_ns) - passed(start_ns), 0.0, length)
