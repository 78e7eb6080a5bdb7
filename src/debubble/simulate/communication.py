"""An order in → when its host posts each message, as the framework does.

A host runs cells, a pass or a pair that overlaps, and between them posts messages. The last rank of
1F1B in three of the ways (`S` is a send, `R` a receive, `+` one batch):

    posted       R F0 | F 0 | B 0 | S B0 | R F1 | F 1    each receive just before its pass
    fused        R F0 | F 0 | B 0 | S B0 + R F1 | F 1    the send waits for the receive
    overlapped   R F0 | F 0 | R F1 | B 0 | S B0 | F 1    received while the other way computes

What goes wrong with messages (waits in a circle, one in front of others that are ready) follows
from this order alone: docs/explanation/how-predictions-are-made.md, "How messages travel".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache, partial
from itertools import chain
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from debubble.timeline.model import I64, PassKind
from debubble.timeline.schedules import Action, Order
from debubble.timeline.schedules.named import cells_of

# Where there is no row or number.
NOTHING = -1
# How many stages of a rank torch keeps gathered at a time.
_MOST_GATHERED = 3


# By the character of a kind.
_NUMBER_OF_KIND = np.zeros(128, dtype=np.int64)
for _kind in PassKind:
    _NUMBER_OF_KIND[ord(_kind.name)] = _kind


class Communication(StrEnum):
    """When messages are posted, and what they wait for."""

    LATENCY = "latency"
    """As papers have it: a delay on every hop, no queue, nobody blocked."""
    FUSED = "fused"
    """As torch's Schedule1F1B: between a forward and a backward pass the send and the next receive
    go in one batch, and are waited for at once; other sends are waited for later."""
    BATCHED = "batched"
    """As Megatron's batched p2p: the same, and a send alone is waited for at once, too."""
    OVERLAPPED = "overlapped"
    """As Megatron's interleaved schedule with overlapped p2p: the next input's receive is posted
    with the send of a result, a queue to each neighbour, and a device starts what it is given in
    that order. A pass waits for the output that was sent before it (recorded)."""
    GROUPED = "grouped"
    """As the same schedule without overlap: one batch after each pass of warm-up and drain, and
    after each pair of passes between them, with all that goes and comes, waited for at once."""
    BLOCKING = "blocking"
    """As DeepSpeed: each message by itself on one queue and waited for at once, a gradient received
    before an output is sent."""
    POSTED = "posted"
    """As torch's GPipe: a receive is posted just before its pass, a send right after; one queue."""
    RUNTIME = "runtime"
    """As torch's runtime schedules: a receive is posted as soon as its sender is scheduled."""
    SLOTS = "slots"
    """As torch's looped schedules before 2.12 (`PipelineScheduleMulti`): ranks go through slots,
    and after each one a rank sends and receives, in one batch that is waited for."""
    DEFERRED = "deferred"
    """The same with `defer_pp_recv`: a receive is posted as late as is safe."""
    ASYNCHRONOUS = "asynchronous"
    """Free overlap: receives are always there, each way between two ranks is a queue."""


# torch runs the two passes of a pair one after the other: the second needs its input later.
ONE_BY_ONE = frozenset({Communication.RUNTIME, Communication.DEFERRED})

# Messages start whenever they can, beside compute or not.
BESIDE_COMPUTE = frozenset(
    {Communication.RUNTIME, Communication.DEFERRED, Communication.ASYNCHRONOUS}
)

# No framework sends so: papers do, and plans of what overlap would buy.
MADE_UP = frozenset({Communication.LATENCY, Communication.ASYNCHRONOUS})

