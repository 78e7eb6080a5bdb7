"""An order, and how the framework communicates, in → the `Program` that would run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from debubble.simulate.communication import (
    ONE_BY_ONE,
    Communication,
    FlatPasses,
    Post,
    Wiring,
    flatten,
    take_turns,
    wire_up,
    write_hosts,
)
from debubble.simulate.engine import Engine
from debubble.simulate.program import (
    NONE,
    BatchTable,
    MessageTable,
    PassTable,
    Program,
    in_exchange,
)
from debubble.timeline.model import I64, PassKind
from debubble.timeline.schedules import Order

# Which way a pass goes; weight gradients go nowhere.
_WAY = {PassKind.F: 1, PassKind.B: 2, PassKind.I: 2, PassKind.W: 0}
_KINDS = {kind.name: int(kind) for kind in PassKind}


def plan_program(
    order: Order, communication: Communication, *, rendezvous: bool = False
) -> Program:
    """Write an order as passes and messages that wait for each other.

    With `rendezvous` a sender waits for its receiver, as between devices of one host; else messages
    are buffered on their way, as over a network. An exchange always waits for both sides.
    """
    wiring = wire_up(order)
    posts = _POSTS.get(communication, partial(_as_posted, communication=communication))
    program = _join(posts(wiring))
    if rendezvous:
        every = np.ones(len(program.messages), dtype=bool)
        program = replace(program, messages=replace(program.messages, rendezvous=every))
    return program


@dataclass(frozen=True, slots=True, kw_only=True)
class _Posts:
    """All messages of an order by columns: first sends, then receives."""

    passes: FlatPasses
    producer: I64
    """Of each message: the row of the pass that makes it."""
    consumer: I64
    """The row of the pass that cannot start without it."""
    moment: I64
    """Of each post: batches come in this order, and what has the same is one batch."""
    after: I64
    """The row of the last pass issued before it on its rank; -1 for none."""
    waited: I64
    """The row of the pass that its host lets wait for it; -1 for none."""
    one_by_one: bool
    """What two passes of a cell need is needed by each; else by the first."""
    queue: I64 | None = None
    """Of each post, on its rank: what is on one queue keeps its order; -1: on none. None: all are
    on one."""
    in_order: bool = False
    """A device starts what it is given in that order, on whatever queue."""


def _in_turns(wiring: Wiring) -> _Posts:
    """Post as torch's runtime: a send when its pass is written down, and its receive then."""
    passes = flatten(wiring)
    turn = np.array(take_turns(wiring, passes), dtype=np.int64)[passes.cell]
    producer, consumer = _ends_of_messages(passes)
    clock = int(turn.max(initial=0)) + 1
    written = passes.place[np.concatenate((producer, consumer))] * clock + np.tile(
        turn[producer], 2
    )
    after = np.searchsorted(passes.place * clock + turn, written, side="right") - 1
    second = producer > passes.first_of_cell[passes.cell[producer]]
    return _Posts(
        passes=passes,
        producer=producer,
        consumer=consumer,
        moment=2 * written + np.tile(second, 2),
        after=_on_rank(passes, after, written // clock),
        waited=np.full(len(written), NONE),
        one_by_one=True,
    )


def _fused(wiring: Wiring, *, waited: bool) -> _Posts:
    """Post sends after their cell and receives before theirs: in one where the way turns."""
    passes = flatten(wiring)
    first, last, cell = passes.first_of_cell, passes.last_of_cell, passes.cell
    producer, consumer = _ends_of_messages(passes)
    way = np.array([_WAY[kind] for kind in PassKind])[passes.kind[last]]
    turns = np.zeros(len(first), dtype=bool)
    turns[1:] = (way[1:] != way[:-1]) & (way[1:] != 0) & (way[:-1] != 0)
    turns &= np.diff(passes.place[first], prepend=NONE) == 0
    # After its cell, or before the next but apart from what that one sends.
    moment = 3 * np.concatenate((cell[producer], cell[consumer] - 1))
    moment += np.concatenate((np.ones(len(producer)), 2 - turns[cell[consumer]])).astype(np.int64)
    place = passes.place[np.concatenate((producer, consumer))]
    following = np.append(first, NONE)[moment // 3 + 1]
    wait = (moment % 3 == 1) & waited
    return _Posts(
        passes=passes,
        producer=producer,
        consumer=first[cell[consumer]],
        moment=moment,
        after=_on_rank(passes, last[moment // 3], place),
        waited=np.where(wait, _on_rank(passes, following, place), NONE),
        one_by_one=False,
    )


def _posted(wiring: Wiring) -> _Posts:
    """Post sends after their cell and, before a cell, receives up to what it needs.

    Those from one rank are posted in the order in which they are sent: one that is needed early
    takes along all that are sent before it.
    """
    passes = flatten(wiring)
    first, last, cell = passes.first_of_cell, passes.last_of_cell, passes.cell
    producer, consumer = _ends_of_messages(passes)
    # Messages stand in the order in which they are sent: those of each hop stay in it.
    hop = passes.place[producer] * passes.ranks + passes.place[consumer]
    needed = consumer.copy()
    for rows in np.split(by_hop := np.argsort(hop, kind="stable"), _begins(hop[by_hop])):
        needed[rows] = np.minimum.accumulate(consumer[rows][::-1])[::-1]
    written = 2 * np.concatenate((cell[producer], cell[needed]))
    written[: len(producer)] += 1
    order = np.lexsort((np.concatenate((producer, needed)), written))
    moment = np.empty(len(order), dtype=np.int64)
    moment[order] = np.arange(len(order))
    place = passes.place[np.concatenate((producer, consumer))]
    before = np.concatenate((last[cell[producer]], first[cell[needed]] - 1))
    return _Posts(
        passes=passes,
        producer=producer,
        consumer=first[cell[consumer]],
        moment=moment,
        after=_on_rank(passes, before, place),
        waited=np.full(len(moment), NONE),
        one_by_one=False,
    )


def _begins(numbers: I64) -> I64:
    """Return where another number begins, but for the first."""
    return np.flatnonzero(np.diff(numbers)) + 1


def _always_received(wiring: Wiring, *, queued: bool) -> _Posts:
    """Let every receive be there before its message; it takes no time of its own.

    Where `queued`, sends to one rank follow each other.
    """
    passes = flatten(wiring)
    cell = passes.cell
    producer, consumer = _ends_of_messages(passes)
    written = 2 * np.concatenate((cell[producer], cell[consumer]))
    written[: len(producer)] += 1
    order = np.lexsort((np.concatenate((producer, consumer)), written))
    moment = np.empty(len(order), dtype=np.int64)
    moment[order] = np.arange(len(order))
    none = np.full(len(consumer), NONE)
    return _Posts(
        passes=passes,
        producer=producer,
        consumer=passes.first_of_cell[cell[consumer]],
        moment=moment,
        after=np.concatenate((passes.last_of_cell[cell[producer]], none)),
        waited=np.full(len(moment), NONE),
        one_by_one=False,
        queue=np.concatenate((passes.place[consumer] if queued else none, none)),
    )


def _ends_of_messages(passes: FlatPasses) -> tuple[I64, I64]:
    """Return the rows of the passes that make and that use each result that is sent."""
    user = np.full(passes.results + 1, NONE)
    user[passes.used] = np.arange(len(passes.used))
    producer = np.flatnonzero(passes.sent >= 0)
    return producer, user[passes.sent[producer]]


def _on_rank(passes: FlatPasses, rows: I64, place: I64) -> I64:
    """Return rows of passes, and none where they are not of the rank."""
    return np.where((rows >= 0) & (passes.place[rows] == place), rows, NONE)


def _join(posts: _Posts) -> Program:
    """Write tables of what was posted, all at once: hundreds of thousands of passes."""
    passes, count = posts.passes, len(posts.producer)
    rows, first, last = len(passes.place), passes.first_of_cell, passes.last_of_cell
    _, one, batch = np.unique(posts.moment, return_index=True, return_inverse=True)
    sent, received = batch[:count], batch[count:]
    place = passes.place[np.concatenate((posts.producer, posts.consumer))][one]
    # Of the stage before or after on the same rank no message tells.
    maker = np.full(passes.results + 1, NONE)
    maker[passes.made] = np.arange(rows)
    local = np.flatnonzero((passes.used >= 0) & (passes.needed < 0))
    local = local[maker[passes.used[local]] >= 0]
    ready = last[passes.cell[maker[passes.used[local]]]]
    if not posts.one_by_one:
        local = first[passes.cell[local]]
    before = _row_before(place)
    if posts.queue is not None:
        queue = posts.queue[one]
        by_queue = np.lexsort((np.arange(len(one)), queue, place))
        before = np.full(len(one), NONE)
        follows = _row_before((place * (passes.ranks + 1) + queue)[by_queue])
        queued = (follows >= 0) & (queue[by_queue] >= 0)
        before[by_queue[queued]] = by_queue[follows[queued]]
    waits = np.flatnonzero(posts.waited[one] >= 0)
    return Program(
        ranks=tuple(range(passes.ranks)),
        passes=PassTable(
            place=passes.place.astype(np.int32),
            stage=passes.stage.astype(np.int32),
            kind=passes.kind.astype(np.uint8),
            microbatch=passes.microbatch.astype(np.int32),
            before=_row_before(passes.place),
        ),
        batches=BatchTable(
            place=place.astype(np.int32),
            before=before,
            after=posts.after[one],
            launched_after=_row_before(place) if posts.in_order else np.full(len(one), NONE),
        ),
        messages=MessageTable(
            sent=sent,
            received=received,
            producer=posts.producer,
            consumer=posts.consumer,
            rendezvous=in_exchange(sent, received),
        ),
        needs=np.stack((local, ready), axis=1),
        pairs=first[last > first],
        waits=np.stack((posts.waited[one][waits], waits), axis=1),
    )


def _row_before(place: I64) -> I64:
    """Return the row before each, where that is of the same rank; else -1."""
    return np.where(np.diff(place, prepend=NONE) == 0, np.arange(len(place)) - 1, NONE)


_POSTS: dict[Communication, Callable[[Wiring], _Posts]] = {
    Communication.RUNTIME: _in_turns,
    Communication.FUSED: partial(_fused, waited=False),
    Communication.BATCHED: partial(_fused, waited=True),
    Communication.POSTED: _posted,
    Communication.LATENCY: partial(_always_received, queued=False),
    Communication.ASYNCHRONOUS: partial(_always_received, queued=True),
}


def _as_posted(wiring: Wiring, communication: Communication) -> _Posts:
    """Take what hosts run and post, step by step."""
    passes = flatten(wiring)
    rows = len(passes.place)
    post_of = np.full((2, passes.results + 1), NONE)
    row, moment, columns = 0, 0, list[tuple[int, int, int]]()
    for rank, program in enumerate(write_hosts(wiring, communication)):
        last = NONE
        for step in program:
            if isinstance(step, Post):
                for side, results in enumerate((step.sends, step.receives)):
                    post_of[side, [passes.number(result) for result in results]] = moment
                following = row if row < rows and passes.place[row] == rank else NONE
                queue = NONE if step.queue is None else step.queue
                columns.append((last, following if step.waited else NONE, queue))
                moment += 1
            else:
                row += len(step)
                last = row - 1
    producer, consumer = _ends_of_messages(passes)
    moments = post_of[:, passes.sent[producer]].reshape(-1)
    after, waited, queue = np.array(columns, dtype=np.int64).reshape(-1, 3)[moments].T
    one_by_one = communication in ONE_BY_ONE
    return _Posts(
        passes=passes,
        producer=producer,
        consumer=consumer if one_by_one else passes.first_of_cell[passes.cell[consumer]],
        moment=moments,
        after=after,
        waited=waited,
        one_by_one=one_by_one,
        queue=queue,
        in_order=communication is Communication.OVERLAPPED,
    )


def planned_engine(order: Order, communication: Communication, *, rendezvous: bool) -> Engine:
    """Return what runs an order; where senders would wait in a circle, messages are buffered.

    A framework that runs an order does not hang in it: what would hang is sent in another way than
    is known.
    """
    engine = Engine(plan_program(order, communication, rendezvous=rendezvous))
    if rendezvous and engine.waits_in_a_circle():
        return Engine(plan_program(order, communication))
    return engine
