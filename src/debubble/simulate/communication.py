"""An order in → when its host posts each message, as the framework does.

A host runs cells, a pass or a pair that overlaps, and between them posts messages.

Ranks take turns. A pass is written down when its input is on its way; with it go its send, here,
and the receive, at whatever point the receiver's own list has come to: ahead of its pass, and maybe
in front of sends that are ready before it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import NamedTuple

from debubble.schedules import Action, Order

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
    ahead: bool = False
    """It waits for no pass that was issued before it."""
    in_order: bool = False
    """The device starts it no sooner than the batch launched before it, on whatever queue."""
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
    home = {action.stage: rank for rank, actions in enumerate(order) for action in actions}
    return Wiring(
        cells=[list(cells_of(actions)) for actions in order],
        home=home,
        ahead=frozenset(one for one, rank in home.items() if home.get(one + 1, rank) != rank),
        back=frozenset(one for one, rank in home.items() if home.get(one - 1, rank) != rank),
    )


def cells_of(actions: Iterable[Action]) -> Iterator[Cell]:
    """Yield passes, those that run as one together."""
    rest = iter(actions)
    for action in rest:
        yield (action, next(rest)) if action.overlap else (action,)


# How many stages of a rank torch keeps gathered at a time.
_MOST_GATHERED = 3


def lower_for_runtime(wiring: Wiring, *, defer: bool = False) -> list[HostProgram]:
    """Write each rank's program as torch does; `defer` as with `defer_pp_recv`."""
    programs: list[HostProgram] = [[] for _ in wiring.cells]
    underway: set[Result] = set()
    turns = [[(cell, wiring.needs(cell)) for cell in _turns(cells)][::-1] for cells in wiring.cells]
    while any(turns):
        moved = False
        for rank, rest in enumerate(turns):
            if not rest or not underway.issuperset(rest[-1][1]):
                continue
            moved = True
            cell, _ = rest.pop()
            if not cell:
                continue
            programs[rank].append(cell)
            for result in wiring.sends(cell):
                underway.add(result)
                programs[rank].append(Post(sends=(result,)))
                programs[wiring.destination(result)].append(Post(receives=(result,)))
        if not moved:
            raise ValueError("this order cannot finish")
    if defer:
        return [list(_defer(wiring, rank, program)) for rank, program in enumerate(programs)]
    return programs


def _turns(cells: list[Cell]) -> Iterator[Cell]:
    """Yield cells, and an empty one for each turn that torch spends on sharded parameters.

    It gathers the stages that come next, frees the others, and reduces the gradients of a stage
    after its last backward pass. Nothing is sent in such a turn, but the others get ahead.
    """
    backward = {a.stage: n for n, cell in enumerate(cells) for a in cell if a.kind in "BW"}
    reduced = Counter(backward.values())
    gathered: frozenset[int] = frozenset()
    for number, (cell, upcoming) in enumerate(zip(cells, _upcoming(cells), strict=True)):
        if upcoming is not gathered:
            yield from [()] * len(gathered ^ upcoming)
            gathered = upcoming
        yield cell
        if number in reduced:
            yield from [()] * reduced[number]
    yield from [()] * len(gathered)


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
            first = [one for one in waiting if wiring.source(one) == peer and rank < peer]
            yield from (waiting.pop(one) for one in first)
        yield step


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
    DEFERRED = "deferred"
    """The same with `defer_pp_recv`: a receive is posted as late as is safe."""
    ASYNCHRONOUS = "asynchronous"
    """Free overlap: receives are always there, each way between two ranks is a queue."""


# torch runs the two passes of a pair one after the other: the second needs its input later.
ONE_BY_ONE = frozenset({Communication.RUNTIME, Communication.DEFERRED})

# The ways of frameworks that run a schedule of their own: other orders may wait in a circle there.
OF_ONE_SCHEDULE = {
    Communication.BLOCKING: "1f1b",
    Communication.OVERLAPPED: "interleaved-1f1b",
    Communication.GROUPED: "interleaved-1f1b",
}
# Several messages in one batch.
TOGETHER = frozenset({Communication.FUSED, Communication.BATCHED, Communication.GROUPED})
# Transfers that no compute runs beside, for they are waited for at once.
WAITED = frozenset(
    {
        Communication.FUSED,
        Communication.POSTED,
        Communication.BATCHED,
        Communication.GROUPED,
        Communication.BLOCKING,
    }
)
_OF_SCHEDULE = {
    "forward-only": Communication.POSTED,
    "gpipe": Communication.POSTED,
    "1f1b": Communication.FUSED,
}


