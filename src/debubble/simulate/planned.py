"""An order, and how the framework communicates, in → the `Program` that would run.

All by columns, for orders have hundreds of thousands of passes. A message is posted after a cell (a
pass, or two that run as one), and among what is posted there in some turn; what is posted at the
same moment is one batch.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from itertools import chain, islice
from typing import NamedTuple

import numpy as np

from debubble.simulate.communication import Communication
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
from debubble.timeline.schedules import Action, Order
from debubble.timeline.schedules.named import cells_of

# Which way a pass goes; weight gradients go nowhere.
_NOWHERE, _FORWARD, _BACKWARD = range(3)
_WAY = np.zeros(len(PassKind), dtype=np.int64)
_WAY[[PassKind.F, PassKind.B, PassKind.I]] = _FORWARD, _BACKWARD, _BACKWARD
# By the character of a kind.
_NUMBER_OF_KIND = np.zeros(128, dtype=np.int64)
_NUMBER_OF_KIND[[ord(kind.name) for kind in PassKind]] = list(PassKind)
# How many stages of a rank torch keeps gathered at a time.
_MOST_GATHERED = 3

Cell = tuple[Action, ...]
"""A pass, or two that run as one: both inputs are needed, both results come at the end."""


def plan_program(
    order: Order, communication: Communication, *, rendezvous: bool = False
) -> Program:
    """Write an order as passes and messages that wait for each other.

    With `rendezvous` a sender waits for its receiver, as between devices of one host; else messages
    are buffered on their way, as over a network. An exchange always waits for both sides.
    """
    passes = _flatten(order)
    program = _join(passes, _POSTS[communication](passes))
    if rendezvous:
        every = np.ones(len(program.messages), dtype=bool)
        program = replace(program, messages=replace(program.messages, rendezvous=every))
    return program


def planned_engine(order: Order, communication: Communication, *, rendezvous: bool) -> Engine:
    """Return what runs an order; where senders would wait in a circle, messages are buffered.

    A framework that runs an order does not hang in it: what would hang is sent in another way than
    is known.
    """
    engine = Engine(plan_program(order, communication, rendezvous=rendezvous))
    if rendezvous and engine.waits_in_a_circle():
        return Engine(plan_program(order, communication))
    return engine


@dataclass(frozen=True, kw_only=True)
class _Passes:
    """The passes of an order, by rank and then in its order, as columns."""

    cells: Sequence[Sequence[Cell]]
    """By rank."""
    place: I64
    stage: I64
    kind: I64
    microbatch: I64
    home: I64
    """The rank of each stage."""
    cell: I64
    """The number of the cell that a pass is in, among those of all ranks."""
    first_of_cell: I64
    """Of each cell: the row of its first pass."""
    last_of_cell: I64
    results: int
    """How many results there may be: each has a number below."""
    made: I64
    """The number of the result that a pass hands on, to whatever rank; -1 where it makes none."""
    used: I64
    """The number of the result that it begins with."""
    sent: I64
    """The same as `made`, where it goes to another rank; else -1."""
    needed: I64
    """The same as `used`, where it comes from another rank; else -1."""

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return len(self.cells)

    @cached_property
    def producer(self) -> I64:
        """Of each message: the row of the pass that makes it."""
        return np.flatnonzero(self.sent >= 0)

    @cached_property
    def consumer(self) -> I64:
        """Of each message: the row of the pass that uses it."""
        user = np.full(self.results + 1, NONE)
        user[self.used] = np.arange(len(self.used))
        rows: I64 = user[self.sent[self.producer]]
        return rows

    @cached_property
    def cell_place(self) -> I64:
        """The rank of each cell."""
        places: I64 = self.place[self.first_of_cell]
        return places

    @cached_property
    def cell_way(self) -> I64:
        """Which way each cell goes."""
        return _WAY[self.kind[self.last_of_cell]]

    @property
    def posted_on(self) -> I64:
        """The rank of each post: first of all sends, then of all receives."""
        return self.place[np.concatenate((self.producer, self.consumer))]

    def on_rank(self, rows: I64, place: I64) -> I64:
        """Return rows of passes, and none where they are not of the rank."""
        inside = (rows >= 0) & (rows < len(self.place))
        rows = np.where(inside, rows, NONE)
        return np.where(inside & (self.place[rows] == place), rows, NONE)


class _Posts(NamedTuple):
    """When messages of an order are posted, by columns: first all sends, then all receives."""

    moment: I64
    """Batches come in this order, and what has the same is one batch."""
    after: I64
    """The row of the last pass issued before it on its rank; -1 for none."""
    waited: I64
    """The row of the pass that its host lets wait for it; -1 for none."""
    queue: I64 | None = None
    """Of each post, on its rank: what is on one queue keeps its order; -1: on none. None: all are
    on one."""
    one_by_one: bool = False
    """What two passes of a cell need is needed by each; else by the first."""
    in_order: bool = False
    """A device starts what it is given in that order, on whatever queue."""


def _flatten(order: Order) -> _Passes:
    """Write passes as columns."""
    by_rank = [list(cells_of(actions)) for actions in order]
    cells = list(chain.from_iterable(by_rank))
    stages, kinds, microbatches, _ = zip(*chain.from_iterable(cells), strict=True)
    stage, microbatch = np.array(stages, dtype=np.int64), np.array(microbatches, dtype=np.int64)
    kind = _NUMBER_OF_KIND[np.frombuffer("".join(kinds).encode(), dtype=np.uint8)]
    sizes = np.fromiter(map(len, cells), dtype=np.int64, count=len(cells))
    last = np.cumsum(sizes) - 1
    place = np.repeat(np.arange(len(order)), [sum(map(len, own)) for own in by_rank])
    count, stages_in_all = int(microbatch.max()) + 1, int(stage.max()) + 1
    home = np.full(stages_in_all, NONE)
    home[stage] = place
    crosses = (home[1:] != home[:-1]) & (home[1:] >= 0) & (home[:-1] >= 0)
    ahead, back = np.append(crosses, False), np.append(False, crosses)
    forward, weight = kind == PassKind.F, kind == PassKind.W
    made = (2 * stage + np.where(forward, 2, -1)) * count + microbatch
    used = (2 * stage + np.where(forward, 0, 1)) * count + microbatch
    # No result goes beyond the ends of the model.
    ends = np.where(forward, stage == stages_in_all - 1, stage == 0)
    made = np.where(weight | ends, NONE, made)
    used = np.where(weight, NONE, used)
    return _Passes(
        cells=by_rank,
        place=place,
        stage=stage,
        kind=kind,
        microbatch=microbatch,
        home=home,
        cell=np.repeat(np.arange(len(cells)), sizes),
        first_of_cell=last - sizes + 1,
        last_of_cell=last,
        results=2 * stages_in_all * count,
        made=made,
        used=used,
        sent=np.where(np.where(forward, ahead[stage], back[stage]), made, NONE),
        needed=np.where(np.where(forward, back[stage], ahead[stage]), used, NONE),
    )


def _post(  # noqa: PLR0913 (what is posted where, and what waits for it)
    passes: _Passes,
    sends: tuple[I64, I64 | int],
    receives: tuple[I64, I64 | int],
    *,
    together: bool,
    waited: Sequence[bool] = (False, False),
    queue: I64 | None = None,
    in_order: bool = False,
) -> _Posts:
    """Post each send and receive after a cell, in some turn there; those of a turn `together`.

    What is to be waited for keeps the next pass of its rank waiting, if there is one. After the
    last cell of the rank before is before the first of the own.
    """
    place = passes.posted_on
    cell = np.concatenate((sends[0], receives[0]))
    turn = np.concatenate(
        [np.broadcast_to(turn, len(passes.producer)) for turn in (sends[1], receives[1])]
    )
    rows = np.concatenate((passes.producer, passes.consumer))
    keys = (turn, cell, place) if together else (rows, turn, cell, place)
    order = np.lexsort(keys)
    moment = np.empty(len(order), dtype=np.int64)
    apart = [np.diff(key[order], prepend=-2) != 0 for key in keys]
    moment[order] = np.cumsum(np.any(apart, axis=0)) if len(order) else 0
    following = passes.on_rank(np.append(passes.first_of_cell, NONE)[cell + 1], place)
    return _Posts(
        moment=moment,
        after=passes.on_rank(np.append(passes.last_of_cell, NONE)[cell], place),
        waited=np.where(np.repeat(waited, len(passes.producer)), following, NONE),
        queue=queue,
        in_order=in_order,
    )


def _fused(passes: _Passes, *, waited: bool) -> _Posts:
    """Post sends after their cell and receives before theirs: in one where the way turns."""
    needing, way = passes.cell[passes.consumer], passes.cell_way
    turns = np.zeros(len(way), dtype=bool)
    turns[1:] = (way[1:] != way[:-1]) & (way[1:] != _NOWHERE) & (way[:-1] != _NOWHERE)
    turns &= np.diff(passes.cell_place, prepend=NONE) == 0
    posts = _post(
        passes,
        (passes.cell[passes.producer], 0),
        (needing - 1, np.where(turns[needing], 0, 1)),
        together=True,
        waited=(waited, waited),
    )
    # A receive apart is not waited for before its pass needs it.
    alone = np.concatenate((np.zeros(len(passes.producer), dtype=bool), ~turns[needing]))
    return posts._replace(waited=np.where(alone, NONE, posts.waited))


def _posted(passes: _Passes) -> _Posts:
    """Post sends after their cell and, before a cell, receives up to what it needs.

    Those from one rank are posted in the order in which they are sent: one that is needed early
    takes along all that are sent before it.
    """
    # Messages stand in the order in which they are sent: those of each hop stay in it.
    producer, consumer = passes.producer, passes.consumer
    hop = passes.place[producer] * passes.ranks + passes.place[consumer]
    needed = consumer.copy()
    by_hop = np.argsort(hop, kind="stable")
    for rows in np.split(by_hop, np.flatnonzero(np.diff(hop[by_hop])) + 1):
        needed[rows] = np.minimum.accumulate(consumer[rows][::-1])[::-1]
    turn = 1 + needed * len(passes.place) + producer
    return _post(
        passes, (passes.cell[producer], 0), (passes.cell[needed] - 1, turn), together=False
    )


def _always_received(passes: _Passes, *, queued: bool) -> _Posts:
    """Let every receive be there before its message; it takes no time of its own.

    Where `queued`, sends to one rank follow each other.
    """
    cell, consumer = passes.cell, passes.consumer
    none = np.full(len(consumer), NONE)
    queue = np.concatenate((passes.place[consumer] if queued else none, none))
    posts = _post(
        passes, (cell[passes.producer], 0), (cell[consumer] - 1, 1), together=False, queue=queue
    )
    after = np.concatenate((posts.after[: len(none)], none))
    return posts._replace(after=after)


def _blocking(passes: _Passes) -> _Posts:
    """Post each message by itself, and wait for it; before a backward pass receive first."""
    making, needing = passes.cell[passes.producer], passes.cell[passes.consumer]
    backward = passes.cell_way == _BACKWARD
    backward &= np.diff(passes.cell_place, prepend=NONE) == 0
    sends_second = np.append(backward, False)[making + 1]
    return _post(
        passes,
        (making, np.where(sends_second, 2, 0)),
        (needing - 1, 1),
        together=False,
        waited=(True, True),
    )


def _overlapped(passes: _Passes) -> _Posts:
    """Post the receive of a cell right after the cell before it that goes the same way.

    So its input is received while the other way computes.
    """
    producer, needing = passes.producer, passes.cell[passes.consumer]
    # The cell before each on its rank that goes its way; the first receives just before itself.
    kin = passes.cell_place * 3 + passes.cell_way
    by_kin = np.argsort(kin, kind="stable")
    before = np.full(len(kin), NONE)
    follows = np.flatnonzero(np.diff(kin[by_kin]) == 0)
    before[by_kin[follows + 1]] = by_kin[follows]
    first = before[needing] < 0
    posts = _post(
        passes,
        (passes.cell[producer], 1),
        (np.where(first, needing - 1, before[needing]), np.where(first, 2, 0)),
        together=False,
        waited=(True, False),
        queue=passes.place[np.concatenate((passes.consumer, producer))],
        in_order=True,
    )
    # A pass waits for the output that was sent before it, not for the gradient.
    forward = np.tile(passes.kind[producer] == PassKind.F, 2)
    return posts._replace(waited=np.where(forward, posts.waited, NONE))


def _grouped(passes: _Passes) -> _Posts:
    """Exchange after each pass, between warm-up and drain after each pair of passes."""
    first: list[int] = []
    place, way = passes.cell_place.tolist(), passes.cell_way.tolist()
    for cell in range(len(place)):
        starts = not cell or place[cell] != place[cell - 1] or first[-1] != cell - 1
        pairs = not starts and way[cell - 1 : cell + 1] == [_FORWARD, _BACKWARD]
        first.append(cell - 1 if pairs else cell)
    begins = np.array(first)
    ends = np.append(begins[1:] == begins[:-1], False)
    last_of_group = np.arange(len(first)) + ends
    return _post(
        passes,
        (last_of_group[passes.cell[passes.producer]], 0),
        (begins[passes.cell[passes.consumer]] - 1, 0),
        together=True,
        waited=(True, True),
    )


def _in_slots(passes: _Passes) -> _Posts:
    """Exchange after each slot: what a rank made in it, and what its neighbours made for it.

    The slot of a cell is the first that is free once all its inputs are there.
    """
    made, slots = {NONE: NONE}, [NONE] * len(passes.first_of_cell)
    rests = [deque(steps) for steps in _steps_of(passes)]
    latest, moved = [NONE] * passes.ranks, True
    while moved:
        moved = False
        for rank, rest in enumerate(rests):
            while rest and rest[0][0] in made and rest[0][1] in made:
                need, other, sent, also, number = rest.popleft()
                slots[number] = latest[rank] = 1 + max(latest[rank], made[need], made[other])
                made |= {sent: slots[number], also: slots[number], NONE: NONE}
                moved = True
    if any(rests):
        raise ValueError("this order cannot finish")
    slot, making = np.array(slots), passes.cell[passes.producer]
    turn, in_all = slot[making], int(slot.max(initial=0)) + 1
    reached = np.searchsorted(
        passes.cell_place * in_all + slot,
        passes.place[passes.consumer] * in_all + turn,
        side="right",
    )
    return _post(passes, (making, turn), (reached - 1, turn), together=True, waited=(True, True))


def _in_turns(passes: _Passes) -> _Posts:
    """Post as torch's runtime: a send when its pass is written down, and its receive then.

    A pass is written down when its input is on its way; with it go its send, here, and the receive,
    at whatever point the receiver's own list has come to: ahead of its pass, and maybe in front of
    sends that are ready before it.
    """
    turn = np.array(_take_turns(passes), dtype=np.int64)[passes.cell]
    clock = int(turn.max(initial=0)) + 1
    written = passes.posted_on * clock + np.tile(turn[passes.producer], 2)
    after = np.searchsorted(passes.place * clock + turn, written, side="right") - 1
    second = passes.producer > passes.first_of_cell[passes.cell[passes.producer]]
    return _Posts(
        moment=2 * written + np.tile(second, 2),
        after=passes.on_rank(after, written // clock),
        waited=np.full(len(written), NONE),
        one_by_one=True,
    )


_POSTS: dict[Communication, Callable[[_Passes], _Posts]] = {
    Communication.LATENCY: partial(_always_received, queued=False),
    Communication.FUSED: partial(_fused, waited=False),
    Communication.BATCHED: partial(_fused, waited=True),
    Communication.OVERLAPPED: _overlapped,
    Communication.GROUPED: _grouped,
    Communication.BLOCKING: _blocking,
    Communication.POSTED: _posted,
    Communication.RUNTIME: _in_turns,
    Communication.SLOTS: _in_slots,
    Communication.ASYNCHRONOUS: partial(_always_received, queued=True),
}


def _join(passes: _Passes, posts: _Posts) -> Program:
    """Write tables of what was posted, all at once."""
    count, rows = len(passes.producer), len(passes.place)
    first, last = passes.first_of_cell, passes.last_of_cell
    _, one, batch = np.unique(posts.moment, return_index=True, return_inverse=True)
    sent, received = batch[:count], batch[count:]
    place = passes.posted_on[one]
    consumer = passes.consumer if posts.one_by_one else first[passes.cell[passes.consumer]]
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
    waited = posts.waited[one]
    waits = np.flatnonzero(waited >= 0)
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
            producer=passes.producer,
            consumer=consumer,
            rendezvous=in_exchange(sent, received),
        ),
        needs=np.stack((local, ready), axis=1),
        pairs=first[last > first],
        waits=np.stack((waited[waits], waits), axis=1),
    )


def _row_before(place: I64) -> I64:
    """Return the row before each, where that is of the same rank; else -1."""
    return np.where(np.diff(place, prepend=NONE) == 0, np.arange(len(place)) - 1, NONE)


def _steps_of(passes: _Passes) -> list[list[tuple[int, ...]]]:
    """Return by rank the results that each cell needs, two, that it sends, two, and its number."""
    first, last = passes.first_of_cell, passes.last_of_cell
    two = last > first
    columns = (
        passes.needed[first],
        np.where(two, passes.needed[last], NONE),
        passes.sent[first],
        np.where(two, passes.sent[last], NONE),
        np.arange(len(first)),
    )
    every = zip(*(column.tolist() for column in columns), strict=True)
    return [list(islice(every, len(cells))) for cells in passes.cells]


def _take_turns(passes: _Passes) -> list[int]:
    """Return when torch writes down each cell, by rank and then in its order, counted from 0.

    Ranks take turns, a cell in each, that is passed over while what it needs is not on its way.
    """
    idle_turn = (NONE,) * 5
    # Of results by their number; nothing is the last of them, and always there.
    underway = bytearray(passes.results + 1)
    underway[NONE] = 1
    # The last cell of each stage, and the last of them that goes backward.
    last_of, back_of = np.full((2, len(passes.home)), NONE)
    last_of[passes.stage] = passes.cell
    back = np.flatnonzero((passes.kind == PassKind.B) | (passes.kind == PassKind.W))
    back_of[passes.stage[back]] = passes.cell[back]
    begin, rests = 0, []
    for rank, (cells, steps) in enumerate(zip(passes.cells, _steps_of(passes), strict=True)):
        turns, done = list[tuple[int, ...]](), 0
        held = passes.home == rank
        backward = back_of[held][back_of[held] >= 0] - begin
        idle_turns = _idle_turns(cells, (last_of[held] - begin).tolist(), backward.tolist())
        for number, idle in sorted(idle_turns.items()):
            turns += steps[done:number]
            turns += [idle_turn] * idle
            done = number
        begin += len(cells)
        turns += steps[done:]
        rests.append(turns[::-1])
    written, clock = [NONE] * (begin + 1), 0
    while rests := [rest for rest in rests if rest]:
        moved = True
        while moved and all(rests):
            moved = False
            for rest in rests:
                need, other, sent, also, number = rest[-1]
                if underway[need] and underway[other]:
                    rest.pop()
                    underway[sent] = underway[also] = moved = True
                    written[number] = clock
                    clock += 1
        if not moved:
            raise ValueError("this order cannot finish")
    return written[:NONE]


def _idle_turns(cells: Sequence[Cell], last: list[int], backward: list[int]) -> dict[int, int]:
    """Return how many turns torch spends on sharded parameters before a cell; after the last, too.

    Of each stage of the rank, `last` is its last cell, `backward` its last that goes backward. It
    gathers the stages that come next, frees the others, and reduces the gradients of a stage after
    its last backward pass. Nothing is sent in such a turn, but the others get ahead.
    """
    idle: Counter[int] = Counter()
    idle.update(number + 1 for number in backward)
    if len(last) <= _MOST_GATHERED:  # all from the beginning, each until its last pass
        idle[0] += len(last)
        idle.update(number + 1 for number in last)
        return idle
    gathered: frozenset[int] = frozenset()
    for number, upcoming in enumerate((*_upcoming(cells), frozenset[int]())):
        if upcoming is not gathered:
            idle[number] += len(gathered ^ upcoming)
            gathered = upcoming
    return idle


def _upcoming(cells: Sequence[Cell]) -> list[frozenset[int]]:
    """Return the stages that come next, from each cell on."""
    found: list[frozenset[int]] = []
    following: tuple[int, ...] = ()
    for cell in reversed(cells):
        own = (cell[0].stage,) if len(cell) == 1 else tuple(action.stage for action in cell)
        following, soon = _put_first(own, following)
        found.append(soon)
    return found[::-1]


@lru_cache(maxsize=1024)
def _put_first(
    own: tuple[int, ...], following: tuple[int, ...]
) -> tuple[tuple[int, ...], frozenset[int]]:
    """Return stages in the order in which they come, and those of them that are gathered."""
    ordered = tuple(dict.fromkeys((*own, *following)))
    return ordered, frozenset(ordered[:_MOST_GATHERED])
