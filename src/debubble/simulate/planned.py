"""An order, and how the framework communicates, in → the `Program` that would run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from debubble.schedules import Order
from debubble.simulate.communication import (
    ONE_BY_ONE,
    Communication,
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

_KINDS = {kind.name: int(kind) for kind in PassKind}


def plan_program(
    order: Order, communication: Communication, *, rendezvous: bool = False
) -> Program:
    """Write an order as passes and messages that wait for each other.

    With `rendezvous` a sender waits for its receiver, as between devices of one host; else messages
    are buffered on their way, as over a network. An exchange always waits for both sides.
    """
    wiring = wire_up(order)
    if communication is Communication.RUNTIME:
        program = _in_turns(wiring)
    else:
        program = _as_written(wiring, communication)
    if rendezvous:
        every = np.ones(len(program.messages), dtype=bool)
        program = replace(program, messages=replace(program.messages, rendezvous=every))
    return program


def _in_turns(wiring: Wiring) -> Program:
    """Write what torch's runtime runs, all at once: thousands of passes by the numbers.

    A rank posts a send when its pass is written down, and its receiver posts the receive then.
    """
    passes = flatten(wiring)
    rows, first, last = len(passes.place), passes.first_of_cell, passes.last_of_cell
    cell = np.repeat(np.arange(len(first)), last - first + 1)
    turn = np.array(take_turns(wiring, passes), dtype=np.int64)[cell]
    maker, user = np.full((2, passes.results + 1), NONE)
    maker[passes.made] = user[passes.used] = np.arange(rows)
    producer = np.flatnonzero(passes.sent >= 0)
    consumer = user[passes.sent[producer]]
    count = len(producer)
    # Both posts of a message come with its pass; where a cell has two, in their order.
    place = passes.place[np.concatenate((producer, consumer))]
    moment = np.tile(turn[producer], 2)
    order = np.lexsort((np.tile(producer, 2), moment, place))
    batch = np.empty(2 * count, dtype=np.int64)
    batch[order] = np.arange(2 * count)
    place, moment = place[order], moment[order]
    clock = int(turn.max(initial=0)) + 1
    issued = np.searchsorted(passes.place * clock + turn, place * clock + moment, side="right")
    after = issued - 1
    after[(after < 0) | (passes.place[after] != place)] = NONE
    before = np.arange(2 * count) - 1
    before[np.flatnonzero(np.diff(place, prepend=NONE))] = NONE
    # Of the stage before or after on the same rank no message tells.
    local = np.flatnonzero((passes.used >= 0) & (passes.needed < 0))
    local = local[maker[passes.used[local]] >= 0]
    needs = np.stack((local, last[cell[maker[passes.used[local]]]]), axis=1)
    return Program(
        ranks=tuple(range(len(wiring.cells))),
        passes=PassTable(
            place=passes.place.astype(np.int32),
            stage=passes.stage.astype(np.int32),
            kind=passes.kind.astype(np.uint8),
            microbatch=passes.microbatch.astype(np.int32),
            before=np.where(np.diff(passes.place, prepend=NONE) == 0, np.arange(rows) - 1, NONE),
        ),
        batches=BatchTable(
            place=place.astype(np.int32),
            before=before,
            after=after,
            launched_after=np.full(2 * count, NONE),
        ),
        messages=MessageTable(
            sent=batch[:count],
            received=batch[count:],
            producer=producer,
            consumer=consumer,
            rendezvous=np.zeros(count, dtype=bool),
        ),
        needs=needs,
        pairs=first[last > first],
    )


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
