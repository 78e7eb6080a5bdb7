"""Sizes in → the order of passes on each rank: every schedule that has a name.

A schedule is a function here, with its entry in `SCHEDULES` right below it: nothing else has to
know of a new one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from operator import attrgetter
from typing import Literal, NamedTuple, cast

from debubble.errors import UsageError
from debubble.units import counted

Kind = Literal["F", "B", "I", "W"]


class Action(NamedTuple):
    """One pass of one microbatch on one stage."""

    stage: int
    kind: Kind
    microbatch: int
    overlap: bool = False
    """A forward pass that runs as one with the backward pass after it, as in DualPipe: neither's
    result leaves the rank before both are done. Order alone cannot say it, and whoever ignores it
    finds half of the bubble."""

    def __str__(self) -> str:
        """Write it as torch does in its CSV orders and its labels."""
        return f"{self.stage}{self.kind}{self.microbatch}"


Order = list[list[Action]]


def cells_of(actions: Sequence[Action]) -> Iterator[tuple[Action, ...]]:
    """Yield passes, those that run as one together."""
    if not any(map(attrgetter("overlap"), actions)):
        yield from zip(actions, strict=True)
        return
    rest = iter(actions)
    for action in rest:
        yield (action, next(rest)) if action.overlap else (action,)


Placement = tuple[tuple[int, ...], ...]
"""The stages of each rank, lowest first."""


class Shape(StrEnum):
    """How the stages of a model run along the ranks."""

    LOOP = "loop"
    """From the last rank back to the first. With one chunk a rank: stage and rank are one."""
    V = "v"
    """Every second time backwards, so that the first rank holds the first stage and the last."""


def place_stages(shape: Shape, ranks: int, chunks: int) -> Placement:
    """Return the stages of each rank."""

    def stage_of(rank: int, chunk: int) -> int:
        mirrored = shape is Shape.V and chunk % 2 == 1
        return chunk * ranks + (ranks - 1 - rank if mirrored else rank)

    return tuple(tuple(stage_of(rank, chunk) for chunk in range(chunks)) for rank in range(ranks))


_FB, _FIW, _FBIW = frozenset("FB"), frozenset("FIW"), frozenset("FBIW")


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


# Where sizes are so small that two schedules are one order, the first name stands for both.
SCHEDULES: dict[str, Schedule] = {}


def order_of(name: str, ranks: int, microbatches: int, chunks: int | None = None) -> Order:
    """Return the order of a schedule; without `chunks`, with as few a rank as it can have."""
    schedule = _find(name)
    chunks = schedule.least_chunks if chunks is None else chunks
    objection = _object_to(name, ranks, microbatches, chunks)
    if objection:
        raise objection
    return _make(schedule, ranks, microbatches, chunks)


def placement_of(name: str, ranks: int, chunks: int | None = None) -> Placement:
    """Return which stages a schedule puts on each rank."""
    return place_stages(_find(name).shape, ranks, count_stages(name, ranks, chunks) // ranks)


def count_stages(name: str, ranks: int, chunks: int | None = None) -> int:
    """Return how many stages a schedule has; without `chunks`, with as few a rank as it can."""
    chunks = _find(name).least_chunks if chunks is None else chunks
    objection = _object_to_chunks(name, chunks)
    if objection:
        raise objection
    return ranks * chunks


def can_have_chunks(name: str, chunks: int) -> bool:
    """Tell whether a schedule may put so many stages on a rank."""
    return _object_to_chunks(name, chunks) is None


def candidate_orders(
    placement: Placement, kinds: frozenset[str], microbatches: int
) -> Iterator[tuple[str, Order]]:
    """Yield the schedules that could have put these stages there and run these kinds of passes."""
    ranks, chunks = len(placement), len(placement[0])
    for name, schedule in SCHEDULES.items():
        if (
            schedule.kinds == kinds
            and place_stages(schedule.shape, ranks, chunks) == placement
            and not _object_to(name, ranks, microbatches, chunks)
        ):
            yield name, _make(schedule, ranks, microbatches, chunks)


def _find(name: str) -> Schedule:
    if name not in SCHEDULES:
        raise UsageError(f"no schedule is called {name!r}", hint=f"one of {', '.join(SCHEDULES)}")
    return SCHEDULES[name]


def _make(schedule: Schedule, ranks: int, microbatches: int, chunks: int) -> Order:
    sizes = (ranks, microbatches, chunks)
    return schedule.make(*(sizes if schedule.most_chunks is None else sizes[:2]))


def _object_to(name: str, ranks: int, microbatches: int, chunks: int) -> UsageError | None:
    """Return why a schedule cannot have these sizes."""
    if ranks < 1 or microbatches < 1:
        return UsageError(
            f"{microbatches} microbatches on {ranks} ranks make no step",
            hint="give one or more of each",
        )
    objection = _object_to_chunks(name, chunks)
    if objection:
        return objection
    schedule, stages, rounds = _find(name), ranks * chunks, count_rounds(ranks, microbatches)
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


def _object_to_chunks(name: str, chunks: int) -> UsageError | None:
    schedule = _find(name)
    least, most = schedule.least_chunks, schedule.most_chunks
    if least <= chunks and (most is None or chunks <= most):
        return None
    wanted = counted(least, "chunk") + (" or more" if most is None else "")
    return UsageError(f"{name} needs {wanted} a rank, not {chunks}", hint=f"use --chunks {least}")


def forward_only(ranks: int, microbatches: int) -> Order:
    """Let every rank run the microbatches one after the other."""
    return [[Action(rank, "F", m) for m in range(microbatches)] for rank in range(ranks)]


SCHEDULES["forward-only"] = Schedule(make=forward_only, kinds=frozenset("F"))


def one_f_one_b(ranks: int, microbatches: int) -> Order:
    """Let a rank run as many forward passes ahead as there are ranks from it to the end."""
    order: Order = []
    for rank in range(ranks):
        ahead = min(ranks - rank, microbatches)
        actions = [Action(rank, "F", m) for m in range(ahead)]
        for m in range(microbatches):
            actions.append(Action(rank, "B", m))
            if m + ahead < microbatches:
                actions.append(Action(rank, "F", m + ahead))
        order.append(actions)
    return order


SCHEDULES["1f1b"] = Schedule(make=one_f_one_b, kinds=_FB)


def gpipe(ranks: int, microbatches: int) -> Order:
    """Let every rank run all of F, then all of B, microbatches in order."""
    return [
        [Action(rank, kind, m) for kind in ("F", "B") for m in range(microbatches)]
        for rank in range(ranks)
    ]


SCHEDULES["gpipe"] = Schedule(make=gpipe, kinds=_FB)


def interleaved_one_f_one_b(ranks: int, microbatches: int, chunks: int) -> Order:
    """Let a rank run ahead to its last chunk's first round, then alternate F and B.

    For each rank between it and the last, a rank runs two passes further ahead: a forward pass has
    to get there, and a backward pass back.
    """
    passes = partial(take_turns, ranks=ranks, microbatches=microbatches, chunks=chunks)
    order: Order = []
    for rank in range(ranks):
        ahead = (chunks - 1) * round_size(ranks, microbatches) + 2 * (ranks - 1 - rank)
        forwards = passes("F", rank)
        actions = forwards[:ahead]
        for number, backward in enumerate(passes("B", rank), start=ahead):
            actions += [*forwards[number : number + 1], backward]
        order.append(actions)
    return order


SCHEDULES["interleaved-1f1b"] = Schedule(
    make=interleaved_one_f_one_b, kinds=_FB, least_chunks=2, most_chunks=None, whole_rounds=True
)


def looped_bfs(ranks: int, microbatches: int, chunks: int) -> Order:
    """Let every rank run all of F chunk by chunk, then all of B the same way back."""
    order: Order = []
    for rank in range(ranks):
        stages = range(rank, ranks * chunks, ranks)
        forwards = [Action(stage, "F", m) for stage in stages for m in range(microbatches)]
        backwards = [Action(action.stage, "B", action.microbatch) for action in forwards[::-1]]
        order.append(forwards + backwards)
    return order


SCHEDULES["looped-bfs"] = Schedule(make=looped_bfs, kinds=_FB, least_chunks=2, most_chunks=None)


def zb_h1(ranks: int, microbatches: int) -> Order:
    """Warm up as 1F1B does and let every rank hold as many microbatches as 1F1B's first."""
    return [
        defer_weights(rank, microbatches, ahead=ranks - rank, limit=ranks) for rank in range(ranks)
    ]