# The ways of frameworks that run a schedule of their own: other orders may wait in a circle there.
OF_ONE_SCHEDULE = {
    Communication.BLOCKING: "1f1b",
    Communication.OVERLAPPED: "interleaved-1f1b",
    Communication.GROUPED: "interleaved-1f1b",
}
# Several messages in one batch.
TOGETHER = frozenset(
    {Communication.FUSED, Communication.BATCHED, Communication.GROUPED, Communication.SLOTS}
)
# Transfers that no compute runs beside, for they are waited for at once.
WAITED = frozenset(
    {
        Communication.FUSED,
        Communication.POSTED,
        Communication.BATCHED,
        Communication.GROUPED,
        Communication.SLOTS,
        Communication.BLOCKING,
    }
)
# Of torch. Its other schedules are run by its runtime; those with a loop were run slot by slot
# before 2.12, and no trace tells its version.
_LOOPED = (Communication.RUNTIME, Communication.SLOTS)
_OF_SCHEDULE = {
    "forward-only": (Communication.POSTED,),
    "gpipe": (Communication.POSTED,),
    "1f1b": (Communication.FUSED,),
    "interleaved-1f1b": _LOOPED,
    "looped-bfs": _LOOPED,
    "interleaved-zb": _LOOPED,
}
# The ways of other frameworks, the usual one first. Megatron overlaps only what is interleaved, and
# that unless told otherwise.
_OF_FRAMEWORK: dict[str, dict[str, tuple[Communication, ...]]] = {
    "deepspeed": {"1f1b": (Communication.BLOCKING,)},
    "megatron": {
        "1f1b": (Communication.BATCHED,),
        "interleaved-1f1b": (Communication.OVERLAPPED, Communication.GROUPED),
    },
}


def usual_communication(schedule: str, framework: str | None = None) -> Communication:
    """Return how a framework communicates when it runs a schedule; torch, where none is known."""
    return possible_ways(schedule, framework)[0]


def runs(framework: str | None, schedule: str) -> bool:
    """Tell whether a framework has a schedule."""
    known = _OF_FRAMEWORK.get(framework or "")
    return known is None or schedule in known


def possible_ways(schedule: str, framework: str | None) -> tuple[Communication, ...]:
    """Return the ways in which a run may have communicated, the usual one first.

    What a framework cannot run is taken as torch would run it.
    """
    torchs = _OF_SCHEDULE.get(schedule, (Communication.RUNTIME,))
    return _OF_FRAMEWORK.get(framework or "", {}).get(schedule, torchs)


def beside_compute(schedule: str, framework: str | None) -> Communication:
    """Return how a framework sends messages that are not waited for; else freely."""
    ways = _OF_FRAMEWORK.get(framework or "", {}).get(schedule, ())
    return next((way for way in ways if way not in WAITED), Communication.ASYNCHRONOUS)


Cell = tuple[Action, ...]
"""A pass, or two that run as one: both inputs are needed, both results come at the end."""


class Result(NamedTuple):
    """What a pass hands on to a neighbouring stage."""

    stage: int
    """That needs it."""
    backward: bool
    """A gradient; else activations."""
    microbatch: int


@dataclass(slots=True, kw_only=True)  # not frozen: thousands are made, each in a third of the time
class Post:
    """Messages that a host posts as one batch."""

    sends: tuple[Result, ...] = ()
    receives: tuple[Result, ...] = ()
    queue: int | None = 0
    """What is on one queue of a rank keeps its order; None: it overtakes and is overtaken."""
    waited: bool = False
    """The next pass waits for it, whether it needs it or not."""


HostProgram = list[Cell | Post]


@dataclass(frozen=True, slots=True)
class Wiring:
    """Which results cross from rank to rank."""

    cells: list[list[Cell]]
    home: dict[int, int]
    """The rank of each stage."""
    ahead: frozenset[int]
    """Stages whose next stage is on another rank."""
    back: frozenset[int]
    """Stages whose stage before is on another rank."""

    def sends(self, cell: Cell) -> tuple[Result, ...]:
        """Return what a cell hands on to another rank."""
        if len(cell) == 1:
            return self._sent(cell[0])
        return tuple(result for action in cell for result in self._sent(action))

    def needs(self, cell: Cell) -> tuple[Result, ...]:
        """Return what a cell needs from another rank."""
        if len(cell) == 1:
            return self._needed(cell[0])
        return tuple(result for action in cell for result in self._needed(action))

    def _sent(self, action: Action) -> tuple[Result, ...]:
        stage, kind, microbatch, _ = action
        if kind == "F":
            return (Result(stage + 1, False, microbatch),) if stage in self.ahead else ()
        if kind == "W" or stage not in self.back:
            return ()
        return (Result(stage - 1, True, microbatch),)

    def _needed(self, action: Action) -> tuple[Result, ...]:
        stage, kind, microbatch, _ = action
        if kind == "F":
            return (Result(stage, False, microbatch),) if stage in self.back else ()
        if kind == "W" or stage not in self.ahead:
            return ()
        return (Result(stage, True, microbatch),)

    def source(self, result: Result) -> int:
        """Return the rank that sends a result."""
        return self.home[result.stage + (1 if result.backward else -1)]

    def destination(self, result: Result) -> int:
        """Return the rank that needs a result."""
        return self.home[result.stage]


