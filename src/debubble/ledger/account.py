"""A replayed step in → every nanosecond under one cause, waits followed to what was waited for.

A wait is followed to the activity waited for, and on from there as long as that waits too: from a
pass to the message it needs, to the batch that has not started, to the pass before that batch, to
the rank of that pass. All at one instant, so that a wait may be cut into several.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from debubble.ledger.causes import CAUSES, NUMBER_OF, Cause, RootKind, Stretch
from debubble.ledger.model import Account
from debubble.links.hop_times import ExpectedTimes
from debubble.simulate.costs.passes import PassCosts, collectives_of
from debubble.simulate.measured import MeasuredStep
from debubble.timeline.model import I64, Flags, Intervals, RankTimeline, split, without

_MOST_A_RANK = 16


class Piece(NamedTuple):
    """A stretch of a wait with one root."""

    begin: int
    end: int
    kind: RootKind
    row: int
    queued: bool = False


Way: TypeAlias = "Iterator[Piece | Way | _Queued]"
"""What is found on the way to whoever is to blame: pieces, and further ways to go."""


class _Queued(NamedTuple):
    """A way behind others in a queue: all that is found on it is."""

    way: Way


class Blame:
    """Follows the waits of one step. Times count from the start of its window."""

    def __init__(
        self,
        step: MeasuredStep,
        unissued: tuple[Intervals, ...],
        synchronised: tuple[Intervals, ...],
        collectives: tuple[Intervals, ...],
        data_parallel: tuple[Intervals, ...],
    ) -> None:
        """Take when each rank's host was late or kept, and when it was in collectives.

        `unissued`: it had not issued what ran next; `synchronised`: its device kept it. Collectives
        are those that nothing covered: of passes, and of data parallelism beside them.
        """
        self._collectives, self._data_parallel = collectives, data_parallel
        self._step = step
        self._unissued = unissued
        self._synchronised = synchronised
        program, times = step.program, step.times
        # As lists: they are asked once a wait and stage, which in a long pipeline is millions.
        self._rows: list[list[int]] = [[] for _ in program.ranks]
        self._places: list[int] = program.passes.place.tolist()
        for row, place in enumerate(self._places):
            self._rows[place].append(row)
        begins = times.pass_start.tolist()
        self._starts = [[begins[row] for row in rows] for rows in self._rows]
        self._ends: list[int] = times.pass_end.tolist()
        self._last = int(times.pass_end.argmax())
        self._inputs = _inputs(step)
        self._carried: list[list[int]] = [[] for _ in range(len(program.batches))]
        for number, (sent, received) in enumerate(
            zip(program.messages.sent.tolist(), program.messages.received.tolist(), strict=True)
        ):
            self._carried[sent].append(number)
            self._carried[received].append(number)
        self._followed: set[tuple[str, int]] = set()
        # At one instant each rank has one pass under way and a few batches in its queues.
        self._longest = _MOST_A_RANK * len(program.ranks)

    def follow(self, place: int, begin: int, end: int) -> Iterator[Piece]:
        """Yield why a rank waited from `begin` to `end`, in no pass: pieces that cover it.

        A way leads through every stage of a pipeline: what is followed next is kept in a list, so
        that no pipeline is too deep for Python.
        """
        self._followed.clear()
        number = bisect_right(self._starts[place], begin)
        way = self._unfinished(self._last, begin, end)
        if number < len(self._rows[place]):
            way = self._not_started(self._rows[place][number], begin, end)
        ways = [(way, False)]
        while ways:
            way, queued = ways[-1]
            found = next(way, None)
            if found is None:
                ways.pop()
            elif isinstance(found, Piece):
                yield found._replace(queued=True) if queued else found
            elif isinstance(found, _Queued):
                ways.append((found.way, True))
            else:
                ways.append((found, queued))

    def _not_started(self, row: int, begin: int, end: int) -> Way:
        """Say why a pass has not started, while its rank is in no other pass."""
        arrival, message, producer = self._inputs[row]
        until = min(end, arrival)
        if begin < until:
            if message >= 0:
                yield self._on_its_way(message, begin, until)
            else:
                yield self._unfinished(producer, begin, until)
        if (ready := max(begin, until)) < end:
            yield self._host(self._places[row], ready, end)

    def _unfinished(self, row: int, begin: int, end: int) -> Way:
        """Say what a pass that has not ended is doing, or what its rank does instead."""
        if self._turns_back("pass", row):
            yield Piece(begin, end, RootKind.NOTHING, -1)
            return
        place = self._places[row]
        rows, starts = self._rows[place], self._starts[place]
        at = begin
        while at < end:
            number = bisect_right(starts, at)
            current = rows[number - 1] if number else -1
            until = min(end, starts[number]) if number < len(rows) else end
            if current >= 0 and (over := self._ends[current]) > at:
                until = min(until, over)
                yield Piece(at, until, RootKind.PASS, current)
            elif number < len(rows):
                yield self._not_started(rows[number], at, until)
            else:
                yield Piece(at, until, RootKind.NOTHING, -1)
            at = until
        self._followed.discard(("pass", row))

    def _on_its_way(self, message: int, begin: int, end: int) -> Way:
        """Say why a message has not been received: who is not there, or the wire."""
        messages, times = self._step.program.messages, self._step.times
        sent, received = int(messages.sent[message]), int(messages.received[message])
        both = int(max(times.batch_start[sent], times.batch_start[received]))
        until = min(end, both)
        if begin < until:
            later = received if times.batch_start[received] > times.batch_start[sent] else sent
            yield self._batch_not_started(later, begin, until)
        if (at := max(begin, until)) < end:
            yield Piece(at, end, RootKind.MESSAGE, message)

    def _batch_not_started(self, batch: int, begin: int, end: int) -> Way:
        """Say what a batch stands behind: a pass issued before it, or another batch."""
        if self._turns_back("batch", batch):
            yield Piece(begin, end, RootKind.NOTHING, -1)
            return
        batches, times = self._step.program.batches, self._step.times
        after, before = int(batches.after[batch]), int(batches.before[batch])
        computed = int(times.pass_end[after]) if after >= 0 else begin
        free = int(times.batch_end[before]) if before >= 0 else begin
        at = begin
        if at < (until := min(end, computed)):
            yield self._unfinished(after, at, until)
            at = until
        if at < (until := min(end, free)):
            yield _Queued(self._batch_unfinished(before, at, until))
            at = until
        launched = int(batches.launched_after[batch])
        begun = int(times.batch_start[launched]) if launched >= 0 else begin
        if at < (until := min(end, begun)):
            yield _Queued(self._batch_not_started(launched, at, until))
            at = until
        issued = int(self._step.lengths.batch_floor[batch])
        if at < (until := min(end, issued)):
            yield self._late(int(batches.place[batch]), at, until)
            at = until
        if at < end:
            yield self._host(int(batches.place[batch]), at, end)
        self._followed.discard(("batch", batch))

    def _batch_unfinished(self, batch: int, begin: int, end: int) -> Way:
        times = self._step.times
        at = begin
        if at < (until := min(end, int(times.batch_start[batch]))):
            yield self._batch_not_started(batch, at, until)
            at = until
        if at < end:
            yield self._on_its_way(self._last_to_come(batch), at, end)

    def _last_to_come(self, batch: int) -> int:
        """Return the message of a batch whose other side came last."""
        messages, times = self._step.program.messages, self._step.times
        return max(
            self._carried[batch],
            key=lambda message: max(
                times.batch_start[messages.sent[message]],
                times.batch_start[messages.received[message]],
            ),
        )

    def _host(self, place: int, begin: int, end: int) -> Way:
        """Cut a stretch in which a rank could have gone on, by what held it up."""
        for first, last, collective in split(self._collectives[place], begin, end):
            if collective:
                yield Piece(first, last, RootKind.COLLECTIVE, place)
                continue
            for begun, ended, gathers in split(self._data_parallel[place], first, last):
                if gathers:
                    yield Piece(begun, ended, RootKind.DATA_PARALLEL, place)
                else:
                    yield self._host_late(place, begun, ended)

    def _host_late(self, place: int, begin: int, end: int) -> Way:
        """Say when the host of a rank was late; else nobody knows what held it up."""
        late = self._unissued[place]
        at = begin
        row = int(np.searchsorted(late.end_ns, begin, side="right"))
        while at < end and row < len(late.start_ns) and late.start_ns[row] < end:
            if at < (start := int(late.start_ns[row])):
                yield Piece(at, start, RootKind.NOTHING, place)
                at = start
            until = min(end, int(late.end_ns[row]))
            yield self._late(place, at, until)
            at = until
            row += 1
        if at < end:
            yield Piece(at, end, RootKind.NOTHING, place)

    def _late(self, place: int, begin: int, end: int) -> Way:
        """Cut a stretch in which a host was late: kept until its device was done, or of itself."""
        for first, last, kept in split(self._synchronised[place], begin, end):
            yield Piece(first, last, RootKind.HOST_SYNC if kept else RootKind.HOST, place)

    def _turns_back(self, what: str, row: int) -> bool:
        """Tell a circle, or a way too long, which only a trace that contradicts itself can have."""
        if (what, row) in self._followed or len(self._followed) >= self._longest:
            return True
        self._followed.add((what, row))
        return False


def _inputs(step: MeasuredStep) -> list[tuple[int, int, int]]:
    """Return for each pass when its last input came, and by which message or from which pass."""
    program, times = step.program, step.times
    found: list[tuple[int, int, int]] = [(np.iinfo(np.int64).min, -1, -1)] * len(program.passes)
    arrivals: I64 = times.batch_end[program.messages.received]
    for message, consumer in enumerate(program.messages.consumer.tolist()):
        if consumer >= 0:
            found[consumer] = max(found[consumer], (int(arrivals[message]), message, -1))
    for needing, needed in program.needs.tolist():
        found[needing] = max(found[needing], (int(times.pass_end[needed]), -1, needed))
    carried = {batch: row for row, batch in enumerate(program.messages.sent.tolist())}
    carried |= {batch: row for row, batch in enumerate(program.messages.received.tolist())}
    for waiting, batch in program.waits.tolist():
        ended = (int(times.batch_end[batch]), carried[batch], -1)
        found[waiting] = max(found[waiting], ended)
    return found


Cut = tuple[int, int, Cause]
AnyArray = NDArray[np.generic]
_COMPUTE, _COLLECTIVE = NUMBER_OF[Cause.COMPUTE], NUMBER_OF[Cause.COLLECTIVE]
_HOST, _UNEXPLAINED = NUMBER_OF[Cause.HOST], NUMBER_OF[Cause.UNEXPLAINED]
_HOST_SYNC, _DATA_PARALLEL = NUMBER_OF[Cause.HOST_SYNC], NUMBER_OF[Cause.DATA_PARALLEL]
_CLAIMING = tuple((cause, cause.about.claims) for cause in CAUSES if cause.about.claims)
_NEVER = np.iinfo(np.int64).max
_OF_RANKS = {
    RootKind.HOST: Cause.HOST,
    RootKind.HOST_SYNC: Cause.HOST_SYNC,
    RootKind.COLLECTIVE: Cause.COLLECTIVE,
    RootKind.DATA_PARALLEL: Cause.DATA_PARALLEL,
}


@dataclass(slots=True)
class _Rows:
    """The waits of a rank, as they are written."""

    place: int
    start: list[int] = field(default_factory=list)
    end: list[int] = field(default_factory=list)
    cause: list[int] = field(default_factory=list)
    kind: list[int] = field(default_factory=list)
    root: list[int] = field(default_factory=list)
    queued: list[bool] = field(default_factory=list)

    def add(self, cut: Cut, piece: Piece) -> None:
        self.start.append(cut[0])
        self.end.append(cut[1])
        self.cause.append(NUMBER_OF[cut[2]])
        self.kind.append(piece.kind)
        self.root.append(piece.row)
        self.queued.append(piece.queued)


class _Cutter:
    """Cuts what was waited for into causes."""

    def __init__(
        self,
        step: MeasuredStep,
        costs: PassCosts,
        expected: ExpectedTimes,
        collectives: tuple[Intervals, ...],
        data: tuple[Intervals, ...],
    ) -> None:
        self._step = step
        self._costs = costs
        self._expected = expected.seen
        self._collectives, self._data = collectives, data
        self._bounds: dict[int, tuple[int, int, int, int, int, int]] = {}
        passes, times = step.program.passes, step.times
        places = range(len(step.program.ranks))
        self._first = [
            times.pass_start[passes.place == place].min(initial=_NEVER) for place in places
        ]
        self._last = [times.pass_end[passes.place == place].max(initial=0) for place in places]

    def cut(self, waiter: int, piece: Piece) -> Iterator[Cut]:
        """Yield the causes of a piece of a wait, in order of time."""
        if piece.kind is RootKind.PASS:
            yield from self._cut_pass(waiter, piece)
        elif piece.kind is RootKind.MESSAGE:
            yield from self._cut_message(piece)
        else:
            yield piece.begin, piece.end, _OF_RANKS.get(piece.kind, Cause.UNEXPLAINED)

    def _cut_pass(self, waiter: int, piece: Piece) -> Iterator[Cut]:
        """Cut by how far the pass was: an equal share, its stage's excess, its device's, its own.

        Its data come between the last two.
        """
        began, place, equal, sound, usual, uneven = self._bounds_of(piece.row)
        collectives, data = self._collectives[place], self._data[place]
        for begin, end, cause in _by_collective(collectives, data, piece.begin, piece.end):
            if cause is not None:
                yield begin, end, cause
                continue
            # Where in the pass this stretch begins, collectives before it left out.
            into = begin - began
            if len(collectives.start_ns) or len(data.start_ns):
                into -= collectives.inside(began, begin) + data.inside(began, begin)
            scheduled = Cause.TURNAROUND
            if begin < self._first[waiter]:
                scheduled = Cause.WARM_UP
            elif begin >= self._last[waiter]:
                scheduled = Cause.DRAIN
            yield from _steps(
                begin,
                end,
                (
                    (equal - into, scheduled),
                    (sound - into, Cause.IMBALANCE),
                    (usual - into, Cause.WORKER),
                    (uneven - into, Cause.DATA),
                ),
                Cause.JITTER,
            )

    def _bounds_of(self, row: int) -> tuple[int, int, int, int, int, int]:
        """Return a pass's start and place, and how far into it each of its causes reaches."""
        known = self._bounds.get(row)
        if known is None:
            passes = self._step.program.passes
            key = (int(passes.stage[row]), int(passes.kind[row]))
            number = int(passes.microbatch[row])
            typical = self._costs.typical(key, number)
            usual = typical / self._costs.heavy
            known = self._bounds[row] = (
                int(self._step.times.pass_start[row]),
                int(passes.place[row]),
                self._costs.equal[key],
                round(typical * self._costs.sound[key] / max(self._costs.median[key], 1)),
                round(usual),
                round(usual * self._costs.data.get((self._step.number, key[1], number), 1.0)),
            )
        return known

    def _cut_message(self, piece: Piece) -> Iterator[Cut]:
        messages, times = self._step.program.messages, self._step.times
        both = max(
            int(times.batch_start[messages.sent[piece.row]]),
            int(times.batch_start[messages.received[piece.row]]),
        )
        fair = int(self._expected[piece.row]) - (piece.begin - both)
        yield from _steps(piece.begin, piece.end, ((fair, Cause.TRANSFER),), Cause.SLOW_LINK)