SCHEDULES["zb-h1"] = Schedule(make=zb_h1, kinds=_FIW)


def zb_h2(ranks: int, microbatches: int) -> Order:
    """Fill the warm-up with forward passes until the first input gradient can be back."""
    limit = 2 * ranks - 1
    return [
        defer_weights(rank, microbatches, ahead=2 * (ranks - rank) - 1, limit=limit)
        for rank in range(ranks)
    ]


SCHEDULES["zb-h2"] = Schedule(make=zb_h2, kinds=_FIW)


def interleaved_zb(ranks: int, microbatches: int, chunks: int) -> Order:
    """Alternate F and I after the warm-up, each rank's W as many passes late as its number.

    An input gradient alone is on its way back sooner than a full backward pass, so that one pass
    of warm-up per rank is enough; later ranks, which end first, keep weight gradients for then.
    """
    passes = partial(take_turns, ranks=ranks, microbatches=microbatches, chunks=chunks)
    order: Order = []
    for rank in range(ranks):
        ahead = (chunks - 1) * round_size(ranks, microbatches) + ranks - 1 - rank
        forwards, weights = passes("F", rank), passes("W", rank)
        actions = forwards[:ahead]
        for number, gradient in enumerate(passes("I", rank)):
            actions += [*forwards[ahead + number : ahead + number + 1], gradient]
            if number >= rank:
                actions.append(weights[number - rank])
        order.append(actions + weights[max(0, len(weights) - rank) :])
    return order