def wire_up(order: Order) -> Wiring:
    """Find out what an order sends from rank to rank."""
    stage_of = attrgetter("stage")
    home = {s: rank for rank, actions in enumerate(order) for s in set(map(stage_of, actions))}
    return Wiring(
        cells=[list(cells_of(actions)) for actions in order],
        home=home,
        ahead=frozenset(s for s, rank in home.items() if home.get(s + 1, rank) != rank),
        back=frozenset(s for s, rank in home.items() if home.get(s - 1, rank) != rank),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatPasses:
    """The passes of an order, by rank and then in its order, as columns."""

    place: I64
    stage: I64
    kind: I64
    microbatch: I64
    ranks: int
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
    microbatches: int

    def number(self, result: Result) -> int:
        """Return the number of a result."""
        return (2 * result.stage + result.backward) * self.microbatches + result.microbatch


def flatten(wiring: Wiring) -> FlatPasses:
    """Write passes as columns."""
    cells = [cell for of_rank in wiring.cells for cell in of_rank]
    stages, kinds, microbatches, _ = zip(*chain.from_iterable(cells), strict=True)
    stage, microbatch = np.array(stages, dtype=np.int64), np.array(microbatches, dtype=np.int64)
    kind = _NUMBER_OF_KIND[np.frombuffer("".join(kinds).encode(), dtype=np.uint8)]
    sizes = np.fromiter(map(len, cells), dtype=np.int64, count=len(cells))
    last = np.cumsum(sizes) - 1
    of_rank = [sum(map(len, of_rank)) for of_rank in wiring.cells]
    count, stages_in_all = int(microbatch.max()) + 1, int(stage.max()) + 1
    ahead, back = np.zeros((2, stages_in_all), dtype=bool)
    ahead[list(wiring.ahead)] = back[list(wiring.back)] = True
    forward, weight = kind == PassKind.F, kind == PassKind.W
    made = (2 * stage + np.where(forward, 2, -1)) * count + microbatch
    used = (2 * stage + np.where(forward, 0, 1)) * count + microbatch
    # No result goes beyond the ends of the model.
    ends = np.where(forward, stage == stages_in_all - 1, stage == 0)
    made = np.where(weight | ends, NOTHING, made)
    used = np.where(weight, NOTHING, used)
    return FlatPasses(
        place=np.repeat(np.arange(len(of_rank)), of_rank),
        stage=stage,
        kind=kind,
        microbatch=microbatch,
        ranks=len(of_rank),
        cell=np.repeat(np.arange(len(cells)), sizes),
        first_of_cell=last - sizes + 1,
        last_of_cell=last,
        results=2 * stages_in_all * count,
        microbatches=count,
        made=made,
        used=used,
        sent=np.where(np.where(forward, ahead[stage], back[stage]), made, NOTHING),
        needed=np.where(np.where(forward, back[stage], ahead[stage]), used, NOTHING),
    )


def write_hosts(wiring: Wiring, communication: Communication) -> list[HostProgram]:
    """Write what the host of each rank runs and posts, in its order.

    Ways that hold for long orders, or are no framework's, are written by columns: `planned.py`.
    """
    return _WRITERS[communication](wiring)


def _blocking(wiring: Wiring, cells: list[Cell]) -> Iterator[Cell | Post]:
    """Post each message by itself; before a backward pass receive first."""
    pending: tuple[Result, ...] = ()
    for cell in cells:
        sends = [Post(sends=(sent,), waited=True) for sent in pending]
        receives = [Post(receives=(need,), waited=True) for need in wiring.needs(cell)]
        backward = _way(cell) == "backward"
        yield from (*receives, *sends) if backward else (*sends, *receives)
        yield cell
        pending = wiring.sends(cell)
    yield from (Post(sends=(sent,)) for sent in pending)


def _overlapped(wiring: Wiring, cells: list[Cell]) -> Iterator[Cell | Post]:
    """Post the receive of a cell right after the cell before it that goes the same way.

    So its input is received while the other way computes.
    """
    posted: set[Result] = set()

    def receive(cell: Cell) -> Iterator[Post]:
        for need in wiring.needs(cell):
            if need not in posted:
                posted.add(need)
                yield Post(receives=(need,), queue=wiring.source(need))

    for number, cell in enumerate(cells):
        yield from receive(cell)
        yield cell
        yield from receive(next((c for c in cells[number + 1 :] if _way(c) == _way(cell)), ()))
        for sent in wiring.sends(cell):
            queue, waited = wiring.destination(sent), not sent.backward
            yield Post(sends=(sent,), queue=queue, waited=waited)


def _grouped(wiring: Wiring, cells: list[Cell]) -> Iterator[Cell | Post]:
    """Exchange after each pass, between warm-up and drain after each pair of passes."""
    groups: list[list[Cell]] = []
    for cell in cells:
        if _way(cell) == "backward" and groups and [_way(c) for c in groups[-1]] == ["forward"]:
            groups[-1].append(cell)
        else:
            groups.append([cell])
    sends: tuple[Result, ...] = ()
    for group in groups:
        needs = tuple(need for cell in group for need in wiring.needs(cell))
        if sends or needs:
            yield Post(sends=sends, receives=needs, waited=True)
        yield from group
        sends = tuple(sent for cell in group for sent in wiring.sends(cell))
    if sends:
        yield Post(sends=sends)


def _in_slots(wiring: Wiring) -> list[HostProgram]:
    """Exchange after each slot: what a rank made in it, and what its neighbours made for it."""
    slots = _slots_of(wiring)
    programs: list[HostProgram] = []
    receives: list[dict[int, list[Result]]] = [{} for _ in wiring.cells]
    for rank, cells in enumerate(wiring.cells):
        for cell, slot in zip(cells, slots[rank], strict=True):
            for sent in wiring.sends(cell):
                receives[wiring.destination(sent)].setdefault(slot, []).append(sent)
    for rank, cells in enumerate(wiring.cells):
        at, program = dict(zip(slots[rank], cells, strict=True)), list[Cell | Post]()
        for slot in sorted({*at, *receives[rank]}):
            cell = at.get(slot, ())
            program += [cell] if cell else []
            sends, received = wiring.sends(cell), tuple(receives[rank].get(slot, ()))
            if sends or received:
                program.append(Post(sends=sends, receives=received, waited=True))
        programs.append(program)
    return programs


def _slots_of(wiring: Wiring) -> list[list[int]]:
    """Return the slot of each cell: the first that is free once all its inputs are there."""
    slots: list[list[int]] = [[] for _ in wiring.cells]
    made: dict[Result, int] = {}
    moved = True
    while moved:
        moved = False
        for rank, cells in enumerate(wiring.cells):
            while len(slots[rank]) < len(cells):
                cell = cells[len(slots[rank])]
                needs = wiring.needs(cell)
                if any(need not in made for need in needs):
                    break
                ready = [made[need] for need in needs] + slots[rank][-1:]
                slots[rank].append(1 + max(ready, default=-1))
                made |= dict.fromkeys(wiring.sends(cell), slots[rank][-1])
                moved = True
    if any(len(of_rank) < len(cells) for of_rank, cells in zip(slots, wiring.cells, strict=True)):
        raise ValueError("this order cannot finish")
    return slots


def _way(cell: Cell) -> str:
    """Return which way a pass goes; none for weight gradients, which go nowhere."""
    return {"F": "forward", "W": ""}.get(cell[-1].kind, "backward")


def lower_for_runtime(wiring: Wiring, *, defer: bool = False) -> list[HostProgram]:
    """Write each rank's program as torch does; `defer` as with `defer_pp_recv`.

    A pass is written down when its input is on its way; with it go its send, here, and the receive,
    at whatever point the receiver's own list has come to: ahead of its pass, and maybe in front of
    sends that are ready before it.
    """
    programs: list[HostProgram] = [[] for _ in wiring.cells]
    written = take_turns(wiring, flatten(wiring))
    every = [(rank, cell) for rank, cells in enumerate(wiring.cells) for cell in cells]
    for number in sorted(range(len(every)), key=written.__getitem__):
        rank, cell = every[number]
        programs[rank].append(cell)
        for result in wiring.sends(cell):
            programs[rank].append(Post(sends=(result,)))
            programs[wiring.home[result[0]]].append(Post(receives=(result,)))
    if defer:
        return [list(_defer(wiring, rank, program)) for rank, program in enumerate(programs)]
    return programs


def take_turns(wiring: Wiring, passes: FlatPasses) -> list[int]:
    """Return when torch writes down each cell, by rank and then in its order, counted from 0.

    Ranks take turns, a cell in each, that is passed over while what it needs is not on its way.
    """
    idle_turn = (NOTHING,) * 5
    # Of results by their number; nothing is the last of them, and always there.
    underway = bytearray(passes.results + 1)
    underway[NOTHING] = 1
    first, last = passes.first_of_cell, passes.last_of_cell
    columns = (
        passes.needed[first],
        np.where(last > first, passes.needed[last], NOTHING),
        passes.sent[first],
        np.where(last > first, passes.sent[last], NOTHING),
        np.arange(len(first)),
    )
    every = list(zip(*(column.tolist() for column in columns), strict=True))
    # The last cell of each stage, and the last of them that goes backward.
    last_of, back_of = np.full((2, max(wiring.home) + 1), NOTHING)
    last_of[passes.stage] = passes.cell
    back = np.flatnonzero((passes.kind == PassKind.B) | (passes.kind == PassKind.W))
    back_of[passes.stage[back]] = passes.cell[back]
    begin, rests = 0, []
    for rank, cells in enumerate(wiring.cells):
        turns, done = list[tuple[int, ...]](), begin
        mine = [stage for stage, home in wiring.home.items() if home == rank]
        backward = back_of[mine][back_of[mine] >= 0] - begin
        idle_turns = _idle_turns(cells, (last_of[mine] - begin).tolist(), backward.tolist())
        for number, idle in sorted(idle_turns.items()):
            turns += every[done : begin + number]
            turns += [idle_turn] * idle
            done = begin + number
        begin += len(cells)
        turns += every[done:begin]
        rests.append(turns[::-1])
    written, clock = [NOTHING] * (begin + 1), 0
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
    return written[:NOTHING]


def _idle_turns(cells: list[Cell], last: list[int], backward: list[int]) -> dict[int, int]:
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


def _upcoming(cells: list[Cell]) -> list[frozenset[int]]:
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


def _defer(wiring: Wiring, rank: int, program: HostProgram) -> Iterator[Cell | Post]:
    """Put off each receive until its pass; before a send upwards, what that rank sends comes first.

    So the lower of two ranks always receives before it sends, and none waits in a circle.
    """
    waiting: dict[Result, Post] = {}
    for step in program:
        if isinstance(step, tuple):
            yield from (waiting.pop(need) for need in wiring.needs(step) if need in waiting)
        elif step.receives:
            waiting[step.receives[0]] = step
            continue
        else:
            peer = wiring.destination(step.sends[0])
            first = [need for need in waiting if wiring.source(need) == peer and rank < peer]
            yield from (waiting.pop(need) for need in first)
        yield step


def _rank_by_rank(
    write: Callable[[Wiring, list[Cell]], Iterator[Cell | Post]],
) -> Callable[[Wiring], list[HostProgram]]:
    return lambda wiring: [list(write(wiring, cells)) for cells in wiring.cells]


_WRITERS: dict[Communication, Callable[[Wiring], list[HostProgram]]] = {
    Communication.OVERLAPPED: _rank_by_rank(_overlapped),
    Communication.BLOCKING: _rank_by_rank(_blocking),
    Communication.GROUPED: _rank_by_rank(_grouped),
    Communication.SLOTS: _in_slots,
    Communication.DEFERRED: partial(lower_for_runtime, defer=True),
}
