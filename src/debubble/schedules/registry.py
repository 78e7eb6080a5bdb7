"""A schedule's name in → its order and its placement out, or why it cannot be."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from debubble.errors import UsageError
from debubble.schedules.dualpipe_v import dualpipe_v
from debubble.schedules.forward_only import forward_only
from debubble.schedules.gpipe import gpipe
from debubble.schedules.interleaved_one_f_one_b import interleaved_one_f_one_b
from debubble.schedules.interleaved_zb import interleaved_zb
from debubble.schedules.looped_bfs import looped_bfs
from debubble.schedules.model import Order
from debubble.schedules.one_f_one_b import one_f_one_b
from debubble.schedules.placement import Placement, Shape, place_stages
from debubble.schedules.rounds import count_rounds
from debubble.schedules.zb_h1 import zb_h1
from debubble.schedules.zb_h2 import zb_h2
from debubble.schedules.zbv import zbv
from debubble.units import counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """What is known of a schedule before any size is."""

    make: Callable[..., Order]
    kinds: frozenset[str]
    """The kinds of passes in it."""
    shape: Shape = Shape.LOOP
    least_chunks: int = 1
    most_chunks: int | None = 1
    """None: as many as you like; `make` then takes their number."""
    whole_rounds: bool = False
    """Chunks take turns in rounds, into which the microbatches must divide (torch's rule)."""
    microbatch_a_stage: bool = False
    """It needs as many microbatches as stages, or more (torch's rule)."""


_FB, _FIW, _FBIW = frozenset("FB"), frozenset("FIW"), frozenset("FBIW")

# Where sizes are so small that two schedules are one order, the first name stands for both.
SCHEDULES = {
    "forward-only": Schedule(make=forward_only, kinds=frozenset("F")),
    "1f1b": Schedule(make=one_f_one_b, kinds=_FB),
    "gpipe": Schedule(make=gpipe, kinds=_FB),
    "interleaved-1f1b": Schedule(
        make=interleaved_one_f_one_b,
        kinds=_FB,
        least_chunks=2,
        most_chunks=None,
        whole_rounds=True,
    ),
    "looped-bfs": Schedule(make=looped_bfs, kinds=_FB, least_chunks=2, most_chunks=None),
    "zb-h1": Schedule(make=zb_h1, kinds=_FIW),
    "zb-h2": Schedule(make=zb_h2, kinds=_FIW),
    "interleaved-zb": Schedule(
        make=interleaved_zb, kinds=_FIW, least_chunks=2, most_chunks=None, whole_rounds=True
    ),
    "zbv": Schedule(make=zbv, kinds=_FIW, shape=Shape.V, least_chunks=2, most_chunks=2),
    "dualpipe-v": Schedule(
        make=dualpipe_v,
        kinds=_FBIW,
        shape=Shape.V,
        least_chunks=2,
        most_chunks=2,
        microbatch_a_stage=True,
    ),
}


def order_of(name: str, ranks: int, microbatches: int, chunks: int | None = None) -> Order:
    """Return the order of a schedule; without `chunks`, with as few a rank as it can have."""
    schedule = _find(name)
    chunks = schedule.least_chunks if chunks is None else chunks
    objection = _object_to(name, schedule, ranks, microbatches, chunks)
    if objection:
        raise objection
    return _make(schedule, ranks, microbatches, chunks)


def placement_of(name: str, ranks: int, chunks: int | None = None) -> Placement:
    """Return which stages a schedule puts on each rank."""
    schedule = _find(name)
    chunks = schedule.least_chunks if chunks is None else chunks
    objection = _object_to_chunks(name, schedule, chunks)
    if objection:
        raise objection
    return place_stages(schedule.shape, ranks, chunks)


def can_have_chunks(name: str, chunks: int) -> bool:
    """Tell whether a schedule may put so many stages on a rank."""
    return _object_to_chunks(name, _find(name), chunks) is None


def candidate_orders(
    placement: Placement, kinds: frozenset[str], microbatches: int
) -> Iterator[tuple[str, Order]]:
    """Yield the schedules that could have put these stages there and run these kinds of passes."""
    ranks, chunks = len(placement), len(placement[0])
    for name, schedule in SCHEDULES.items():
        if (
            schedule.kinds == kinds
            and place_stages(schedule.shape, ranks, chunks) == placement
            and not _object_to(name, schedule, ranks, microbatches, chunks)
        ):
            yield name, _make(schedule, ranks, microbatches, chunks)


def _find(name: str) -> Schedule:
    if name not in SCHEDULES:
        raise UsageError(f"no schedule is called {name!r}", hint=f"one of {', '.join(SCHEDULES)}")
    return SCHEDULES[name]


def _make(schedule: Schedule, ranks: int, microbatches: int, chunks: int) -> Order:
    sizes = (ranks, microbatches, chunks)
    return schedule.make(*(sizes if schedule.most_chunks is None else sizes[:2]))


def _object_to(
    name: str, schedule: Schedule, ranks: int, microbatches: int, chunks: int
) -> UsageError | None:
    """Return why a schedule cannot have these sizes."""
    if ranks < 1 or microbatches < 1:
        return UsageError(
            f"{microbatches} microbatches on {ranks} ranks make no step",
            hint="give one or more of each",
        )
    objection = _object_to_chunks(name, schedule, chunks)
    if objection:
        return objection
    stages, rounds = ranks * chunks, count_rounds(ranks, microbatches)
    if schedule.microbatch_a_stage and microbatches < stages:
        return UsageError(
            f"{name} needs a microbatch for each of {stages} stages, not {microbatches}",
            hint=f"give {stages} microbatches or more",
        )
    if schedule.whole_rounds and microbatches % rounds:
        return UsageError(
            f"{name} cannot cut {microbatches} microbatches into {rounds} equal rounds",
            hint=f"give a multiple of {ranks} microbatches",
        )
    return None


def _object_to_chunks(name: str, schedule: Schedule, chunks: int) -> UsageError | None:
    least, most = schedule.least_chunks, schedule.most_chunks
    if least <= chunks and (most is None or chunks <= most):
        return None
    wanted = counted(least, "chunk") + (" or more" if most is None else "")
    return UsageError(f"{name} needs {wanted} a rank, not {chunks}", hint=f"use --chunks {least}")