SCHEDULES["interleaved-zb"] = Schedule(
    make=interleaved_zb, kinds=_FIW, least_chunks=2, most_chunks=None, whole_rounds=True
)


def zbv(ranks: int, microbatches: int) -> Order:
    """Return the handcrafted order, as torch has it.

    It is made for 2 * ranks - 1 microbatches or more; with fewer, the rest is left out of it.
    """
    enough = max(2 * ranks - 1, microbatches)
    order: Order = []
    for rank, stages in enumerate(place_stages(Shape.V, ranks, 2)):
        script = Script(*stages)
        ahead = 2 * (ranks - rank) - 1
        # Warm-up: until the V's other end has come back to this rank.
        script.run("F0", ahead)
        script.run("F1 F0", rank)
        script.run("F1 I1 W1", ranks - rank)
        # Steady, the last turns without new microbatches.
        script.run("F0 I0 W0 F1 I1 W1", enough - ahead - rank)
        script.run("I0 W0 F1 I1 W1", ranks - rank - 1)
        # Cool-down: input gradients first, as others wait for them.
        script.run("I0 I1", rank)
        script.run("I0 W0", ranks - rank)
        script.run("W1", rank)
        script.run("W0", rank)
        order.append([action for action in script.actions if action.microbatch < microbatches])
    return order


SCHEDULES["zbv"] = Schedule(make=zbv, kinds=_FIW, shape=Shape.V, least_chunks=2, most_chunks=2)


def dualpipe_v(ranks: int, microbatches: int) -> Order:
    """Write the eight steps of DeepSeek's code, as torch has them.

    It needs a microbatch for each stage.
    """
    order: Order = []
    for rank, stages in enumerate(place_stages(Shape.V, ranks, 2)):
        script = Script(*stages)
        behind = ranks - rank - 1
        script.run("F0", 2 * behind)
        script.run("F0 F1", rank + 1)
        script.run("I1 W F1", behind)
        steady = microbatches - 2 * ranks + rank + 1
        if behind == 0:
            # The others wait for the V's turn: here the first pair is not made to overlap.
            script.run("F0 B1 F1&B0")
            steady -= 1
        script.run("F0&B1 F1&B0", steady)
        script.run("B1 F1&B0", behind)
        # The last backward passes of both chunks; the second half puts off its weights.
        full, odd = divmod(rank + 1, 2)
        script.run("B1 B0", full)
        script.run("B1 I0", odd)
        script.run("I1 I0", full)
        script.run("W I0", behind)
        script.run("W", rank + 1)
        order.append(script.actions)
    return order


