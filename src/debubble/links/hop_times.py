"""Messages of hops in → what each takes, and what its peers say it should.

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

The types come first, then hops timed from a trace, then the line, which the live test fits too.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from debubble.simulate.costs.wire_pools import BUFFERED_BYTES, SLOW
from debubble.simulate.lengths import hop_of
from debubble.simulate.measured import MeasuredStep
from debubble.timeline.model import F64, I64, Flags, Timeline, Transfers, rows_by_hop
from debubble.timeline.transfers import HopFigures
from debubble.units import NS_PER_S

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
    repaired_wire: I64
    """What each would take with its hop as its peers are, which have long messages as well."""
    repaired_drain: I64
    repaired_sending: I64


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
    wanted = len(steps)
    hops = [hop_of(step.program) for step in steps]
    for number, others in enumerate(beside, start=1):
        hops += [hop_of(step.program) + number * len(step.program.ranks) ** 2 for step in others]
        steps = (*steps, *others)
    hop, fused = np.concatenate(hops), np.concatenate([step.fused for step in steps])
    peers = _number(
        np.concatenate([step.transfer_bytes for step in steps]),
        fused,
        np.concatenate([_wire_of(step, wires or {}) for step in steps]),
    )
    wires_took = _Lengths.of([(step.lengths.wire, step.seen.wire) for step in steps])
    drains_took = _Lengths.of([(step.lengths.drain, step.seen.drain) for step in steps])
    sends_took = _Lengths.of([(step.lengths.sending, np.ones_like(step.fused)) for step in steps])
    together = np.concatenate([end_together(step) for step in steps])
    size = len(steps[0].program.ranks) if steps else 0
    for number in range(int(peers.max(initial=-1)) + 1):
        mine = peers == number
        both_ways = np.unique(hop[mine & fused]).tolist()
        back = {here: _way_back(here, size) for here in both_ways}
        by_wire = wires_took.against_others(hop, mine, back)
        by_drain = drains_took.against_others(hop, mine, back)
        by_whole = drains_took.against_whole(wires_took, hop, mine)
        by_drain = {here: max(times, by_whole.get(here, 0.0)) for here, times in by_drain.items()}
        by_send = sends_took.against_others(hop, mine, back)
        for here in np.unique(hop[mine]).tolist():
            own = mine & (hop == here)
            # What no other hop shows tells nothing: then a drain is as slow as a wire.
            wires_took.set(own, by_wire.get(here), by_drain.get(here))
            drains_took.set(own, by_drain.get(here), by_wire.get(here), by_whole.get(here))
            sends_took.set(own, by_send.get(here))
        for took in (wires_took, drains_took, sends_took):
            took.repair(hop, mine)
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
            repaired_wire=wires_took.repaired[rows],
            repaired_drain=drains_took.repaired[rows],
            repaired_sending=sends_took.repaired[rows],
        )
        for step, end in zip(steps[:wanted], ends[:wanted], strict=True)
        for rows in [slice(end - len(step.fused), end)]
    )


class _Lengths(NamedTuple):
    """Wires, drains or sends: what they took, which of them were measured; and what is found."""

    ns: I64
    seen: Flags
    usual: I64
    times: F64
    repaired: I64

    @classmethod
    def of(cls, steps: Sequence[tuple[I64, Flags]]) -> _Lengths:
        ns, seen = (np.concatenate(column) for column in zip(*steps, strict=True))
        return cls(ns, seen, ns.copy(), np.ones(len(ns)), ns.copy())

    def against_others(self, hop: I64, mine: Flags, back: Mapping[int, int]) -> dict[int, float]:
        """Return how many times as long as those of others each hop's messages mostly take."""
        medians = self.medians(hop, mine)
        usual = usual_of_others(medians, back)
        return {here: medians[here] / length for here, length in usual.items()}

    def medians(self, hop: I64, mine: Flags) -> dict[int, float]:
        """Return what the messages of each hop of a class mostly took, as far as it was seen."""
        rows = np.flatnonzero(mine & self.seen)
        return {
            here: max(float(np.median(self.ns[rows[hop[rows] == here]])), 1.0)
            for here in np.unique(hop[rows]).tolist()
        }

    def against_whole(self, wires: _Lengths, hop: I64, mine: Flags) -> dict[int, float]:
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


