"""An order, and how the framework communicates, in → the `Program` that would run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from debubble.simulate.communication import (
    ONE_BY_ONE,
    Communication,
    FlatPasses,
    HostProgram,
    Post,
    Result,
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
    posts = _POSTS.get(communication)
    program = _as_written(wiring, communication) if posts is None else _join(posts(wiring))
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
            launched_after=np.full(len(one), NONE),
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


def _as_written(wiring: Wiring, communication: Communication) -> Program:
    """Write what hosts run and post, step by step."""
    built = _Tables(one_by_one=communication in ONE_BY_ONE)
    for place, program in enumerate(write_hosts(wiring, communication)):
        built.add_rank(place, program)
    passes = np.array(built.pass_rows, dtype=np.int64).reshape(-1, 5).T
    sent = _rows(built.sent.values())
    received = _rows(built.received[result] for result in built.sent)
    # Of the stage before or after on the same rank no message tells.
    on_one_rank = [
        (row, built.made[result])
        for result, row in built.taken.items()
        if result in built.made
        and wiring.home[result[0] + (1 if result[1] else -1)] == wiring.home[result[0]]
    ]
    return Program(
        ranks=tuple(range(len(wiring.cells))),
        passes=PassTable(
            place=passes[0].astype(np.int32),
            stage=passes[1].astype(np.int32),
            kind=passes[2].astype(np.uint8),
            microbatch=passes[3].astype(np.int32),
            before=passes[4],
        ),
        batches=BatchTable(
            place=np.array(built.batch_place, dtype=np.int32),
            before=_rows(built.batch_before),
            launched_after=_rows(built.batch_launched),
            after=_rows(built.batch_after),
        ),
        messages=MessageTable(
            sent=sent,
            received=received,
            producer=_rows(built.maker[result] for result in built.sent),
            consumer=_rows(built.taken[result] for result in built.sent),
            rendezvous=in_exchange(sent, received),
        ),
        needs=np.array(on_one_rank, dtype=np.int64).reshape(-1, 2),
        pairs=_rows(built.pairs),
        waits=np.array(built.waits, dtype=np.int64).reshape(-1, 2),
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


def _rows(numbers: Iterable[int]) -> I64:
    return np.fromiter(numbers, dtype=np.int64)


class _Tables:
    """Rows of a program, as they are found."""

    def __init__(self, *, one_by_one: bool) -> None:
        self.one_by_one = one_by_one
        self.pass_rows: list[tuple[int, int, int, int, int]] = []
        self.pairs: list[int] = []
        # Plain tuples stand for results here: they are equal, and take half the time to make.
        self.maker: dict[tuple[int, bool, int], int] = {}
        self.made: dict[tuple[int, bool, int], int] = {}
        """The row at whose end a result can leave: the last of its cell."""
        self.taken: dict[tuple[int, bool, int], int] = {}
        """The row that cannot start without it: the first of its cell, or its own."""
        self.batch_place: list[int] = []
        self.batch_before: list[int] = []
        self.batch_after: list[int] = []
        self.batch_launched: list[int] = []
        self.waits: list[tuple[int, int]] = []
        self.sent: dict[Result, int] = {}
        self.received: dict[Result, int] = {}

    def add_rank(self, place: int, program: HostProgram) -> None:  # noqa: C901 (one hot loop)
        last_pass = NONE
        last_of_queue: dict[int | None, int] = {}
        waited: list[int] = []
        # Hundreds of thousands of steps go through here: what each looks up is at hand.
        pass_rows, places, one_by_one = self.pass_rows, self.batch_place, self.one_by_one
        befores, afters, launched = self.batch_before, self.batch_after, self.batch_launched
        sent, received = self.sent, self.received
        maker, made_at, taken = self.maker, self.made, self.taken
        for step in program:
            if isinstance(step, Post):
                row, queue = len(places), step.queue
                follows = step.in_order and row and places[-1] == place
                launched.append(row - 1 if follows else NONE)
                places.append(place)
                afters.append(NONE if step.ahead else last_pass)
                befores.append(last_of_queue.get(queue, NONE))
                if queue is not None:
                    last_of_queue[queue] = row
                if step.waited:
                    waited.append(row)
                for result in step.sends:
                    sent[result] = row
                for result in step.receives:
                    received[result] = row
                continue
            first = len(pass_rows)
            if waited:
                self.waits += [(first, row) for row in waited]
                waited = []
            last = first + len(step) - 1
            if last > first:
                self.pairs.append(first)
            for stage, kind, microbatch, _ in step:
                before, last_pass = last_pass, len(pass_rows)
                pass_rows.append((place, stage, _KINDS[kind], microbatch, before))
                if kind == "F":
                    made, need = (stage + 1, False, microbatch), (stage, False, microbatch)
                elif kind == "W":
                    continue
                else:
                    made, need = (stage - 1, True, microbatch), (stage, True, microbatch)
                maker[made], made_at[made] = last_pass, last
                taken[need] = last_pass if one_by_one else first