SCHEDULES["dualpipe-v"] = Schedule(
    make=dualpipe_v,
    kinds=_FBIW,
    shape=Shape.V,
    least_chunks=2,
    most_chunks=2,
    microbatch_a_stage=True,
)


def count_rounds(ranks: int, microbatches: int) -> int:
    """Return how many rounds there are: as many as leave each at least a microbatch per rank.

    Megatron wants rounds of exactly `ranks` microbatches, torch only equal ones; where the
    microbatches are a multiple of the ranks, both are the same.
    """
    return max(1, microbatches // ranks)


def round_size(ranks: int, microbatches: int) -> int:
    """Return the microbatches of one round."""
    return microbatches // count_rounds(ranks, microbatches)


def take_turns(
    kind: Kind, rank: int, *, ranks: int, microbatches: int, chunks: int
) -> list[Action]:
    """Return a rank's passes of one kind: F from its first chunk on, all others from its last."""
    size = round_size(ranks, microbatches)
    turns = range(chunks) if kind == "F" else range(chunks - 1, -1, -1)
    return [
        Action(chunk * ranks + rank, kind, microbatch)
        for first in range(0, microbatches, size)
        for chunk in turns
        for microbatch in range(first, first + size)
    ]


def defer_weights(stage: int, microbatches: int, *, ahead: int, limit: int) -> list[Action]:
    """Return one rank's order: `ahead` F, then I and F in turn, W only where it must be.

    A microbatch holds memory from its F to its W. With `limit` of them held, a W goes before the
    next F; when no F is left, each I is followed by a W, and what then remains comes last.
    """
    started = min(ahead, microbatches)
    weighted = 0
    actions = [Action(stage, "F", m) for m in range(started)]
    for microbatch in range(microbatches):
        actions.append(Action(stage, "I", microbatch))
        last = started == microbatches
        if last or started - weighted == limit:
            actions.append(Action(stage, "W", weighted))
            weighted += 1
        if not last:
            actions.append(Action(stage, "F", started))
            started += 1
    return actions + [Action(stage, "W", m) for m in range(weighted, microbatches)]


# Stands for the stage of whatever chunk.
_ANY = -1


class Script:
    """Turns words such as `F0` into actions, and counts the microbatches by itself.

    The number names a chunk of the rank; F, B and I take the next microbatch of their chunk. `W1`
    takes chunk 1's oldest input gradient without a weight gradient, `W` the oldest of any chunk.
    `F0&B1` is a pair that overlaps.
    """

    def __init__(self, *stages: int) -> None:
        self.actions: list[Action] = []
        self._stages = stages
        self._next: Counter[tuple[bool, int]] = Counter()
        self._due: list[Action] = []
        """Weight gradients whose input gradients were made, the oldest first."""

    def run(self, words: str, times: int = 1) -> None:
        """Append the words, over and over."""
        pairs = [word.partition("&") for word in words.split()]
        parsed = []
        for first, pair, second in pairs:
            for word in (first, second) if pair else (first,):
                stage = self._stages[int(word[1:])] if word[1:] else _ANY
                parsed.append((cast("Kind", word[0]), stage, bool(pair) and word is first))
        for kind, stage, overlap in parsed * times:
            if kind == "W":
                wanted = (n for n, due in enumerate(self._due) if stage in (due[0], _ANY))
                self.actions.append(self._due.pop(next(wanted)))
                continue
            counted_as = kind == "F", stage
            microbatch = self._next[counted_as]
            self._next[counted_as] = microbatch + 1
            self.actions.append(Action(stage, kind, microbatch, overlap))
            if kind == "I":
                self._due.append(Action(stage, "W", microbatch))