# Fewer are no sample.
FEWEST = 4
# A message that has the wire to itself is quicker than most: compute and other hops slow the rest.
# Held against hops timed with nothing else running (45 of the recorded H200 runs), the tenth part
# from the quickest is nearest.
_ALONE = 0.1
# Of a small message all may be underway before its receive begins.
_LEAST_SEEN = 0.25
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
    lengths: tuple[tuple[str, int, F64], ...]
    """By what messages met, `waited`, `exchange` or `early`, and their size; of early ones no wire
    is seen."""
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
    buffers = bool((~transfers.fused & (transfers.send_end_ns <= transfers.receive_start_ns)).any())
    rows = rows_by_hop(transfers)
    nothing = np.zeros(0, dtype=np.int64)
    known = _known_to_leave(transfers)
    timed = []
    for hop in hops:
        mine = rows.get((hop.source, hop.destination), nothing)
        enough = known[mine].all() or known[mine].sum() >= FEWEST
        kept = mine[known[mine]] if enough else mine
        timed.append(replace(_time(transfers.where(kept), hop, buffers=buffers), told=bool(enough)))
    return tuple(timed)


def _known_to_leave(transfers: Transfers) -> Flags:
    """Tell messages of which it is known when they left.

    Where a job waits for a send long after, a meter knows only when it was asked for: the send has
    no length. What its rank asks that peer for next stands behind it in one queue, for how long
    nobody knows:

        1 → 2   s          (no end)   warm-up of 1F1B
        1 ⇄ 2     ├─?─────────────┤   not known
        1 ⇄ 2                  ├──┤   known
    """
    endless = transfers.send_end_ns == transfers.send_start_ns
    known: Flags = ~endless
    ends = np.stack((transfers.source, transfers.destination), axis=1)
    for here, there in np.unique(ends[endless], axis=0).tolist():
        sends = (ends == (here, there)).all(axis=1)
        receives = (ends == (there, here)).all(axis=1)
        asked = np.where(sends, transfers.send_start_ns, transfers.receive_start_ns)
        times = np.unique(asked[sends | receives])
        after = np.searchsorted(times, asked[sends & endless], side="right")
        held_up = times[after[after < len(times)]]
        known &= ~((sends | receives) & np.isin(asked, held_up))
    return known


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
    *met_by, every = _kinds(rows, buffers=buffers)
    # Of much smaller ones, as a server's single tokens, the start is most: no wire shows in them.
    alike = rows.message_bytes >= figures.message_bytes // 2
    sizes = np.unique(rows.message_bytes[alike]).tolist()
    return HopTimes(
        figures=figures,
        alone_ns=_alone(largest, buffers=buffers),
        waited=int((_waiting(largest) & ~early).sum()),
        one_way=_spread(wire[waited]),
        both_ways=_spread(wire[exchange]),
        fit=fit_line([size for size, _ in alone], [time for _, time in alone]),
        lengths=tuple(
            (kind, size, every[met & (rows.message_bytes == size)])
            for kind, met in zip(("waited", "exchange", "early"), met_by, strict=True)
            for size in sizes
        ),
    )


def _kinds(rows: Transfers, *, buffers: bool) -> tuple[Flags, Flags, Flags, F64]:
    """Tell messages by what they met: waited for, in an exchange, early; and what each took.

    Of a receive that begins while its message travels only the rest is seen, where messages are
    buffered (one early message tells, on any hop): that one counts from its send.
    """
    early: Flags = ~rows.fused & (rows.send_end_ns <= rows.receive_start_ns)
    one_way: Flags = ~rows.fused & ~early
    both_there = np.maximum(rows.send_start_ns, rows.receive_start_ns)
    wire = np.maximum(rows.receive_end_ns - both_there, 0).astype(np.float64)
    if buffers:
        whole = (rows.receive_end_ns - rows.send_start_ns).astype(np.float64)
        wire = np.where(one_way & ~_waiting(rows), whole, wire)
    return one_way, rows.fused, early, wire


def _waiting(rows: Transfers) -> Flags:
    waiting: Flags = rows.receive_start_ns <= rows.send_start_ns
    return waiting


def _alone(rows: Transfers, *, buffers: bool) -> int | None:
    """Return what a message takes by itself, from those whose receiver waited.

    Where these are few, tails may be all there is. Exchanges that the receiver came late to bound
    it then: it is no less than what is seen of them, and no more than that with what a buffer can
    have held. It is taken to lie midway. What had been sent before its receive began says nothing
    of the wire.
    """
    one_way, exchange, _, wire = _kinds(rows, buffers=buffers)
    # Where both sides meet it is all one who came first; else the receiver has to have waited.
    waited = one_way & (_waiting(rows) | (not buffers))
    clean = np.concatenate((wire[waited], wire[exchange & _waiting(rows)] / _BOTH_OVER_ONE))
    others = wire[exchange & ~_waiting(rows)]
    if len(clean) >= FEWEST or (len(clean) >= 2 and not len(others)):
        return round(float(np.quantile(clean, _ALONE)))
    if len(clean) < 2 or not len(others):
        return None
    seen = float(np.quantile(others, _ALONE))
    size = max(int(rows.message_bytes.max()), 1)
    most = seen / max(1 - BUFFERED_BYTES / size, _LEAST_SEEN)
    few = min(max(float(np.quantile(clean, _ALONE)), seen), most)
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
