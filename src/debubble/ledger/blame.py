"""A wait in → what it was for in the end, instant by instant.

A wait is followed to the activity waited for, and on from there as long as that waits too: from a
pass to the message it needs, to the batch that has not started, to the pass before that batch, to
the rank of that pass. All at one instant, so that a wait may be cut into several.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from debubble.ledger.model import RootKind
from debubble.simulate.measured import MeasuredStep
from debubble.timeline.model import I64, Intervals, split

_MOST_A_RANK = 16


class Piece(NamedTuple):
    """A stretch of a wait with one root."""

    begin: int
    end: int
    kind: RootKind
    row: int
    queued: bool = False


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
        self._rows = [
            np.flatnonzero(program.passes.place == place) for place in range(len(program.ranks))
        ]
        self._starts = [times.pass_start[rows] for rows in self._rows]
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
        """Yield why a rank waited from `begin` to `end`, in no pass: pieces that cover it."""
        self._followed.clear()
        number = int(np.searchsorted(self._starts[place], begin, side="right"))
        if number < len(self._rows[place]):
            yield from self._not_started(int(self._rows[place][number]), begin, end)
        else:
            yield from self._unfinished(self._last, begin, end)

    def _not_started(self, row: int, begin: int, end: int) -> Iterator[Piece]:
        """Say why a pass has not started, while its rank is in no other pass."""
        arrival, message, producer = self._inputs[row]
        until = min(end, arrival)
        if begin < until:
            if message >= 0:
                yield from self._on_its_way(message, begin, until)
            else:
                yield from self._unfinished(producer, begin, until)
        if (ready := max(begin, until)) < end:
            yield from self._host(int(self._step.program.passes.place[row]), ready, end)

    def _unfinished(self, row: int, begin: int, end: int) -> Iterator[Piece]:
        """Say what a pass that has not ended is doing, or what its rank does instead."""
        if self._turns_back("pass", row):
            yield Piece(begin, end, RootKind.NOTHING, -1)
            return
        times = self._step.times
        place = int(self._step.program.passes.place[row])
        rows, starts = self._rows[place], self._starts[place]
        at = begin
        while at < end:
            number = int(np.searchsorted(starts, at, side="right"))
            current = int(rows[number - 1]) if number else -1
            until = min(end, int(starts[number])) if number < len(rows) else end
            if current >= 0 and (over := int(times.pass_end[current])) > at:
                until = min(until, over)
                yield Piece(at, until, RootKind.PASS, current)
            elif number < len(rows):
                yield from self._not_started(int(rows[number]), at, until)
            else:
                yield Piece(at, until, RootKind.NOTHING, -1)
            at = until
        self._followed.discard(("pass", row))

    def _on_its_way(self, message: int, begin: int, end: int) -> Iterator[Piece]:
        """Say why a message has not been received: who is not there, or the wire."""
        messages, times = self._step.program.messages, self._step.times
        sent, received = int(messages.sent[message]), int(messages.received[message])
        both = int(max(times.batch_start[sent], times.batch_start[received]))
        until = min(end, both)
        if begin < until:
            later = received if times.batch_start[received] > times.batch_start[sent] else sent
            yield from self._batch_not_started(later, begin, until)
        if (at := max(begin, until)) < end:
            yield Piece(at, end, RootKind.MESSAGE, message)

    def _batch_not_started(self, batch: int, begin: int, end: int) -> Iterator[Piece]:
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
            yield from self._unfinished(after, at, until)
            at = until
        if at < (until := min(end, free)):
            for piece in self._batch_unfinished(before, at, until):
                yield piece._replace(queued=True)
            at = until
        launched = int(batches.launched_after[batch])
        begun = int(times.batch_start[launched]) if launched >= 0 else begin
        if at < (until := min(end, begun)):
            for piece in self._batch_not_started(launched, at, until):
                yield piece._replace(queued=True)
            at = until
        issued = int(self._step.lengths.batch_floor[batch])
        if at < (until := min(end, issued)):
            yield from self._late(int(batches.place[batch]), at, until)
            at = until
        if at < end:
            yield from self._host(int(batches.place[batch]), at, end)
        self._followed.discard(("batch", batch))

    def _batch_unfinished(self, batch: int, begin: int, end: int) -> Iterator[Piece]:
        times = self._step.times
        at = begin
        if at < (until := min(end, int(times.batch_start[batch]))):
            yield from self._batch_not_started(batch, at, until)
            at = until
        if at < end:
            yield from self._on_its_way(self._last_to_come(batch), at, end)

    def _last_to_come(self, batch: int) -> int:
        """Return the message of a batch whose other side came last."""
        messages, times = self._step.program.messages, self._step.times
        return max(
            self._carried[batch],
            key=lambda one: max(
                times.batch_start[messages.sent[one]], times.batch_start[messages.received[one]]
            ),
        )

    def _host(self, place: int, begin: int, end: int) -> Iterator[Piece]:
        """Cut a stretch in which a rank could have gone on, by what held it up."""
        for first, last, collective in split(self._collectives[place], begin, end):
            if collective:
                yield Piece(first, last, RootKind.COLLECTIVE, place)
                continue
            for begun, ended, gathers in split(self._data_parallel[place], first, last):
                if gathers:
                    yield Piece(begun, ended, RootKind.DATA_PARALLEL, place)
                else:
                    yield from self._host_late(place, begun, ended)

    def _host_late(self, place: int, begin: int, end: int) -> Iterator[Piece]:
        """Say when the host of a rank was late; else nobody knows what held it up."""
        late = self._unissued[place]
        at = begin
        row = int(np.searchsorted(late.end_ns, begin, side="right"))
        while at < end and row < len(late.start_ns) and late.start_ns[row] < end:
            if at < (start := int(late.start_ns[row])):
                yield Piece(at, start, RootKind.NOTHING, place)
                at = start
            until = min(end, int(late.end_ns[row]))
            yield from self._late(place, at, until)
            at = until
            row += 1
        if at < end:
            yield Piece(at, end, RootKind.NOTHING, place)

    def _late(self, place: int, begin: int, end: int) -> Iterator[Piece]:
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