def _by_collective(
    collectives: Intervals, data: Intervals, begin: int, end: int
) -> Iterator[tuple[int, int, Cause | None]]:
    """Cut a stretch by the collectives that it lies in: of passes, beside them, or none."""
    if not len(collectives.start_ns) and not len(data.start_ns):
        yield begin, end, None
        return
    for first, last, inside in split(collectives, begin, end):
        if inside:
            yield first, last, Cause.COLLECTIVE
            continue
        for begun, ended, beside in split(data, first, last):
            yield begun, ended, Cause.DATA_PARALLEL if beside else None


def account_step(
    step: MeasuredStep,
    ranks: tuple[RankTimeline, ...],
    costs: PassCosts,
    expected: ExpectedTimes,
) -> Account:
    """Cut ranks and window into intervals with one cause each; nothing is left out."""
    begin, length = step.begin_ns, int(step.times.pass_end.max())
    collectives = tuple(clip(collectives_of(rank), begin, length) for rank in ranks)
    unissued = tuple(_shift(rank.unissued, begin) for rank in ranks)
    synchronised = tuple(_shift(rank.synchronised, begin) for rank in ranks)
    data = tuple(clip(rank.data_parallel, begin, length) for rank in ranks)
    blame = Blame(step, unissued, synchronised, collectives, data)
    cutter = _Cutter(step, costs, expected, collectives, data)
    parts = []
    for place, rank in enumerate(ranks):
        computes = without(clip(rank.occupied, begin, length), collectives[place])
        computes = without(computes, data[place])
        mine = step.program.passes.place == place
        passes = Intervals(start_ns=step.times.pass_start[mine], end_ns=step.times.pass_end[mine])
        late = unissued[place], synchronised[place]
        held = collectives[place], data[place]
        known, waits = _cut_rank(computes, held, passes, late, length)
        rows = _Rows(place)
        for wait in waits:
            for piece in blame.follow(place, *wait):
                for cut in cutter.cut(place, piece):
                    rows.add(_claimed(step, place, piece, cut) if _CLAIMING else cut, piece)
        parts.append(_in_order(place, known, rows))
    account = Account(
        **{
            column.name: np.concatenate([part[column.name] for part in parts])
            for column in fields(Account)
        }
    )
    return _part_collectives(account, tuple(clip(r.shared.waits, begin, length) for r in ranks))


