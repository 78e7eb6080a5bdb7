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
    """As torch's Schedule1F1B and Megatron without interleaving: between a forward and a backward
    pass the send and the next receive go in one batch, and are waited for at once."""
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

_OF_SCHEDULE = {
    "forward-only": Communication.POSTED,
    "gpipe": Communication.POSTED,
    "1f1b": Communication.FUSED,
}


def usual_communication(schedule: str) -> Communication:
    """Return how torch communicates when it runs a schedule, or an order of one's own."""
    return _OF_SCHEDULE.get(schedule, Communication.RUNTIME)


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
    return [list(_fuse(wiring, cells)) for cells in wiring.cells]


def _fuse(wiring: Wiring, cells: list[Cell]) -> Iterator[Cell | Post]:
    pending: tuple[Result, ...] = ()
    before = ""
    for cell in cells:
        needs, way = wiring.needs(cell), _way(cell)
        if way and before and way != before:
            posts = [Post(sends=pending, receives=needs)]
        else:
            posts = [Post(sends=pending), Post(receives=needs)]
        yield from (post for post in posts if post.sends or post.receives)
        yield cell
        pending, before = wiring.sends(cell), way
    if pending:
        yield Post(sends=pending)


def _way(cell: Cell) -> str:
    """Return which way a pass goes; none for weight gradients, which go nowhere."""
    return {"F": "forward", "W": ""}.get(cell[-1].kind, "backward")


_WRITERS: dict[Communication, Callable[[Wiring], list[HostProgram]]] = {
    Communication.LATENCY: _with_latency,
    Communication.FUSED: _fused,
    Communication.POSTED: _posted,
    Communication.RUNTIME: lower_for_runtime,
    Communication.DEFERRED: lambda wiring: lower_for_runtime(wiring, defer=True),
    Communication.ASYNCHRONOUS: _asynchronous,
}
