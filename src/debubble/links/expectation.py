"""Messages of all hops in → what each should have taken, by its peers.

What a trace shows of a message depends on what it met (`├──┤` is a kernel, time runs to the right):

```
one way, the receiver waiting      0 → 1  send         ├─────┤   one message on the wire, seen
                                          receive   ├────────┤   whole: from when both are there
one way, sends buffered,           1 → 2  send      ├──┤         the wire is hidden; seen is the
the receiver late                         receive        ├─┤     drain, the hand-over of what came
both ways, an exchange             2 → 3            ├────────┤   two on the wire; each side waits
                                   3 → 2            ├────────┤   for the slower: which is not seen
```

So messages are held only against their like: peers carry messages of one size, one way or both ways
at once, over one kind of wire. What a hop should do is the middle of what its peers mostly do, the
hop itself left out; of two others the faster one says what is possible:

```
one way, 8 MiB   median    middle of the others   takes       should take
0 → 1            100 us    110 us                 0.9 times   110 us
1 → 2            110 us    100 us                 1.1 times   100 us
2 → 3            330 us    100 us                 3.3 times   100 us; the rest is a slow link
```

A long exchange of a slow hop may be long because of its other message. It is taken for that where
more exchanges of healthy hops last as long as it did than last 3.3 times shorter: repairing the hop
would leave it as it is. The reasons: docs/explanation/where-the-time-goes.md, "Wire or wait".
"""

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

Hop = tuple[int, int]
"""The rank that sends and the rank that receives."""

# Hops up to so many times as slow as others are well: recorded healthy ones differ by up to 1.4.
WELL = 1.5
# Both ranks see an exchange end at once where each waits for both its messages; the recorded ones,
# whose sends are buffered, do not.
_AT_ONCE = 0.02
# Messages so many times as long, or as short, count as alike.
_ALIKE = 1.2


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedTimes:
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
) -> tuple[ExpectedTimes, ...]:
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
    wires_took = _Lengths.of([(step.lengths.wire, step.seen.wire) for step in steps])
    drains_took = _Lengths.of([(step.lengths.drain, step.seen.drain) for step in steps])
    sends_took = _Lengths.of([(step.lengths.sending, np.ones_like(step.fused)) for step in steps])
    for number in range(int(peers.max(initial=-1)) + 1):
        mine = peers == number
        by_wire = wires_took.against_others(hop, mine)
        by_drain = drains_took.against_others(hop, mine)
        by_send = sends_took.against_others(hop, mine)
        for here in np.unique(hop[mine]).tolist():
            own = mine & (hop == here)
            # What no other hop shows tells nothing: then a drain is as slow as a wire.
            wires_took.set(own, by_wire.get(here), by_drain.get(here))
            drains_took.set(own, by_drain.get(here), by_wire.get(here))
            sends_took.set(own, by_send.get(here))
    together = np.concatenate([end_together(step) for step in steps])
    other_way = wires_took.of_other_way(hop, peers, together)
    ends = np.cumsum([len(step.fused) for step in steps]).tolist()
    return tuple(
        ExpectedTimes(
            wire=wires_took.usual[rows],
            drain=drains_took.usual[rows],
            seen=_as_it_came(step, wires_took.usual[rows], drains_took.usual[rows]),
            wire_times=wires_took.times[rows],
            drain_times=drains_took.times[rows],
            sending_times=sends_took.times[rows],
            other_way=other_way[rows],
        )
        for step, end in zip(steps, ends, strict=True)
        for rows in [slice(end - len(step.fused), end)]
    )


class _Lengths(NamedTuple):
    """Wires, drains or sends: what they took, which of them were measured; and what is found."""

    ns: I64
    seen: Flags
    usual: I64
    times: F64

    @classmethod
    def of(cls, steps: Sequence[tuple[I64, Flags]]) -> _Lengths:
        ns, seen = (np.concatenate(column) for column in zip(*steps, strict=True))
        return cls(ns, seen, ns.copy(), np.ones(len(ns)))

    def against_others(self, hop: I64, mine: Flags) -> dict[int, float]:
        """Return how many times as long as those of others each hop's messages mostly take."""
        rows = np.flatnonzero(mine & self.seen)
        medians = {
            here: max(float(np.median(self.ns[rows[hop[rows] == here]])), 1.0)
            for here in np.unique(hop[rows]).tolist()
        }
        in_order = sorted(medians.values())
        return {
            here: own / usual
            for here, own in medians.items()
            if (usual := middle_of_others(in_order, own)) is not None
        }

    def set(self, own: Flags, *told: float | None) -> None:
        """Set what a hop takes against others, by the first that tells; and what is usual."""
        times = next((ratio for ratio in told if ratio is not None), 1.0)
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
            for here in np.unique(hop[mine & slow]).tolist():
                own = np.flatnonzero(mine & slow & (hop == here))
                times = float(self.times[own[0]])
                found[own] = of_other_way(against_usual[own], times, healthy)
        return found


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