def _part_collectives(account: Account, waits: tuple[Intervals, ...]) -> Account:
    """Tell what a collective takes of itself from waiting in it for its last member.

    A rank's own, or those of the rank that is waited for.
    """
    if not any(len(stretches.start_ns) for stretches in waits):
        return account
    rows: list[int] = []
    starts: list[int] = []
    ends: list[int] = []
    causes: list[int] = []
    for row, cause in enumerate(account.cause.tolist()):
        begin, end = int(account.start_ns[row]), int(account.end_ns[row])
        cuts: Iterable[tuple[int, int, bool]] = ((begin, end, False),)
        if cause == _COLLECTIVE:
            waited_for = account.root_kind[row] == RootKind.COLLECTIVE
            place = int(account.root[row] if waited_for else account.place[row])
            cuts = split(waits[place], begin, end)
        for first, last, waiting in cuts:
            rows.append(row)
            starts.append(first)
            ends.append(last)
            causes.append(NUMBER_OF[Cause.COLLECTIVE_WAIT] if waiting else cause)
    parted = account.where(np.array(rows, dtype=np.int64))
    return replace(
        parted,
        start_ns=np.array(starts, dtype=np.int64),
        end_ns=np.array(ends, dtype=np.int64),
        cause=np.array(causes, dtype=np.uint8),
    )