def usual_communication(schedule: str, framework: str | None = None) -> Communication:
    """Return how a framework communicates when it runs a schedule; torch, where none is known."""
    return possible_ways(schedule, framework)[0]


_SCHEDULES_OF = {
    "deepspeed": frozenset({"1f1b"}),
    "megatron": frozenset({"1f1b", "interleaved-1f1b"}),
}


def schedules_of(framework: str | None) -> frozenset[str] | None:
    """Return the schedules that a framework has; None for all."""
    return _SCHEDULES_OF.get(framework or "")


def runs(framework: str | None, schedule: str) -> bool:
    """Tell whether a framework has a schedule."""
    known = schedules_of(framework)
    return known is None or schedule in known


def possible_ways(schedule: str, framework: str | None) -> tuple[Communication, ...]:
    """Return the ways in which a run may have communicated, the usual one first.

    Megatron overlaps only what is interleaved, and that unless told otherwise. What a framework
    cannot run is taken as torch would run it.
    """
    if (framework, schedule) == ("deepspeed", "1f1b"):
        return (Communication.BLOCKING,)
    if (framework, schedule) == ("megatron", "interleaved-1f1b"):
        return Communication.OVERLAPPED, Communication.GROUPED
    if (framework, schedule) == ("megatron", "1f1b"):
        return (Communication.BATCHED,)
    return (_OF_SCHEDULE.get(schedule, Communication.RUNTIME),)


def write_hosts(wiring: Wiring, communication: Communication) -> list[HostProgram]:
    """Write what the host of each rank runs and posts, in its order."""
    return _WRITERS[communication](wiring)


def _with_latency(wiring: Wiring) -> list[HostProgram]:
    return _always_received(wiring, lambda _: None)


def _asynchronous(wiring: Wiring) -> list[HostProgram]:
    """Let sends to one rank follow each other."""
    return _always_received(wiring, wiring.destination)


def _always_received(wiring: Wiring, queue_of: Callable[[Result], int | None]) -> list[HostProgram]:
    """Let every receive be there before its message; it takes no time of its own."""
    programs: list[HostProgram] = [[] for _ in wiring.cells]
    for cells, program in zip(wiring.cells, programs, strict=True):
        for cell in cells:
            program += [Post(receives=(r,), queue=None, ahead=True) for r in wiring.needs(cell)]
            program.append(cell)
            program += [Post(sends=(s,), queue=queue_of(s)) for s in wiring.sends(cell)]
    return programs


def _posted(wiring: Wiring) -> list[HostProgram]:
    """Post receives in the order in which they are sent, as many as the next pass needs."""
    due: defaultdict[tuple[int, int], list[Result]] = defaultdict(list)
    for rank, cells in enumerate(wiring.cells):
        for result in (one for cell in cells for one in wiring.sends(cell)):
            due[rank, wiring.destination(result)].append(result)
    for results in due.values():
        results.reverse()
    return [
        list(_post_in_time(wiring, cells, {s: q for (s, d), q in due.items() if d == rank}))
        for rank, cells in enumerate(wiring.cells)
    ]


def _post_in_time(
    wiring: Wiring, cells: list[Cell], due: dict[int, list[Result]]
) -> Iterator[Cell | Post]:
    posted: set[Result] = set()
    for cell in cells:
        for need in wiring.needs(cell):
            while need not in posted:
                following = due[wiring.source(need)].pop()
                posted.add(following)
                yield Post(receives=(following,))
        yield cell
        yield from (Post(sends=(one,)) for one in wiring.sends(cell))


def _fused(wiring: Wiring) -> list[HostProgram]:
    return [list(_fuse(wiring, cells, waited=False)) for cells in wiring.cells]


def _batched(wiring: Wiring) -> list[HostProgram]:
    return [list(_fuse(wiring, cells, waited=True)) for cells in wiring.cells]


