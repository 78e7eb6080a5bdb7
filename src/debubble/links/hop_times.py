"""Messages of hops in → what each takes, what its peers say it should, and which hops are slow.

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

A hop is slow by its past, by its peers, or by what its kind of wire can do: a device, a topology or
a word of the user tells the kind. Rates are one direction's, of point-to-point messages sent by
kernels as NCCL does; copy engines are quicker, so their figures are never held against these.

First what each message of a step should take, then hops timed from a trace and the line through
their sizes, which the live test fits too, then kinds of wire and the verdict.
"""

from __future__ import annotations

import math
import shlex
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from debubble.errors import UsageError
from debubble.simulate.costs.wire_pools import BUFFERED_BYTES, SLOW
from debubble.simulate.lengths import hop_of
from debubble.simulate.measured import MeasuredStep
from debubble.timeline.model import (
    F64,
    I64,
    Columns,
    Flags,
    RankTimeline,
    Timeline,
    Transfers,
    may_share,
    rows_by_hop,
)
from debubble.timeline.transfers import HopFigures, known_to_leave
from debubble.units import NS_PER_S, show_bytes

Hop = tuple[int, int]
"""The rank that sends and the rank that receives."""

# Both ranks see an exchange end at once where each waits for both its messages; the recorded ones,
# whose sends are buffered, do not.
_AT_ONCE = 0.02
# Both ways at once against one way: recorded runs, and the same messages with nothing else running.
_BOTH_OVER_ONE = 1.15
# Messages so many times as long, or as short, count as alike.
_ALIKE = 1.2


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedTimes:
    """What each message of a step should take, and how each was against that."""

    hop: I64
    """Whose messages they are: the place of the sender times ranks, and the receiver's place."""
    fused: Flags
    wire: AgainstPeers
    """Counts from when both sides are there; where messages are buffered, from the send's start."""
    drain: AgainstPeers
    """What the receive takes of a message that came before it began."""
    sending: AgainstPeers
    """Of buffered messages a send may be quick where the wire is slow."""
    against: F64
    """How many times as long as it should each was, by what is seen of it; `nan` where no peers, or
    nothing that is seen, tell."""
    other_way: Flags
    """Exchanges that their other message made long: repairing this hop leaves them as they are."""


def expect_wire(
    steps: tuple[MeasuredStep, ...],
    wires: Mapping[Hop, str] | None = None,
    beside: Sequence[Sequence[MeasuredStep]] = (),
) -> tuple[ExpectedTimes, ...]:
    """Return what each message of each step should have taken.

    Hops of one class carry messages of one size, one way or both ways at once, over one kind of
    wire where `wires` tells. What a hop should do is the middle of what the others of its class do,
    in its own pipeline and in those `beside` it; alone in its class, what it does itself.
    """
    ways = [(step, 0) for step in steps]
    ways += [(step, number) for number, others in enumerate(beside, start=1) for step in others]
    parts = []
    for step, number in ways:
        hop = hop_of(step.program)
        parts.append(
            _Seen(
                hop=hop + number * len(step.program.ranks) ** 2,
                kind=_kind_of_wire(step.transfer_bytes, hop, step.program.ranks, wires),
                fused=step.fused,
                together=end_together(step),
                lengths=(step.lengths.wire, step.lengths.drain, step.lengths.sending),
                seen=(step.seen.wire, step.seen.drain, np.ones_like(step.fused)),
            )
        )
    return _expect(parts, len(steps[0].program.ranks) if steps else 0)[: len(steps)]


def expect_stream(
    transfers: Transfers, ranks: Sequence[RankTimeline], wires: Mapping[Hop, str]
) -> ExpectedTimes:
    """Return the same of batches that overlap, or are cut: they have no steps."""
    names = tuple(rank.rank for rank in ranks)
    place = {name: number for number, name in enumerate(names)}
    mine = np.isin(transfers.source, names) & np.isin(transfers.destination, names)
    # Of much smaller ones, as a server's single tokens, the start is most: no wire shows in them.
    mine &= transfers.message_bytes >= transfers.message_bytes[mine].max(initial=0) // 2
    rows = transfers.where(mine)
    ends = zip(rows.source.tolist(), rows.destination.tolist(), strict=True)
    known = known_to_leave(rows)
    waited, exchange, early, wire = _kinds(rows, buffers=bool(transfers.buffered.any()))
    took = wire.astype(np.int64)
    hop = np.array([place[here] * len(names) + place[there] for here, there in ends], np.int64)
    part = _Seen(
        hop=hop,
        kind=_kind_of_wire(rows.message_bytes, hop, names, wires),
        fused=rows.fused,
        together=np.zeros(len(rows), dtype=bool),
        lengths=(took, took, rows.send_end_ns - rows.send_start_ns),
        seen=((waited | exchange) & known, early & known, known),
    )
    return _expect([part], len(names))[0]