def _claimed(step: MeasuredStep, place: int, piece: Piece, cut: Cut) -> Cut:
    """Put a stretch under the first cause that claims it."""
    begin, end, cause = cut
    stretch = Stretch(
        begin=begin, end=end, cause=cause, place=place, kind=piece.kind, root=piece.row
    )
    taken = next((other for other, claims in _CLAIMING if claims(step, stretch)), cause)
    return begin, end, taken


def _cut_rank(
    computes: Intervals,
    held: tuple[Intervals, Intervals],
    passes: Intervals,
    late: tuple[Intervals, Intervals],
    length: int,
) -> tuple[tuple[I64, I64, I64], list[tuple[int, int]]]:
    """Return what a rank did, and gaps inside its passes, by cause; and its waits between them.

    `held` is when it was in collectives of its passes, and beside them; `late` when its host had
    not issued what ran next, and when it was kept by a call.
    """
    (collectives, data), (unissued, synchronised) = held, late
    edges = [np.array([0, length])]
    for intervals in (computes, collectives, data, passes, unissued, synchronised):
        edges += [intervals.start_ns, intervals.end_ns]
    moments = np.unique(np.clip(np.concatenate(edges), 0, length))
    start, end = moments[:-1], moments[1:]
    occupied = _covers(computes, start) | _covers(collectives, start) | _covers(data, start)
    waits = ~occupied & ~_covers(passes, start)
    whose = np.where(_covers(synchronised, start), _HOST_SYNC, _HOST)
    cause = np.where(_covers(unissued, start), whose, _UNEXPLAINED)
    cause = np.where(_covers(data, start), _DATA_PARALLEL, cause)
    cause = np.where(_covers(collectives, start), _COLLECTIVE, cause)
    cause = np.where(_covers(computes, start), _COMPUTE, cause)
    first = waits & ~np.concatenate(([False], waits[:-1]))
    last = waits & ~np.concatenate((waits[1:], [False]))
    return (
        (start[~waits], end[~waits], cause[~waits]),
        list(zip(start[first].tolist(), end[last].tolist(), strict=True)),
    )


