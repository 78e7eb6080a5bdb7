"""Messages of all hops in → what each should have taken, by its peers."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from debubble.simulate.lengths import hop_of
from debubble.simulate.measured import MeasuredStep
from debubble.timeline.model import F64, I64, Flags


def middle_of_others(in_order: Sequence[float], own: float | None) -> float | None:
    """Return the middle of some medians, in ascending order, without one's own if it is among them.

    Of two others the faster says what is possible. None where there are no others.
    """
    others = len(in_order) - (own is not None)
    if others < 1:
        return None
    middle = (others - 1) // 2
    stands_before = own is not None and bisect_left(in_order, own) <= middle
    return in_order[middle + stands_before]


# Both ranks see an exchange end at once where each waits for both its messages; the recorded ones,
# whose sends are buffered, do not.
_AT_ONCE = 0.02
# Messages so many times as long, or as short, count as alike.
_ALIKE = 1.2


def end_together(step: MeasuredStep) -> Flags:
    """Tell the messages of exchanges that ended for both ranks at once, with the later message."""
    ends, messages = step.times.batch_end, step.program.messages
    apart = np.abs(ends[messages.received] - ends[messages.sent])
    together: Flags = step.fused & (apart <= _AT_ONCE * step.lengths.wire)
    return together


def of_other_way(against_usual: F64, times: float, healthy: F64) -> Flags:
    """Tell exchanges of a slow hop that lasted as long because of their other message.

    `against_usual` is how long each lasted, `healthy` the same of hops that are well, both against
    what is usual there. An exchange of a hop that takes some `times` as long may be one that would
    have been as many times shorter, or one that was late the other way: the commoner of the two.
    """
    in_order = np.sort(healthy)

    def alike(lengths: F64) -> I64:
        below = np.searchsorted(in_order, lengths / _ALIKE, side="left")
        above = np.searchsorted(in_order, lengths * _ALIKE, side="right")
        return (above - below).astype(np.int64)

    found: Flags = alike(against_usual) > alike(against_usual / times)
    return found


Hop = tuple[int, int]
"""The rank that sends and the rank that receives."""
# Hops up to so many times as slow as others are well: recorded healthy ones differ by up to 1.4.
WELL = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What each message of a step should take.

    The wire counts from when both sides are there; where messages are buffered, from the send's
    start. The drain is what the receive takes of a message that came before it began.
    """

    wire: I64
    drain: I64
    seen: I64
    """Of the receive as it came, from when both sides were there."""
    wire_times: F64
    """How many times as long as it should a message mostly takes on its hop."""
    drain_times: F64
    sending_times: F64
    """Of buffered messages a send may be quick where the wire is slow."""
    other_way: Flags
    """Exchanges that their other message made long: repairing this hop leaves them as they are."""


def expect_wire(
    steps: tuple[MeasuredStep, ...], wires: Mapping[Hop, str] | None = None
) -> tuple[Expected, ...]:
    """Return what each message of each step should have taken.

    Hops of one class carry messages of one size, one way or both ways at once, over one kind of
    wire where `wires` tells. What a hop should do is the middle of what the others of its class do;
    alone in its class, what it does itself.
    """
    hop = np.concatenate([hop_of(step.program) for step in steps])
    peers = _number(
        np.concatenate([step.transfer_bytes for step in steps]),
        np.concatenate([step.fused for step in steps]),
        np.concatenate([_wire_of(step, wires or {}) for step in steps]),
    )
    took = _Kind.of([(step.lengths.wire, step.seen.wire) for step in steps])
    drains = _Kind.of([(step.lengths.drain, step.seen.drain) for step in steps])
    sends = _Kind.of([(step.lengths.sending, np.ones_like(step.fused)) for step in steps])
    kinds = (took, drains, sends)
    for number in range(int(peers.max(initial=-1)) + 1):
        mine = peers == number
        by_wire, by_drain, by_send = (kind.against_others(hop, mine) for kind in kinds)
        for one in np.unique(hop[mine]).tolist():
            own = mine & (hop == one)
            # What no other hop shows tells nothing: then one is as slow as the other.
            took.set(own, by_wire.get(one), by_drain.get(one))
            drains.set(own, by_drain.get(one), by_wire.get(one))
            sends.set(own, by_send.get(one))
    together = np.concatenate([end_together(step) for step in steps])
    other_way = took.of_other_way(hop, peers, together)
    cuts = np.cumsum([len(step.fused) for step in steps])[:-1]
    columns = (took.usual, drains.usual, took.times, drains.times, sends.times, other_way)
    parts = (np.split(column, cuts) for column in columns)
    return tuple(
        Expected(
            wire=wire,
            drain=drain,
            seen=_as_it_came(step, wire, drain),
            wire_times=wire_times,
            drain_times=drain_times,
            sending_times=sending_times,
            other_way=of_other,
        )
        for step, wire, drain, wire_times, drain_times, sending_times, of_other in zip(
            steps, *parts, strict=True
        )
    )


