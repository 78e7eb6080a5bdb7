"""Messages of a hop in → what it takes: latency, bandwidth, spread."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from debubble.costs.wire_pools import BUFFERED_BYTES
from debubble.links.expectation import Hop
from debubble.timeline.model import F64, Flags, Timeline, Transfers, rows_by_hop
from debubble.timeline.transfers import HopFigures
from debubble.units import NS_PER_S

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

    @property
    def half_bytes(self) -> float:
        """The size at which half of the time is latency."""
        return self.latency_ns * self.bytes_per_s / NS_PER_S

    def time_ns(self, size: float) -> float:
        """Return what a message of some bytes takes."""
        return self.latency_ns + size * NS_PER_S / self.bytes_per_s


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