def _covers(intervals: Intervals, moments: I64) -> Flags:
    """Tell which moments lie in one of some intervals."""
    begun = np.searchsorted(intervals.start_ns, moments, side="right")
    over = np.searchsorted(intervals.end_ns, moments, side="right")
    inside: Flags = begun > over
    return inside


def _in_order(place: int, known: tuple[I64, I64, I64], rows: _Rows) -> dict[str, AnyArray]:
    """Lay what a rank did and what it waited for one after the other."""
    start = np.concatenate((known[0], np.array(rows.start, dtype=np.int64)))
    order = np.argsort(start)
    # The host of a rank is to blame for gaps inside its own passes.
    late, kept = known[2] == _HOST, known[2] == _HOST_SYNC
    kind = np.where(late, RootKind.HOST, np.where(kept, RootKind.HOST_SYNC, RootKind.NOTHING))
    root = np.where(late | kept, place, -1)
    columns: dict[str, AnyArray] = {
        "start_ns": start,
        "end_ns": np.concatenate((known[1], np.array(rows.end, dtype=np.int64))),
        "cause": np.concatenate((known[2], np.array(rows.cause, dtype=np.int64))).astype(np.uint8),
        "root_kind": np.concatenate((kind, np.array(rows.kind, dtype=np.int64))).astype(np.uint8),
        "root": np.concatenate((root, np.array(rows.root, dtype=np.int64))).astype(np.int32),
        "queued": np.concatenate((np.zeros(len(root), dtype=bool), np.array(rows.queued, bool))),
    }
    ordered = {name: column[order] for name, column in columns.items()}
    return ordered | {"place": np.full(len(order), place, dtype=np.int32)}


def _steps(
    begin: int, end: int, parts: tuple[tuple[int, Cause], ...], rest: Cause
) -> Iterator[Cut]:
    """Cut a stretch at the given distances from its begin, each under its cause."""
    at = begin
    for distance, cause in parts:
        until = min(end, max(at, begin + distance))
        if at < until:
            yield at, until, cause
            at = until
    if at < end:
        yield at, end, rest


def _shift(intervals: Intervals, begin: int) -> Intervals:
    return Intervals(start_ns=intervals.start_ns - begin, end_ns=intervals.end_ns - begin)


def clip(intervals: Intervals, begin: int, length: int) -> Intervals:
    """Return intervals as they lie in a window, counted from its start."""
    start = np.clip(intervals.start_ns - begin, 0, length)
    end = np.clip(intervals.end_ns - begin, 0, length)
    kept = end > start
    return Intervals(start_ns=start[kept], end_ns=end[kept])