class _Kind(NamedTuple):
    """Wires, drains or sends: what they took, which of them were measured; and what is found."""

    ns: I64
    seen: Flags
    usual: I64
    times: F64

    @classmethod
    def of(cls, steps: Sequence[tuple[I64, Flags]]) -> _Kind:
        ns, seen = (np.concatenate(column) for column in zip(*steps, strict=True))
        return cls(ns, seen, ns.copy(), np.ones(len(ns)))

    def against_others(self, hop: I64, mine: Flags) -> dict[int, float]:
        """Return how many times as long as those of others each hop's messages mostly take."""
        rows = np.flatnonzero(mine & self.seen)
        medians = {
            one: max(float(np.median(self.ns[rows[hop[rows] == one]])), 1.0)
            for one in np.unique(hop[rows]).tolist()
        }
        in_order = sorted(medians.values())
        usual = {one: middle_of_others(in_order, own) for one, own in medians.items()}
        return {one: medians[one] / it for one, it in usual.items() if it is not None}

    def set(self, own: Flags, *told: float | None) -> None:
        """Set what a hop takes against others, by the first that tells; and what is usual."""
        times = next((one for one in told if one is not None), 1.0)
        rows = own & self.seen if (own & self.seen).any() else own
        self.times[own] = times
        self.usual[own] = round(float(np.median(self.ns[rows])) / times)

    def of_other_way(self, hop: I64, peers: I64, together: Flags) -> Flags:
        """Tell exchanges of slow hops that lasted as long because of their other message."""
        found = np.zeros(len(self.ns), dtype=bool)
        against_usual = self.ns / np.maximum(self.usual, 1)
        slow = self.times > WELL
        for number in np.unique(peers[together & slow]).tolist():
            mine = together & (peers == number)
            healthy = against_usual[mine & ~slow] / self.times[mine & ~slow]
            for one in np.unique(hop[mine & slow]).tolist():
                own = np.flatnonzero(mine & slow & (hop == one))
                times = float(self.times[own[0]])
                found[own] = of_other_way(against_usual[own], times, healthy)
        return found


def _as_it_came(step: MeasuredStep, wire: I64, drain: I64) -> I64:
    """Return what the receive of each message should have taken once both sides were there."""
    times, messages = step.times, step.program.messages
    late = times.batch_start[messages.received] - times.batch_start[messages.sent]
    rest = np.maximum(drain, wire - np.maximum(late, 0))
    return np.where(messages.rendezvous, wire, rest)


def _number(*columns: NDArray[Any]) -> I64:
    """Return a number for each message, the same where all columns are."""
    number = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:
        values, own = np.unique(column, return_inverse=True)
        number = number * len(values) + own.reshape(-1)
    return np.unique(number, return_inverse=True)[1].reshape(-1)


def _wire_of(step: MeasuredStep, wires: Mapping[Hop, str]) -> NDArray[np.str_]:
    """Return the kind of wire that each message went over; nothing where that is not known."""
    names, count = step.program.ranks, len(step.program.ranks)
    kinds = [wires.get((here, there), "") for here in names for there in names]
    return np.array(kinds, dtype=np.str_).reshape(count * count)[hop_of(step.program)]
