"""How a framework communicates, and an order in → what the host of each rank does."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from enum import StrEnum

from debubble.simulate.host import Cell, HostProgram, Post, Result, Wiring
from debubble.simulate.torch_runtime import lower_for_runtime


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
