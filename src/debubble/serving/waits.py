"""Batches of a stream in → what a rank waits for at any time, back over the events that came last.

A batch comes to a stage by moments that follow each other, and a rank waits for the last of them:

    computed ─► send issued ─► sent ─► asked for ─► received ─► there ─► launched ─► start
            host           held    host         held        wire     host        held

The first stage waits for the batch that holds the slot, then for the way back. What was held had
all it needed: kernels that stand behind a broadcast of sampled tokens begin when it ends, so the
wait is for its last member, and on from there; else it is the launch.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from debubble.ledger.account import Piece, follow
from debubble.ledger.causes import RootKind
from debubble.serving.batches import UNSEEN, Batches
from debubble.serving.queue import Queue
from debubble.simulate.events import Edges, Happened, Stretch
from debubble.timeline.model import AT_ONCE_NS, I64

# A first stage that does nothing for so many usual ways back has nothing to do.
_IDLE_TIMES = 4
# The moments of a batch on a stage, in their order.
_OUT, _SENT, _ASKED, _RECEIVED, _THERE, _ISSUED, _START, _END = range(8)
_MOMENTS = 8
_MAY_BE_HELD = (_SENT, _RECEIVED, _START)


class Passes(NamedTuple):
    """The passes of a stage, in their order."""

    starts: list[int]
    ends: list[int]
    batches: list[int]


class Waits:
    """Says why a rank waited, for any wait of a stream."""

    def __init__(self, batches: Batches, queue: Queue | None) -> None:
        self._batches = batches
        self.stages = batches.stages
        self.passes: list[Passes] = []
        for stage in range(batches.stages):
            rows = np.flatnonzero(batches.start[:, stage] != UNSEEN)
            start, end = batches.start[rows, stage], batches.end[rows, stage]
            self.passes.append(Passes(start.tolist(), end.tolist(), rows.tolist()))
        back = queue.back[queue.back > 0] if queue is not None else ()
        self._usual_back = int(np.median(back)) if len(back) else 0
        self._happened, self._meeting_of = self._build()

    def at(self, stage: int, moment: int) -> tuple[int, int, int]:
        """Return the pass under way, -1 for none; the next one, -1; and when that changes."""
        starts, ends, rows = self.passes[stage]
        number = bisect_right(starts, moment)
        following = rows[number] if number < len(rows) else UNSEEN
        if number and ends[number - 1] > moment:
            return rows[number - 1], following, ends[number - 1]
        return UNSEEN, following, starts[number] if number < len(rows) else self._batches.span[1]

    def follow(self, stage: int, batch: int, begin: int, end: int) -> Iterator[Piece]:
        """Yield why a batch has not started on a stage that is in no pass: pieces that cover it."""
        if batch < 0:
            yield Piece(begin, end, RootKind.NOTHING, -1)
            return
        event = self._event(batch, stage, _START)
        number = self._ended_at(stage, end) if not stage else None
        if number is not None:
            # What makes inputs ready stands behind the broadcast, too, and the pass behind that.
            over = int(self._batches.ranks[stage].meetings.end_ns[number])
            if over >= self._moments[batch, stage, _ISSUED]:
                event = self._meeting_of[stage][number]
        yield from self._pieces(event, begin, end)

    def held(self, stage: int, begin: int, end: int) -> Iterator[Piece]:
        """Say what held a kernel of a pass up until `end`: the launch, or a broadcast before it."""
        number = self._ended_at(stage, end)
        if number is None:
            yield Piece(begin, end, RootKind.HOST, stage)
        else:
            for piece in self._pieces(self._meeting_of[stage][number], begin, end):
                yield piece._replace(queued=True)

    def _pieces(self, event: int, begin: int, end: int) -> Iterator[Piece]:
        return follow(self._happened, (event, begin, end), self._of, self._stands_behind)

    def _stands_behind(self, stretch: Stretch) -> bool:
        """Tell a collective, and what waits for one: from it on, earlier ones stand behind it."""
        return max(stretch.event, stretch.waiting) >= self._of_batches

    def _of(self, stretch: Stretch) -> Iterator[Piece]:
        """Say what went on while all that an event needs was there."""
        event, _, begin, end = stretch
        if event < 0:
            yield Piece(begin, end, RootKind.NOTHING, -1)
            return
        if event >= self._of_batches:
            came, stage = divmod(self._late[event - self._of_batches], self.stages)
            yield Piece(begin, end, RootKind.HOST if came else RootKind.WAY_BACK, stage)
            return
        row, moment = divmod(event, _MOMENTS)
        batch, stage = divmod(row, self.stages)
        if moment == _OUT and not stage:
            yield from self._way_back(batch, begin, end)
        elif moment == _END:
            yield Piece(begin, end, RootKind.PASS, row)
        elif moment != _THERE:
            yield Piece(begin, end, RootKind.HOST, stage - (moment in {_OUT, _SENT}))
        elif self._moments[batch, stage, _SENT] == UNSEEN:
            yield Piece(begin, end, RootKind.NOTHING, -1)
        else:
            yield Piece(begin, end, RootKind.MESSAGE, stage)

    def _way_back(self, batch: int, begin: int, end: int) -> Iterator[Piece]:
        """Say why a scheduler has not sent a batch out, though its slot is free."""
        slots, batches = self._batches.in_flight, self._batches
        left = UNSEEN
        if slots and batch >= slots:
            left = int(self._moments[batch - slots, -1, _END])
        before = int(batches.end[batch - 1, 0]) if batch else UNSEEN
        free = max(before, left)
        if self._usual_back and end - free > _IDLE_TIMES * self._usual_back:
            usual = min(end, max(begin, free + self._usual_back))
            if begin < usual:
                yield Piece(begin, usual, RootKind.WAY_BACK, 0)
            if usual < end:
                yield Piece(usual, end, RootKind.NO_WORK, 0)
        else:
            kind = RootKind.WAY_BACK if left > before else RootKind.HOST
            yield Piece(begin, end, kind, 0)

    def _event(self, batch: int, stage: int, moment: int) -> int:
        return (batch * self.stages + stage) * _MOMENTS + moment

    def _ended_at(self, stage: int, moment: int) -> int | None:
        """Return the collective of a stage that ended when something there went on."""
        ends = self._batches.ranks[stage].meetings.end_ns
        number = int(np.searchsorted(ends, moment, side="right")) - 1
        return number if number >= 0 and moment - ends[number] <= AT_ONCE_NS else None

    def _build(self) -> tuple[Happened, list[list[int]]]:
        """Lay out all moments as events, and what each waits for."""
        self._moments = _moments_of(self._batches)
        self._of_batches = self._moments.size
        """Events before it are of batches, others of collectives."""
        batches, stages = len(self._batches), self.stages
        events = np.arange(self._moments.size).reshape(self._moments.shape)
        pairs: list[tuple[int, int]] = []
        inside = np.stack((events[..., 1:].ravel(), events[..., :-1].ravel()), axis=1)
        pairs += map(tuple, inside.tolist())
        seen = self._moments[..., _END] != UNSEEN
        for stage in range(stages):
            rows = np.flatnonzero(seen[:, stage])
            before = events[rows[:-1], stage, _END].tolist()
            pairs += zip(events[rows[1:], stage, _START].tolist(), before, strict=True)
            if stage:
                rows = np.flatnonzero(seen[:, stage] & seen[:, stage - 1])
                out, ended = events[rows, stage, _OUT], events[rows, stage - 1, _END]
                pairs += zip(out.tolist(), ended.tolist(), strict=True)
        slots = self._batches.in_flight
        if slots and slots < batches:
            rows = np.flatnonzero(seen[:-slots, -1])
            freed = events[rows, -1, _END].tolist()
            pairs += zip(events[rows + slots, 0, _OUT].tolist(), freed, strict=True)
        moments = self._moments.ravel().tolist()
        meeting_of = self._add_meetings(moments, pairs)
        for stage in range(stages):
            for moment in _MAY_BE_HELD if stage else (_START,):
                place = stage - (moment == _SENT)
                for batch in np.flatnonzero(seen[:, stage]).tolist():
                    event = int(events[batch, stage, moment])
                    number = self._ended_at(place, moments[event])
                    if moments[event] > moments[event - 1] and number is not None:
                        pairs.append((event, meeting_of[place][number]))
        target, source = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
        kept = np.array(moments, dtype=np.int64)[source] != UNSEEN
        edges = Edges(target[kept], source[kept], "", np.flatnonzero(kept))
        return Happened(np.array(moments, dtype=np.int64), (edges,)), meeting_of

    def _add_meetings(self, moments: list[int], pairs: list[tuple[int, int]]) -> list[list[int]]:
        """Add collectives: each ends after its last member came, and that after its last pass."""
        self._late: list[int] = []
        """Of each event of a collective: the stage of the late member; more by all, its coming."""
        names = {rank.rank: place for place, rank in enumerate(self._batches.ranks)}
        meeting_of: list[list[int]] = []
        for stage, rank in enumerate(self._batches.ranks):
            meetings = rank.meetings
            columns = (meetings.end_ns, meetings.arrived_ns, meetings.late)
            ends: list[int] = []
            rows = zip(*(column.tolist() for column in columns), strict=True)
            for end, arrived, late_rank in rows:
                late = names.get(late_rank, stage)
                came, ended = len(moments), len(moments) + 1
                moments += [arrived, end]
                self._late += [self.stages + late, late]
                pairs.append((ended, came))
                if ends:  # nobody comes before the one before it is over
                    pairs.append((came, ends[-1]))
                passes = self.passes[late]
                number = bisect_right(passes.starts, arrived) - 1
                if number >= 0:
                    pairs.append((came, self._event(passes.batches[number], late, _END)))
                ends.append(ended)
            meeting_of.append(ends)
        return meeting_of


def _moments_of(batches: Batches) -> I64:
    """Return the moments of each batch on each stage, none before the one that it follows."""
    table = np.full((len(batches), batches.stages, _MOMENTS), UNSEEN, dtype=np.int64)
    start, end = batches.start, batches.end
    sent, there = batches.sent[:, :-1], batches.arrived[:, 1:]
    known = (sent != UNSEEN) & (there != UNSEEN)
    computed = np.where(end[:, :-1] == UNSEEN, sent, np.minimum(end[:, :-1], sent))
    issued = np.maximum(batches.send_issued[:, :-1], computed)
    table[..., _START], table[..., _END] = start, end
    table[:, 1:, _OUT] = np.where(known, issued, end[:, :-1])
    table[:, 1:, _SENT] = np.where(known, sent, end[:, :-1])
    table[:, 1:, _ASKED] = np.where(known, batches.posted[:, 1:], UNSEEN)
    table[:, 1:, _RECEIVED] = np.where(known, batches.received[:, 1:], UNSEEN)
    table[:, 1:, _THERE] = np.where(known, there, start[:, 1:])
    table[:, 1:, _ISSUED] = batches.issued[:, 1:]
    labelled = batches.turn != UNSEEN
    table[:, 0, _OUT] = np.where(labelled, batches.turn, start[:, 0])
    table[:, 0, _ISSUED] = np.where(labelled, batches.issued[:, 0], UNSEEN)
    # The last stage was with a batch when its capture began: until its next pass at most.
    rows = np.flatnonzero(start[:, -1] != UNSEEN)
    table[: rows[0] if len(rows) else 0, -1, _END] = start[rows[0], -1] if len(rows) else UNSEEN
    seen = start != UNSEEN
    moments = np.minimum(np.maximum.accumulate(table[..., :_START], axis=-1), start[..., None])
    table[..., :_START] = np.where(seen[..., None], moments, UNSEEN)
    return table