def _fuse(wiring: Wiring, cells: list[Cell], *, waited: bool) -> Iterator[Cell | Post]:
    pending: tuple[Result, ...] = ()
    before = ""
    for cell in cells:
        needs, way = wiring.needs(cell), _way(cell)
        if way and before and way != before:
            posts = [Post(sends=pending, receives=needs, waited=waited)]
        else:
            posts = [Post(sends=pending, waited=waited), Post(receives=needs)]
        yield from (post for post in posts if post.sends or post.receives)
        yield cell
        pending, before = wiring.sends(cell), way
    if pending:
        yield Post(sends=pending)


def _blocking(wiring: Wiring) -> list[HostProgram]:
    return [list(_block(wiring, cells)) for cells in wiring.cells]


def _block(wiring: Wiring, cells: list[Cell]) -> Iterator[Cell | Post]:
    pending: tuple[Result, ...] = ()
    for cell in cells:
        sends = [Post(sends=(one,), waited=True) for one in pending]
        receives = [Post(receives=(one,), waited=True) for one in wiring.needs(cell)]
        backward = _way(cell) == "backward"
        yield from (*receives, *sends) if backward else (*sends, *receives)
        yield cell
        pending = wiring.sends(cell)
    yield from (Post(sends=(one,)) for one in pending)


def _overlapped(wiring: Wiring) -> list[HostProgram]:
    """Post the receive of a cell right after the cell before it that goes the same way."""
    programs: list[HostProgram] = []
    for cells in wiring.cells:
        program: HostProgram = []
        posted: set[Result] = set()
        # The next cell of the same way, whose input is received while the other way computes.
        for number, cell in enumerate(cells):
            program += _posts(wiring, wiring.needs(cell), posted)
            program.append(cell)
            following = next((one for one in cells[number + 1 :] if _way(one) == _way(cell)), ())
            program += _posts(wiring, wiring.needs(following) if following else (), posted)
            program += [
                Post(
                    sends=(one,),
                    queue=wiring.destination(one),
                    in_order=True,
                    waited=not one.backward,
                )
                for one in wiring.sends(cell)
            ]
        programs.append(program)
    return programs


def _grouped(wiring: Wiring) -> list[HostProgram]:
    """Exchange after each pass, between warm-up and drain after each pair of passes."""
    programs: list[HostProgram] = []
    for cells in wiring.cells:
        groups: list[list[Cell]] = []
        for number, cell in enumerate(cells):
            before = groups[-1] if groups else []
            paired = _way(cell) == "backward" and len(before) == 1
            paired = paired and number > 0 and _way(cells[number - 1]) == "forward"
            if paired:
                before.append(cell)
            else:
                groups.append([cell])
        program: HostProgram = []
        sends: tuple[Result, ...] = ()
        for group in groups:
            needs = tuple(one for cell in group for one in wiring.needs(cell))
            if sends or needs:
                program.append(Post(sends=sends, receives=needs, waited=True))
            program += group
            sends = tuple(one for cell in group for one in wiring.sends(cell))
        programs.append([*program, Post(sends=sends)] if sends else program)
    return programs


def _posts(wiring: Wiring, needs: tuple[Result, ...], posted: set[Result]) -> list[Post]:
    new = [one for one in needs if one not in posted]
    posted.update(new)
    return [Post(receives=(one,), queue=wiring.source(one), in_order=True) for one in new]


def _way(cell: Cell) -> str:
    """Return which way a pass goes; none for weight gradients, which go nowhere."""
    return {"F": "forward", "W": ""}.get(cell[-1].kind, "backward")


_WRITERS: dict[Communication, Callable[[Wiring], list[HostProgram]]] = {
    Communication.LATENCY: _with_latency,
    Communication.FUSED: _fused,
    Communication.BATCHED: _batched,
    Communication.OVERLAPPED: _overlapped,
    Communication.BLOCKING: _blocking,
    Communication.GROUPED: _grouped,
    Communication.POSTED: _posted,
    Communication.RUNTIME: lower_for_runtime,
    Communication.DEFERRED: lambda wiring: lower_for_runtime(wiring, defer=True),
    Communication.ASYNCHRONOUS: _asynchronous,
}
