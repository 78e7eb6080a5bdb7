"""Batches in → a closed queue that runs them again, as they were or with something put right.

A stream is a program as a step is: events that wait for others, run by the same engine.

So many batches go round, stages in order, each stage one batch at a time:

    a stage asks for its message   when its host is done with the batch before (`turn`)
    the message is there           when both sides are, and the wire has carried it (`wire`)
    the pass begins and ends       `begin` after that, `length` later
    the next batch enters          when the one that held its slot has left, and the way back
                                   is over (`back`), or its host is done (`turn` of stage 0)
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from debubble.serving.batches import UNSEEN, Batches
from debubble.simulate.events import Edges, Network
from debubble.timeline.figures import FEWEST_BATCHES, turn_of
from debubble.timeline.model import I64, Flags

# A host that could have gone on earlier shows what it takes in its quickest turns.
_QUICK_PERCENT = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Queue:
    """What each batch takes at each stage, in nanoseconds: a row a batch, a column a stage."""

    in_flight: int | None
    length: I64
    busy: I64
    turn: I64
    wire: I64
    begin: I64
    lag: I64
    """From the end of a pass to the start of its message."""
    back: I64
    """Of each batch: from the end of the one that held its slot to its own start."""
    entered: I64
    """When each batch entered in the recording; what holds it without a slot."""
    held: bool = False
    """A message leaves the first stage when the batch before has been sampled, no sooner: it stands
    behind the broadcast of its tokens."""
    opened: I64
    """When each stage could take the first batch: it may have been at work on those before."""
    ahead: Flags | None = None
    """Batches that entered while as many as usual were under way: no slot held them."""
    on_device: int | None = None
    """How many may be on the devices at once, where fewer than are in flight; None for any."""

    def __len__(self) -> int:
        return len(self.length)

    def run(self) -> tuple[I64, I64]:
        """Return when each pass starts and ends."""
        batches, stages = self.length.shape
        start = np.arange(batches * stages).reshape(batches, stages)
        end = start + start.size
        from_message = np.zeros_like(self.length)
        from_message[:, 1:] = self.lag[:, :-1] + self.wire[:, 1:] + self.begin[:, 1:]
        from_host = self.turn.copy()
        from_host[:, 1:] += self.wire[:, 1:] + self.begin[:, 1:]
        edges = [
            Edges(end.ravel(), start.ravel(), "length", start.ravel()),
            Edges(start[:, 1:].ravel(), end[:, :-1].ravel(), "message", start[:, 1:].ravel()),
            Edges(start[1:].ravel(), end[:-1].ravel(), "host", start[1:].ravel()),
        ]
        slots = [count for count in (self.in_flight, self.on_device) if count is not None]
        for count in slots:
            rows = np.arange(count, batches)
            rows = rows if self.ahead is None else rows[~self.ahead[rows]]
            edges.append(Edges(start[rows, 0], end[rows - count, -1], "back", rows))
        if self.held and stages > 1:
            edges.append(Edges(start[1:, 1], end[:-1, -1], "message", start[1:, 1]))
        floor = np.zeros(2 * start.size, dtype=np.int64)
        floor[start[0]] = from_host[0] - self.turn[0] + self.opened
        entering = slice(self.in_flight)
        floor[start[entering, 0]] = self.entered[entering]
        lengths = {"length": self.length.ravel(), "message": from_message.ravel()}
        lengths |= {"host": from_host.ravel(), "back": self.back}
        floored = np.zeros(len(floor), dtype=bool)
        floored[start[entering, 0]] = floored[start[0]] = True
        network = Network(len(floor), tuple(edges), floored=floored, asked=end[:, -1])
        moments = network.run(lengths, floor)
        return moments[start], moments[end]

    def turn_ns(self, filling: int | None = None) -> float:
        """Return what a batch takes in turn: the time between two that leave the last stage.

        Those that fill the pipeline up do not count. Queues with other numbers in flight are held
        against each other over the same batches: prompts are unlike answers.
        """
        _, end = self.run()
        return turn_of(end[:, -1], filling or self.in_flight or 1)


def measure_queue(batches: Batches) -> Queue | None:
    """Take from each batch what it took; None where too few were seen from end to end."""
    rows = np.flatnonzero(batches.seen & (batches.start[:, 0] >= batches.span[0]))
    if len(rows) and (np.diff(rows) != 1).any():  # the longest run without a hole
        parts = np.split(rows, np.flatnonzero(np.diff(rows) != 1) + 1)
        rows = max(parts, key=len)
    if len(rows) < FEWEST_BATCHES:
        return None
    start, end, stages = batches.start[rows], batches.end[rows], batches.stages
    before = np.concatenate((end[:1] - (end[:1] - start[:1]), end[:-1]))
    turn, wire, begin, lag = (np.zeros(start.shape, dtype=np.int64) for _ in range(4))
    turn[:, 0] = np.maximum(start[:, 0] - before[:, 0], 0)
    limited: list[int] = []
    for stage in range(1, stages):
        sent = batches.sent[rows, stage - 1]
        posted, there = batches.posted[rows, stage], batches.arrived[rows, stage]
        known = (sent != UNSEEN) & (posted != UNSEEN)
        sent = np.where(known, sent, end[:, stage - 1])
        posted = np.where(known, posted, sent)
        there = np.where(known, np.minimum(there, start[:, stage]), start[:, stage])
        ready = end[:, stage - 1]
        if batches.held_back and stage == 1:
            ready = np.maximum(ready, before[:, -1])
        lag[:, stage - 1] = np.maximum(sent - ready, 0)
        asked = np.maximum(posted, before[:, stage])
        # What stands behind a broadcast goes nowhere before that is over, though it was begun.
        wire[:, stage] = np.maximum(there - np.maximum(np.maximum(sent, asked), ready), 0)
        begin[:, stage] = start[:, stage] - there
        turn[:, stage] = _turns(asked - before[:, stage], asked >= sent)
        limited.append(int((asked >= sent).sum()))
    back, ahead = np.zeros(len(rows), dtype=np.int64), np.zeros(len(rows), dtype=bool)
    # Those that wait in the first host, behind what holds it up, are not on the devices.
    slots = batches.at_entry if batches.held_back else batches.in_flight
    seen = batches.at_entry
    if slots is not None and seen is not None and max(slots, seen) < len(rows):
        if batches.stream.first_sets_pace:  # how many it would let in does not show
            slots = min(max(slots, stages), len(rows) - 1)
        ahead[slots:] = start[slots:, 0] < end[:-slots, -1]
        since = start[seen:, 0] - end[:-seen, -1]
        waits = end[:-seen, -1] > end[seen - 1 : -1, 0]  # its slot was taken longer
        back[seen:] = np.maximum(_turns(since, waits), 0)
        turn[seen:, 0] = _turns(turn[seen:, 0], ~waits)
        # A host that always waits shows no turn of its own: it takes no longer than the way back.
        never = [
            int((~waits).sum()) < FEWEST_BATCHES,
            *(count < FEWEST_BATCHES for count in limited),
        ]
        quick = int(np.percentile(back[seen:], _QUICK_PERCENT))
        turn[:, never] = np.minimum(turn[:, never], quick)
    return Queue(
        in_flight=slots,
        length=end - start,
        busy=batches.busy[rows],
        turn=turn,
        wire=wire,
        begin=begin,
        lag=lag,
        back=back,
        held=batches.held_back,
        ahead=ahead,
        entered=start[:, 0].copy(),
        opened=start[0] - begin[0],
    )


def without_broadcasts(batches: Batches, queue: Queue) -> Queue:
    """Return the queue with sends, receives and passes that no broadcast of tokens holds up.

    Then as many are under way as the scheduler sends out, and hosts set the pace where they take
    longer than their devices: from a batch's message, or its turn, to when they pass it on.
    """
    rows = np.flatnonzero(np.isin(batches.start[:, 0], queue.entered))
    start, end = batches.start[rows], batches.end[rows]
    issued, posted = batches.issued[rows], batches.posted[rows]
    passed_on, received = batches.send_issued[rows], batches.received[rows]
    there = np.where(posted != UNSEEN, batches.arrived[rows], start)
    sent = np.concatenate((np.full((len(rows), 1), UNSEEN), batches.sent[rows, :-1]), axis=1)
    came = np.where(posted != UNSEEN, posted, batches.turn[rows][:, None])
    known = (passed_on != UNSEEN) & (came != UNSEEN)
    takes = np.where(known, passed_on - came, 0)
    return replace(
        queue,
        in_flight=max(batches.in_flight or 1, queue.in_flight or 1),
        held=False,
        lag=np.maximum(np.where(known, passed_on - end, 0), 0),
        wire=np.clip(there - np.maximum(sent, received), 0, queue.wire),
        begin=np.clip(issued - there, 0, queue.begin),
        turn=np.maximum(queue.turn, takes - queue.length),
        back=np.zeros_like(queue.back),
        entered=np.full(len(queue), queue.entered[0]),
    )


def _turns(taken: I64, limited: Flags) -> I64:
    """Keep what held a batch up; else it took no longer than the quickest of those do."""
    shown = taken[limited] if limited.sum() >= FEWEST_BATCHES else taken
    quick = int(np.percentile(shown, _QUICK_PERCENT)) if len(shown) else 0
    return np.where(limited, taken, np.minimum(taken, max(quick, 0)))


def with_slots(queue: Queue, in_flight: int) -> Queue:
    """Return the queue with another number in flight; the first of them enter as they can."""
    usual = int(np.median(queue.back[queue.back > 0])) if (queue.back > 0).any() else 0
    return replace(
        queue,
        in_flight=in_flight,
        back=np.where(queue.back > 0, queue.back, usual),
        entered=np.full(len(queue), queue.entered[0]),
    )


def whole(lengths: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> I64:
    """Return lengths in whole nanoseconds."""
    return np.rint(lengths).astype(np.int64)
