"""An order in → where torch's runtime posts messages among the passes.

Ranks take turns. A pass is written down when its input is on its way; with it go its send, here,
and the receive, at whatever point the receiver's own list has come to: ahead of its pass, and maybe
in front of sends that are ready before it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import lru_cache

from debubble.simulate.host import Cell, HostProgram, Post, Result, Wiring

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