class _Seen(NamedTuple):
    """Messages, and what wire, drain and send of each took; which of these were measured."""

    hop: I64
    kind: NDArray[np.str_]
    """Alike where messages have one size and go over one kind of wire."""
    fused: Flags
    together: Flags
    lengths: tuple[I64, I64, I64]
    seen: tuple[Flags, Flags, Flags]


def _expect(parts: Sequence[_Seen], size: int) -> tuple[ExpectedTimes, ...]:
    if not parts:
        return ()
    hop, fused, together = (
        np.concatenate([getattr(part, name) for part in parts])
        for name in ("hop", "fused", "together")
    )
    peers = _number(np.concatenate([part.kind for part in parts]), fused)
    wire, drain, sending = (
        AgainstPeers.of([(part.lengths[each], part.seen[each]) for part in parts])
        for each in range(3)
    )
    for number in range(int(peers.max(initial=-1)) + 1):
        mine = peers == number
        back = {here: _way_back(here, size) for here in np.unique(hop[mine & fused]).tolist()}
        by_wire = wire.against_others(hop, mine, back)
        by_drain = drain.against_others(hop, mine, back)
        by_whole = drain.against_whole(wire, hop, mine)
        by_drain = {here: max(times, by_whole.get(here, 0.0)) for here, times in by_drain.items()}
        by_send = sending.against_others(hop, mine, back)
        for here in np.unique(hop[mine]).tolist():
            own = mine & (hop == here)
            # What no other hop shows tells nothing: then a drain is as slow as a wire.
            wire.set(own, by_wire.get(here), by_drain.get(here))
            drain.set(own, by_drain.get(here), by_wire.get(here), by_whole.get(here))
            sending.set(own, by_send.get(here))
            wire.against[own] *= 1.0 if here in by_wire else np.nan
            drain.against[own] *= 1.0 if here in by_drain or here in by_whole else np.nan
        for took in (wire, drain, sending):
            took.repair(hop, mine)
    other_way = wire.of_other_way(hop, peers, together)
    of_drains = np.where(drain.seen, drain.against, np.nan)
    against = np.where(wire.seen, wire.against, of_drains)
    ends = np.cumsum([len(part.hop) for part in parts]).tolist()
    return tuple(
        ExpectedTimes(
            hop=part.hop,
            fused=part.fused,
            wire=wire.where(rows),
            drain=drain.where(rows),
            sending=sending.where(rows),
            against=against[rows],
            other_way=other_way[rows],
        )
        for part, end in zip(parts, ends, strict=True)
        for rows in [np.arange(end - len(part.hop), end)]
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class AgainstPeers(Columns):
    """Wires, drains or sends of messages: what they took, and what their peers say of it."""

    ns: I64
    seen: Flags
    """Which of them were measured."""
    usual: I64
    """What each should take."""
    times: F64
    """How many times as long as it should a message mostly takes on its hop."""
    against: F64
    """How many times as long as it should each was."""
    repaired: I64
    """What each would take with its hop as its peers are, which have long messages as well."""

    @classmethod
    def of(cls, steps: Sequence[tuple[I64, Flags]]) -> AgainstPeers:
        """Take those of some steps, of which nothing is known yet."""
        ns, seen = (np.concatenate(column) for column in zip(*steps, strict=True))
        one = np.ones(len(ns))
        return cls(
            ns=ns, seen=seen, usual=ns.copy(), times=one, against=one.copy(), repaired=ns.copy()
        )

    def against_others(self, hop: I64, mine: Flags, back: Mapping[int, int]) -> dict[int, float]:
        """Return how many times as long as those of others each hop's messages mostly take."""
        medians = self.medians(hop, mine)
        usual = usual_of_others(medians, back)
        return {here: medians[here] / length for here, length in usual.items()}

    def medians(self, hop: I64, mine: Flags) -> dict[int, float]:
        """Return what the messages of each hop of a class mostly took, where two were seen."""
        rows = np.flatnonzero(mine & self.seen)
        found, counts = np.unique(hop[rows], return_counts=True)
        return {
            here: max(float(np.median(self.ns[rows[hop[rows] == here]])), 1.0)
            for here in found[counts > 1].tolist()
        }

    def against_whole(self, wires: AgainstPeers, hop: I64, mine: Flags) -> dict[int, float]:
        """Return the same of drains that take longer than the whole messages of others.

        What is left of a message takes no longer than all of it.
        """
        whole = wires.medians(hop, mine)
        found = {}
        for here, own in self.medians(hop, mine).items():
            others = sorted(length for there, length in whole.items() if there != here)
            middle = middle_of_others(others, None)
            if middle is not None and own > SLOW * middle:
                found[here] = own / middle
        return found

    def set(self, own: Flags, *told: float | None) -> None:
        """Set what a hop takes against others, by the first that tells; and what is usual."""
        times = next((ratio for ratio in told if ratio is not None), 1.0)
        rows = own & self.seen if (own & self.seen).any() else own
        self.times[own] = times
        self.usual[own] = round(float(np.median(self.ns[rows])) / times)
        self.against[own] = self.ns[own] / np.maximum(self.usual[own], 1)

    def repair(self, hop: I64, mine: Flags) -> None:
        """Set what messages of a class would take on hops as their peers are.

        The longest of a hop takes what the longest of its healthy peers do, and so on down to the
        shortest: a repaired hop has bad moments, too, and no more of them than they. Nor does a
        message take more than its own share: peers that nobody waited for are not seen.
        """
        seen, well = mine & self.seen, self.times <= SLOW
        for here in np.unique(hop[mine]).tolist():
            own = mine & (hop == here)
            self.repaired[own] = np.rint(self.ns[own] / self.times[own])
            peers, rows = self.ns[seen & well & ~own], np.flatnonzero(own & seen)
            if len(peers) and len(rows):
                ranks = np.argsort(np.argsort(self.ns[rows], kind="stable"), kind="stable")
                shares = (ranks + 0.5) / len(rows)
                of_peers = np.rint(np.quantile(peers, shares)).astype(np.int64)
                self.repaired[rows] = np.minimum(self.repaired[rows], of_peers)

    def of_other_way(self, hop: I64, peers: I64, together: Flags) -> Flags:
        """Tell exchanges of slow hops that lasted as long because of their other message."""
        found = np.zeros(len(self.ns), dtype=bool)
        against_usual = self.ns / np.maximum(self.usual, 1)
        slow = self.times > SLOW
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


Key = TypeVar("Key", int, Hop)


def usual_of_others(medians: Mapping[Key, float], back: Mapping[Key, Key]) -> dict[Key, float]:
    """Return what each hop should take by the others.

    Of exchanges, whose way `back` is given, both ways are about as long where each waits for the
    other, whichever it is that is slow: then they count once, and tell nothing of each other.
    """
    alike = {
        hop: {hop, there}
        for hop, own in medians.items()
        if (there := back.get(hop, hop)) in medians and _alike(own, medians[there])
    }
    figures: dict[frozenset[Key], float] = {
        frozenset(hops): sum(medians[each] for each in hops) / len(hops)
        for hop in medians
        for hops in [alike.get(hop, {hop})]
    }
    if len(figures) < 2:
        alike, figures = {}, {frozenset({hop}): own for hop, own in medians.items()}
    in_order = sorted(figures.values())
    found = {
        hop: middle_of_others(in_order, figures[frozenset(alike.get(hop, {hop}))])
        for hop in medians
    }
    return {hop: middle for hop, middle in found.items() if middle is not None}


def _alike(one_way: float, other: float) -> bool:
    return max(one_way, other) < SLOW * min(one_way, other)


def _way_back(hop: int, ranks: int) -> int:
    """Return the number of the hop the other way, of the same replica."""
    replica, own = divmod(hop, ranks**2)
    return replica * ranks**2 + own % ranks * ranks + own // ranks


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


def as_it_came(step: MeasuredStep, expected: ExpectedTimes) -> I64:
    """Return what the receive of each message should have taken once both sides were there."""
    times, messages = step.times, step.program.messages
    late = times.batch_start[messages.received] - times.batch_start[messages.sent]
    wire = expected.wire.usual
    rest = np.maximum(expected.drain.usual, wire - np.maximum(late, 0))
    return np.where(messages.rendezvous, wire, rest)


def _number(*columns: NDArray[Any]) -> I64:
    """Return a number for each message, the same where all columns are."""
    number = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:
        values, own = np.unique(column, return_inverse=True)
        number = number * len(values) + own.reshape(-1)
    return np.unique(number, return_inverse=True)[1].reshape(-1)


def _kind_of_wire(
    message_bytes: I64, hop: I64, names: tuple[int, ...], wires: Mapping[Hop, str] | None
) -> NDArray[np.str_]:
    """Return a name for the size of each message and the kind of wire that it went over."""
    kinds = [(wires or {}).get((here, there), "") for here in names for there in names]
    sizes = message_bytes.astype(np.str_)
    return np.char.add(sizes, np.array(kinds, dtype=np.str_)[hop]) if len(hop) else sizes


# Fewer are no sample.
FEWEST = 4
# A message that has the wire to itself is quicker than most: compute and other hops slow the rest.
# Held against hops timed with nothing else running (45 of the recorded H200 runs), the tenth part
# from the quickest is nearest.
_ALONE = 0.1
# Sizes closer than this share latency and bandwidth in all of them: no line can part the two.
_LEAST_SPAN = 4.0
# Medians of noisy messages are off by less than this from a line that they lie on.
_BENT = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """What a hop's messages take, as a line over their size."""

    latency_ns: float
    bytes_per_s: float
    worst_error: float
    """How far the line is off at the size it fits worst, as a share of what was measured."""

    def time_ns(self, size: float) -> float:
        """Return what a message of some bytes takes."""
        return self.latency_ns + size * NS_PER_S / self.bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Nanoseconds of some messages."""

    median_ns: int
    p95_ns: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HopTimes:
    """One direction between two ranks: the messages of its largest size, and a line over all."""

    figures: HopFigures
    alone_ns: int | None
    """What one message takes with the receiver waiting and the wire to itself."""
    waited: int
    """How many messages found their receiver waiting; fewer than four say little."""
    one_way: Spread | None
    """The receiver waiting."""
    both_ways: Spread | None
    """In an exchange."""
    fit: Fit | None
    """Latency and bandwidth, where messages have several sizes."""
    as_long: bool
    """Its exchanges last about as long as its messages outside of them, or longer."""
    told: bool = True
    """Whether of enough messages it is known when they left."""

    @property
    def hop(self) -> Hop:
        """The rank that sends and the rank that receives."""
        return self.figures.source, self.figures.destination

    @property
    def bytes_per_s(self) -> float | None:
        """Of one message that has the wire to itself."""
        size = self.figures.message_bytes
        return size * 1e9 / self.alone_ns if self.alone_ns and size > 0 else None


def time_hops(timeline: Timeline, hops: tuple[HopFigures, ...]) -> tuple[HopTimes, ...]:
    """Time every hop that was measured."""
    transfers = timeline.transfers
    buffers = bool(transfers.buffered.any())
    rows = rows_by_hop(transfers)
    nothing = np.zeros(0, dtype=np.int64)
    known = known_to_leave(transfers)
    timed = []
    for hop in hops:
        mine = rows.get((hop.source, hop.destination), nothing)
        enough = known[mine].all() or known[mine].sum() >= FEWEST
        kept = mine[known[mine]] if enough else mine
        timed.append(replace(_time(transfers.where(kept), hop, buffers=buffers), told=bool(enough)))
    return tuple(timed)


def _time(rows: Transfers, figures: HopFigures, *, buffers: bool) -> HopTimes:
    """Time the messages of the largest size, and fit a line where there are several sizes."""
    alone = [
        (size, time)
        for size in np.unique(rows.message_bytes[rows.message_bytes >= 0]).tolist()
        if (same := rows.message_bytes == size).sum() >= FEWEST
        and (time := _alone(rows.where(same), buffers=buffers)) is not None
    ]
    largest = rows.where(rows.message_bytes == figures.message_bytes)
    waited, exchange, early, wire = _kinds(largest, buffers=buffers)
    both, one = wire[exchange], wire[~exchange]
    return HopTimes(
        figures=figures,
        alone_ns=_alone(largest, buffers=buffers),
        waited=int((largest.waited & ~early).sum()),
        one_way=_spread(wire[waited]),
        both_ways=_spread(wire[exchange]),
        fit=fit_line([size for size, _ in alone], [time for _, time in alone]),
        as_long=bool(len(both) and len(one) and SLOW * np.median(both) >= np.median(one)),
    )


def _kinds(rows: Transfers, *, buffers: bool) -> tuple[Flags, Flags, Flags, F64]:
    """Tell messages by what they met: waited for, in an exchange, early; and what each took.

    Of a receive that begins while its message travels only the rest is seen, where messages are
    buffered (one early message tells, on any hop): that one counts from its send.
    """
    early = rows.buffered
    one_way: Flags = ~rows.fused & ~early
    wire = np.maximum(rows.receive_end_ns - rows.met_ns, 0).astype(np.float64)
    if buffers:
        whole = (rows.receive_end_ns - rows.send_start_ns).astype(np.float64)
        wire = np.where(one_way & ~rows.waited, whole, wire)
    return one_way, rows.fused, early, wire


def _alone(rows: Transfers, *, buffers: bool) -> int | None:
    """Return what a message takes by itself, from those whose receiver waited.

    Where these are few, tails may be all there is. Exchanges that the receiver came late to bound
    it then: it is no less than what is seen of them, and no more than that with what a buffer can
    have held. It is taken to lie midway. What had been sent before its receive began says nothing
    of the wire.
    """
    one_way, exchange, _, wire = _kinds(rows, buffers=buffers)
    # Where both sides meet it is all one who came first; else the receiver has to have waited.
    waited = one_way & (rows.waited | (not buffers))
    clean = np.concatenate((wire[waited], wire[exchange & rows.waited] / _BOTH_OVER_ONE))
    others = wire[exchange & ~rows.waited]
    if len(clean) >= FEWEST or (len(clean) >= 2 and not len(others)):
        return round(float(np.quantile(clean, _ALONE)))
    if len(clean) < 2 or not len(others):
        return None
    seen = float(np.quantile(others, _ALONE))
    size = max(int(rows.message_bytes.max()), 1)
    few = max(float(np.quantile(clean, _ALONE)), seen)
    if size > BUFFERED_BYTES:  # of a smaller one all may be underway before its receive begins
        few = min(few, seen / (1 - BUFFERED_BYTES / size))
    return round(math.sqrt(seen * few))


def _spread(lengths: F64) -> Spread | None:
    if not len(lengths):
        return None
    median, tail = np.percentile(lengths, (50, 95))
    return Spread(median_ns=round(float(median)), p95_ns=round(float(tail)), count=len(lengths))


def fit_line(sizes: Sequence[float], times_ns: Sequence[float]) -> Fit | None:
    """Fit a line so that all sizes count alike; None where they are too few or too close.

    Errors are relative: by absolute ones the largest message alone would decide, and latency would
    be whatever is left over.
    """
    size, time = np.array(sizes, dtype=np.float64), np.array(times_ns, dtype=np.float64)
    kept = (size >= 0) & (time > 0)
    size, time = size[kept], time[kept]
    if len(np.unique(size)) < 2 or size.max() < _LEAST_SPAN * max(float(size.min()), 1.0):
        return None
    latency, per_byte = _solve(size, time)
    error = _worst(size, time, latency, per_byte)
    if error > _BENT:
        latency, per_byte = _between_pairs(size, time)
        error = _worst(size, time, latency, per_byte)
    if per_byte <= 0:
        return None
    return Fit(latency_ns=latency, bytes_per_s=NS_PER_S / per_byte, worst_error=error)


def _worst(size: F64, time: F64, latency: float, per_byte: float) -> float:
    return float(np.abs((latency + per_byte * size) / time - 1).max())


def _between_pairs(size: F64, time: F64) -> tuple[float, float]:
    """Return latency and time a byte of a ladder that no line fits, by the middle of all pairs.

    A bucket lets small messages pass, a protocol changes with size: some sizes are off, and all
    others should not follow them.
    """
    order = np.argsort(size)
    size, time = size[order], time[order]
    here, there = np.triu_indices(len(size), 1)
    apart = size[there] > size[here]
    slopes = (time[there] - time[here])[apart] / (size[there] - size[here])[apart]
    per_byte = float(np.median(slopes))
    return max(float(time[0] - per_byte * size[0]), 0.0), per_byte


def _solve(size: F64, time: F64) -> tuple[float, float]:
    """Return latency and time a byte, weighted by 1 / time; no latency is below 0."""
    rows = np.stack((1 / time, size / time), axis=1)
    latency, per_byte = np.linalg.lstsq(rows, np.ones(len(time)), rcond=None)[0]
    if latency < 0:
        latency, per_byte = 0.0, float((size / time).sum() / ((size / time) ** 2).sum())
    return float(latency), float(per_byte)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkClass:
    """A kind of wire."""

    name: str
    words: str
    line_bytes_per_s: float
    """What the standard says."""
    bytes_per_s: float
    """What large messages of a healthy one reach."""


GB = 1e9
# Line rates from the standards. What healthy ones reach: NCCL's own model of NVLink (20.0, 20.6 and
# 40.1 GB/s a link); acceptance limits that operators of such machines publish for PCIe and
# InfiniBand; for Ethernet and sockets, nine tenths of the line. In GB/s: the line, what is reached.
CLASSES = {
    name: LinkClass(name=name, words=words, line_bytes_per_s=line * GB, bytes_per_s=reached * GB)
    for name, words, line, reached in (
        ("nvlink3", "NVLink 3, 12 links (A100)", 300, 230),
        ("nvlink4", "NVLink 4, 18 links (H100, H200)", 450, 335),
        ("nvlink4-h800", "NVLink 4, 8 links (H800)", 200, 160),
        ("nvlink5", "NVLink 5, 18 links (B200)", 900, 722),
        ("pcie4", "PCIe 4, 16 lanes", 31, 21),
        ("pcie5", "PCIe 5, 16 lanes", 63, 48),
        ("ib-edr", "InfiniBand EDR, 100 Gb/s", 12.5, 12.0),
        ("ib-hdr", "InfiniBand HDR, 200 Gb/s", 25, 22.5),
        ("ib-ndr", "InfiniBand NDR, 400 Gb/s", 50, 45),
        ("ib-xdr", "InfiniBand XDR, 800 Gb/s", 100, 90),
        ("roce-100", "RoCE, 100 Gb/s", 12.5, 11.2),
        ("roce-200", "RoCE, 200 Gb/s", 25, 22.5),
        ("roce-400", "RoCE, 400 Gb/s", 50, 45),
        ("ethernet-10", "TCP over Ethernet, 10 Gb/s", 1.25, 1.1),
        ("ethernet-25", "TCP over Ethernet, 25 Gb/s", 3.125, 2.8),
        ("ethernet-100", "TCP over Ethernet, 100 Gb/s", 12.5, 5.0),
        ("sockets", "sockets on one machine", 10, 1.0),
    )
}
_NVLINK_OF = {
    "H800": "nvlink4-h800",
    "A100": "nvlink3",
    "H100": "nvlink4",
    "H200": "nvlink4",
    "B200": "nvlink5",
}
_WITHOUT_NVLINK = ("PCIe", "NVL")


def find_class(name: str) -> LinkClass:
    """Return the kind of wire of that name."""
    if name not in CLASSES:
        raise UsageError(f"no kind of wire is called {name!r}", hint=f"one of {', '.join(CLASSES)}")
    return CLASSES[name]


def nvlink_of(device_name: str) -> LinkClass | None:
    """Return the NVLink of a device, where its name tells."""
    if any(word in device_name for word in _WITHOUT_NVLINK):
        return None
    found = next((name for device, name in _NVLINK_OF.items() if device in device_name), None)
    return CLASSES[found] if found else None


def guess_class(here: RankTimeline, there: RankTimeline) -> LinkClass | None:
    """Guess a hop's wire from its devices: two of one host, of a kind that has NVLink.

    A guess names a wire, and says what it could do. It never makes a verdict: how devices are wired
    and what the transport takes is not in a trace.
    """
    if here.device[0] != there.device[0] or may_share((here, there)):
        return None
    if here.device_name != there.device_name or min(here.device[1], there.device[1]) < 0:
        return None
    return nvlink_of(here.device_name)


def wires_between(ranks: Sequence[RankTimeline]) -> dict[Hop, str]:
    """Tell hops inside a host from those between hosts; no others than these are peers."""
    if not all(rank.device[0] for rank in ranks) or len({rank.device[0] for rank in ranks}) < 2:
        return {}
    return {
        (here.rank, there.rank): "inside" if here.device[0] == there.device[0] else "between"
        for here in ranks
        for there in ranks
        if here is not there
    }


_PROGRAM = "./build/sendrecv_perf"
# Enough iterations for a steady mean, after enough to set everything up.
_ITERATIONS = "-n 50 -w 10"
_UNKNOWN_SIZE = "-b 8 -e 64M -f 2"


_DEVICES_A_HOST = 8


def nccl_command(here: RankTimeline, there: RankTimeline, message_bytes: int) -> str:
    """Write the command for two ranks: messages both ways at once, at the job's own size."""
    size = f"-b {message_bytes} -e {message_bytes}" if message_bytes > 0 else _UNKNOWN_SIZE
    out = f"| tee hop_{here.rank}_{there.rank}.txt"
    words = f"{size} {_ITERATIONS} {out}"
    (host, device), (other_host, other_device) = here.device, there.device
    if host != other_host:
        hosts = shlex.quote(f"{host},{other_host}")
        devices = (
            f"-x NCCL_TESTS_DEVICE={device} " if device == other_device and device >= 0 else ""
        )
        return f"mpirun -np 2 -H {hosts} {devices}{_PROGRAM} -g 1 {words}"
    if may_share((here, there)) or min(device, other_device) < 0:
        # Ranks that each see one device do not tell which of the host's it is: on a single host
        # it is mostly that of their number.
        numbers = [
            str(rank) if max(here.rank, there.rank) < _DEVICES_A_HOST else f"DEVICE_OF_RANK_{rank}"
            for rank in (here.rank, there.rank)
        ]
        return f"CUDA_VISIBLE_DEVICES={','.join(numbers)} {_PROGRAM} -g 2 {words}"
    return f"CUDA_VISIBLE_DEVICES={device},{other_device} {_PROGRAM} -g 2 {words}"


# Of a slow hop the messages are slow from this share on, counted from the quickest: tails make no
# slow hop.
NEARLY_ALL = 0.25
# Against what its kind of wire can do, half is slow: tables are of large messages alone.
SLOW_FOR_ITS_CLASS = 2.0


class Verdict(StrEnum):
    """What is said of a hop."""

    HEALTHY = "healthy"
    SLOW = "slow"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """A verdict, and what it rests on."""

    verdict: Verdict
    against: str | None
    """`history`, `peers` or `class`: what told; None where nothing did."""
    times: float | None
    """How many times as long as it should its messages take, by what told."""
    why: str
    dragged: bool = False
    """Only its exchanges are slow, and it is the other direction that makes them so."""

    @property
    def slow(self) -> bool:
        """Whether the hop is slow."""
        return self.verdict == Verdict.SLOW


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """What earlier answers tell of a hop: the time of one message, by size."""

    times_ns: Mapping[int, float]
    fit: Fit | None

    def time_ns(self, size: int) -> float | None:
        """Return what a message of this size took, by the fit where none was of this size."""
        if size in self.times_ns:
            return self.times_ns[size]
        return self.fit.time_ns(size) if self.fit else None


def judge_hops(
    hops: Sequence[HopTimes],
    against: Mapping[Hop, Ratios],
    *,
    classes: Mapping[Hop, LinkClass],
    history: Mapping[Hop, Past],
) -> dict[Hop, Judgement]:
    """Judge each hop of a run."""
    judged = {}
    for times in hops:
        hop, size = times.hop, times.figures.message_bytes
        if not times.told:
            judged[hop] = _unknown("when its messages left was not recorded")
        elif times.figures.count < FEWEST:
            judged[hop] = _unknown("too few messages to tell")
        else:
            ladder = [] if times.alone_ns is None else [(size, float(times.alone_ns))]
            judged[hop] = judge(hop, ladder, _by_peers(times, against), classes, history)
    return judged


def judge(
    hop: Hop,
    ladder: Sequence[tuple[int, float]],
    by_peers: Judgement | None,
    classes: Mapping[Hop, LinkClass],
    history: Mapping[Hop, Past],
) -> Judgement:
    """Judge a hop by its past, by its peers, and by its kind of wire where that is stated.

    What is slow by any of them is slow; what is healthy by one of them and slow by none is healthy.
    `ladder` is what messages take, by size in ascending order.
    """
    past, wire = history.get(hop), classes.get(hop)
    found = [] if by_peers is None else [by_peers]
    times = [time / before for size, time in ladder if past and (before := past.time_ns(size))]
    if times:
        longer = float(np.median(times))
        found.insert(0, judge_ratio(longer, slow=longer > SLOW, against="history"))
    if wire is not None and ladder and ladder[-1][0] > 0:
        size, time = ladder[-1]
        longer = time / (size / wire.bytes_per_s * NS_PER_S)
        found.append(judge_ratio(longer, slow=longer > SLOW_FOR_ITS_CLASS, against="class"))
    slow = [judgement for judgement in found if judgement.slow]
    if slow:
        return max(slow, key=lambda judgement: judgement.times or 0.0)
    if not found and history:
        sized = f" with messages of {show_bytes(ladder[-1][0])}" if ladder else ""
        return _unknown(
            f"the history has nothing of hop {hop[0]} → {hop[1]}{sized}, and there is no --class"
        )
    return found[0] if found else _unknown("no peers, no history and no --class to hold it against")


def _unknown(why: str) -> Judgement:
    return Judgement(verdict=Verdict.UNKNOWN, against=None, times=None, why=why)


def judge_ratio(times: float, *, slow: bool, against: str) -> Judgement:
    """Put a verdict that was made into words."""
    of = {"history": "before", "peers": "its peers", "class": "its kind of wire should"}[against]
    return Judgement(
        verdict=Verdict.SLOW if slow else Verdict.HEALTHY,
        against=against,
        times=times,
        why=f"takes {times:.1f} times as long as {of}",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TestedHop:
    """One direction between two ranks as a test, or a recorder beside a job, measured it."""

    hop: Hop
    size_bytes: int
    """The largest messages."""
    time_s: float
    fit: Fit | None
    judgement: Judgement
    both_ways: bool = False
    """Messages went both ways at once: the figures are those of either."""
    file: str = ""

    @property
    def bytes_per_s(self) -> float:
        """Of one direction."""
        return self.size_bytes / self.time_s


class Ratios(NamedTuple):
    """How many times as long as they should messages of a hop were, as `ExpectedTimes` has it.

    Messages that came before they were asked for count: what is seen of them is no wire, but on a
    slow hop it lasts as many times as long.
    """

    alone: F64
    exchanged: F64
    wire_times: float = 1.0
    """Of most of its wires."""


def against_peers(expected: Sequence[ExpectedTimes], names: Sequence[int]) -> dict[Hop, Ratios]:
    """Return how each message of each hop was against its peers, as far as that is seen."""
    found = {}
    for number in np.unique(np.concatenate([step.hop for step in expected])).tolist():
        alone, exchanged = (
            np.concatenate(
                [step.against[(step.hop == number) & (step.fused == way)] for step in expected]
            )
            for way in (False, True)
        )
        times = np.concatenate([step.wire.times[step.hop == number] for step in expected])
        here, there = divmod(number, len(names))
        found[names[here], names[there]] = Ratios(
            alone[~np.isnan(alone)], exchanged[~np.isnan(exchanged)], float(np.median(times))
        )
    return found


def _by_peers(hop: HopTimes, against: Mapping[Hop, Ratios]) -> Judgement | None:
    """Judge a hop by its peers; an exchange alone does not tell which of its two ways is slow."""
    own, other_way = against.get(hop.hop), against.get(hop.hop[::-1])
    if own is None or len(ratios := np.concatenate(own[:2])) < FEWEST:
        return None
    # Messages outside exchanges tell whether it is the other direction that is slow.
    dragged = (
        other_way is not None
        and _slow(own.exchanged)
        and min(len(own.alone), len(other_way.alone)) >= 2
        and bool(np.median(own.alone) < SLOW < np.median(other_way.alone))
    )
    if dragged:
        ratios = own.alone
    if _slow(ratios):
        times = own.wire_times if own.wire_times > 1 else float(np.median(ratios))
        return judge_ratio(times, slow=True, against="peers")
    judged = judge_ratio(float(np.median(ratios)), slow=False, against="peers")
    # Exchanges that others' hold up as well say nothing against what those outside exchanges say.
    if not dragged and _slow(own.alone) and len(own.alone) >= FEWEST and hop.as_long:
        return judge_ratio(float(np.median(own.alone)), slow=True, against="peers")
    if dragged:
        return replace(judged, dragged=True, why="its exchanges wait for the other direction")
    return judged


def _slow(ratios: F64) -> bool:
    """Nearly all have to be slow; where they are few, all of them."""
    share = NEARLY_ALL if len(ratios) >= FEWEST else 0.0
    return len(ratios) > 0 and bool(np.quantile(ratios, share) > SLOW)
