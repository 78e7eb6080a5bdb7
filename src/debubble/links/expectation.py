"""Messages of a run in → how long each should have taken, judged by its peers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from debubble.simulate.lengths import hop_of
from debubble.simulate.measured import MeasuredStep
from debubble.timeline.model import I64, Flags


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """Nanoseconds of each message of a step."""

    wire: I64
    """From when both sides are there to the receive's end."""
    drain: I64
    """The same where the message came before its receive began, and only has to be taken in."""
    there_before: Flags
    of_hop: NDArray[np.float64]
    """What it should have taken as a share of what its hop's messages mostly take."""

    @property
    def seen(self) -> I64:
        """What the receive should have taken, as it came."""
        return np.where(self.there_before, self.drain, self.wire)


Hop = tuple[int, int]
"""The rank that sends and the rank that receives."""


def expect_wire(
    steps: tuple[MeasuredStep, ...], wires: Mapping[Hop, str] | None = None
) -> tuple[Expected, ...]:
    """Return what each message of each step should have taken.

    Hops of one class carry messages of one size, one way or both ways at once, over one kind of
    wire where `wires` tells. What a hop should do is the median of what the hops of its class do;
    alone in its class, what it does itself.
    """
    hop = np.concatenate([hop_of(step.program) for step in steps])
    size = np.concatenate([step.transfer_bytes for step in steps])
    fused = np.concatenate([step.fused for step in steps])
    seen = np.concatenate([_seen(step) for step in steps])
    before = np.concatenate([_there_before(step) for step in steps])
    wire, drain = seen.copy(), seen.copy()
    share = np.ones(len(seen))
    over = np.concatenate([_wire_of(step, wires or {}) for step in steps])
    classes = sorted(set(zip(size.tolist(), fused.tolist(), over.tolist(), strict=True)))
    for one_size, both_ways, wire_kind in classes:
        mine = (size == one_size) & (fused == both_ways) & (over == wire_kind)
        wire[mine] = _typical(seen, hop, mine & ~before, mine)
        drain[mine] = _typical(seen, hop, mine & before, mine)
        for one in np.unique(hop[mine & ~before]):
            own = mine & (hop == one)
            share[own] = wire[own] / max(float(np.median(seen[own & ~before])), 1.0)
    cuts = np.cumsum([len(step.fused) for step in steps])[:-1]
    parts = (np.split(column, cuts) for column in (wire, drain, before, share))
    return tuple(
        Expected(wire=w, drain=d, there_before=b, of_hop=s)
        for w, d, b, s in zip(*parts, strict=True)
    )


def _wire_of(step: MeasuredStep, wires: Mapping[Hop, str]) -> NDArray[np.str_]:
    """Return the kind of wire that each message went over; nothing where that is not known."""
    names, count = step.program.ranks, len(step.program.ranks)
    kinds = [wires.get((here, there), "") for here in names for there in names]
    return np.array(kinds, dtype=np.str_).reshape(count * count)[hop_of(step.program)]


def _typical(seen: I64, hop: I64, wanted: Flags, otherwise: Flags) -> int:
    """Return the middle of the hops' medians. Of two hops the faster says what is possible."""
    rows = wanted if wanted.any() else otherwise
    medians = sorted(int(np.median(seen[rows & (hop == one)])) for one in np.unique(hop[rows]))
    return medians[(len(medians) - 1) // 2]


def _seen(step: MeasuredStep) -> I64:
    """Return from when both sides of each message were there to the receive's end."""
    times, messages = step.times, step.program.messages
    both = np.maximum(times.batch_start[messages.sent], times.batch_start[messages.received])
    seen: I64 = np.maximum(times.batch_end[messages.received] - both, 0)
    return seen


def _there_before(step: MeasuredStep) -> Flags:
    times, messages = step.times, step.program.messages
    before: Flags = times.batch_end[messages.sent] <= times.batch_start[messages.received]
    return before & ~messages.rendezvous
