"""An order, and how the framework communicates, in → the `Program` that would run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from debubble.schedules import Order
from debubble.simulate.communication import (
    ONE_BY_ONE,
    Communication,
    HostProgram,
    Post,
    Result,
    Wiring,
    wire_up,
    write_hosts,
)
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
    built = _Tables(wiring, one_by_one=communication in ONE_BY_ONE)
    for place, program in enumerate(write_hosts(wiring, communication)):
        built.add_rank(place, program)
    messages = built.messages(rendezvous=rendezvous)
    return Program(
        ranks=tuple(range(len(order))),
        passes=built.passes(),
        batches=BatchTable(
            place=np.array(built.batch_place, dtype=np.int32),
            before=_rows(built.batch_before),
            launched_after=_rows(built.batch_launched),
            after=_rows(built.batch_after),
        ),
        messages=messages,
        needs=np.array(list(_on_one_rank(wiring, built)), dtype=np.int64).reshape(-1, 2),
        pairs=_rows(built.pairs),
        waits=np.array(built.waits, dtype=np.int64).reshape(-1, 2),
    )


class _Tables:
    """Rows of a program, as they are found."""

    def __init__(self, wiring: Wiring, *, one_by_one: bool) -> None:
        self.wiring = wiring
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

    def add_rank(self, place: int, program: HostProgram) -> None:
        last_pass = NONE
        last_of_queue: dict[int, int] = {}
        waited: list[int] = []
        for step in program:
            if isinstance(step, Post):
                row = len(self.batch_place)
                follows = row and step.in_order and self.batch_place[-1] == place
                self.batch_launched.append(row - 1 if follows else NONE)
                self.batch_place.append(place)
                self.batch_after.append(NONE if step.ahead else last_pass)
                queue = step.queue
                self.batch_before.append(NONE if queue is None else last_of_queue.get(queue, NONE))
                if queue is not None:
                    last_of_queue[queue] = row
                if step.waited:
                    waited.append(row)
                for result in step.sends:
                    self.sent[result] = row
                for result in step.receives:
                    self.received[result] = row
                continue
            first = len(self.pass_rows)
            self.waits += [(first, row) for row in waited]
            waited = []
            if len(step) > 1:
                self.pairs.append(first)
            for stage, kind, microbatch, _ in step:
                before, last_pass = last_pass, len(self.pass_rows)
                self.pass_rows.append((place, stage, _KINDS[kind], microbatch, before))
                if kind != "W":
                    ahead, backward = (1, False) if kind == "F" else (-1, True)
                    made = stage + ahead, backward, microbatch
                    self.maker[made], self.made[made] = last_pass, first + len(step) - 1
                    needing = last_pass if self.one_by_one else first
                    self.taken[stage, backward, microbatch] = needing

    def passes(self) -> PassTable:
        columns = np.array(self.pass_rows, dtype=np.int64).reshape(-1, 5).T
        return PassTable(
            place=columns[0].astype(np.int32),
            stage=columns[1].astype(np.int32),
            kind=columns[2].astype(np.uint8),
            microbatch=columns[3].astype(np.int32),
            before=columns[4],
        )

    def messages(self, *, rendezvous: bool) -> MessageTable:
        sent, received = _rows(self.sent.values()), _rows(self.received[one] for one in self.sent)
        meets = in_exchange(sent, received)
        return MessageTable(
            sent=sent,
            received=received,
            producer=_rows(self.maker[one] for one in self.sent),
            consumer=_rows(self.taken[one] for one in self.sent),
            rendezvous=np.ones_like(meets) if rendezvous else meets,
        )


def _on_one_rank(wiring: Wiring, built: _Tables) -> Iterator[tuple[int, int]]:
    """Yield needs that no message tells of: of the stage before or after on the same rank."""
    for (stage, backward, microbatch), row in built.taken.items():
        made = built.made.get((stage, backward, microbatch))
        source = stage + (1 if backward else -1)
        if made is not None and wiring.home[source] == wiring.home[stage]:
            yield row, made


def _rows(numbers: Iterable[int]) -> I64:
    return np.fromiter(numbers, dtype=np.int64)
