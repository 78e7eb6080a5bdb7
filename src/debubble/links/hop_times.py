"""Matched transfers in → what a hop's messages take of themselves, apart from all waiting."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from debubble.costs.wire_pools import BUFFERED_BYTES
from debubble.links.expectation import Hop
from debubble.links.fit import Fit, fit_line
from debubble.timeline.hops import HopFigures
from debubble.timeline.model import F64, Flags, Timeline, Transfers, rows_by_hop

# Fewer are no sample.
FEWEST = 4
# A message that has the wire to itself is quicker than most: compute and other hops slow the rest.
# Held against hops timed with nothing else running (45 of the recorded H200 runs), the tenth part
# from the quickest is nearest.
_ALONE = 0.1
# What a message takes that shares its wire with one the other way; the ratio of the recorded runs.
_BOTH_OVER_ONE = 1.15
# Of a small message all may be underway before its receive begins.
_LEAST_SEEN = 0.25


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
    lengths: tuple[tuple[str, F64], ...]
    """By what messages met: `waited`, `exchange`, `early`; of early ones no wire is seen."""

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
    return tuple(
        _time(
            transfers.where(rows.get((hop.source, hop.destination), nothing)), hop, buffers=buffers
        )
        for hop in hops
    )


def _time(rows: Transfers, figures: HopFigures, *, buffers: bool) -> HopTimes:
    largest = rows.where(rows.message_bytes == figures.message_bytes)
    waited, exchange, early, wire = _kinds(largest, buffers=buffers)
    return HopTimes(
        figures=figures,
        alone_ns=_alone(largest, buffers=buffers),
        waited=int((_waiting(largest) & ~early).sum()),
        one_way=_spread(wire[waited]),
        both_ways=_spread(wire[exchange]),
        fit=_fit(rows, buffers=buffers),
        lengths=(("waited", wire[waited]), ("exchange", wire[exchange]), ("early", wire[early])),
    )


def _kinds(rows: Transfers, *, buffers: bool) -> tuple[Flags, Flags, Flags, F64]:
    """Tell messages by what they met: waited for, in an exchange, early; and what each took.

    Of a receive that begins while its message travels only the rest is seen, where messages are
    buffered (one early message tells, on any hop): that one counts from its send.
    """
    early: Flags = ~rows.fused & (rows.send_end_ns <= rows.receive_start_ns)
    wire = _wire(rows)
    between = ~rows.fused & ~early & ~_waiting(rows)
    if buffers:
        whole = (rows.receive_end_ns - rows.send_start_ns).astype(np.float64)
        wire = np.where(between, whole, wire)
    return ~rows.fused & ~early, rows.fused, early, wire


def _waiting(rows: Transfers) -> Flags:
    waiting: Flags = rows.receive_start_ns <= rows.send_start_ns
    return waiting


def _wire(rows: Transfers) -> F64:
    both_there = np.maximum(rows.send_start_ns, rows.receive_start_ns)
    return np.maximum(rows.receive_end_ns - both_there, 0).astype(np.float64)


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


def _fit(rows: Transfers, *, buffers: bool) -> Fit | None:
    found = [
        (size, alone)
        for size, same in _by_size(rows)
        if len(same) >= FEWEST and (alone := _alone(same, buffers=buffers)) is not None
    ]
    return fit_line([size for size, _ in found], [time for _, time in found])


def _by_size(rows: Transfers) -> Iterator[tuple[int, Transfers]]:
    for size in np.unique(rows.message_bytes[rows.message_bytes >= 0]).tolist():
        yield size, rows.where(rows.message_bytes == size)
