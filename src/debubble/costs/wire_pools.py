"""Matched transfers in → what messages took, kept as they were seen: their tail is the point.

Medians miss real runs by a tenth. So messages are drawn from those measured, by what they met:

    send         [send]          the receiver waited: from the send's start on it is `one_way`
    receive   [recv···]
    send      [send]             it was there already: what the receive lasts is its `drain`
    receive          [recv]      (and what the send lasted, `sending`)
    0 to 1    [exchange]         an exchange, from when both were there: `both_ways`
    1 to 0       [exch.]

What is drawn, and why: docs/explanation/how-predictions-are-made.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from debubble.timeline.model import F64, I64, Flags, Timeline, Transfers

# Both ways at once against one way, where a run shows only one of them.
_BOTH_OVER_ONE = 1.15
# Taking in what is there already, against the wire.
DRAIN_OVER_WIRE = 0.5
# Fewer are no sample.
_FEWEST = 4
# A hop that takes so many times as long as the others is slow; tails alone do not make it so.
_SLOW = 2.0
# From this share of a hop's messages on, counted from the quickest.
_NEARLY_ALL = 0.25
# Of a message to a slow hop's end, so much is underway before it is received: measured.
BUFFERED_BYTES = 2.5 * 1024**2
# Small messages are buffered whole; some of their time is seen all the same.
_LEAST_SEEN = 0.25
# Steps from the quickest to the slowest message, where two samples are laid over each other.
_STEPS = 101

Hop = tuple[int, int]
"""Places of the rank that sends and of the rank that receives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WirePools:
    """Nanoseconds of messages of one size."""

    both_ways: F64
    one_way: F64
    """From the send's start to the receive's end, the receiver waiting."""
    drain: F64
    """Of the receive, the message being there."""
    sending: F64
    """Of the send alone, buffered."""
    message_bytes: int
    """Below 0 where not known."""
    buffers: bool
    """A send may end before its receive begins."""
    assumed: tuple[str, ...]
    """What the run does not show, in words."""
    seen: Mapping[str, F64]
    """The four of them as far as they were measured."""
    slow: Mapping[Hop, float]
    """Of hops slower than all others, how many times as long messages take; not in the pools."""
    other: tuple[float, WirePools] | None = None
    """Messages of another size: how many times as large they are, and what they took."""
    batched: bool = False
    """Some kernel carried several messages."""

    def of_size(self, scale: float) -> WirePools:
        """Return what messages take that are so many times as large.

        Of one size: in proportion. Of two: between them, each share of the messages lies between
        what it took with either, for tails do not grow as messages do; beyond, in proportion.
        """
        if scale == 1.0:
            return self
        pools = {name: getattr(self, name) for name in _POOLS}
        if self.other is not None:
            size, larger = self.other
            way = min(max((scale - 1) / (size - 1), 0.0), 1.0)
            scale /= 1 + way * (size - 1)
            at = np.linspace(0.0, 1.0, _STEPS)
            pools = {
                name: (1 - way) * np.quantile(pool, at)
                + way * np.quantile(getattr(larger, name), at)
                for name, pool in pools.items()
            }
        return replace(self, **{name: pool * scale for name, pool in pools.items()})


_POOLS = ("both_ways", "one_way", "drain", "sending")


def pool_wires(timeline: Timeline, pipeline: int) -> WirePools:
    """Gather the messages between ranks of a pipeline; slow hops are kept apart."""
    places = {rank.rank: rank.position for rank in timeline.ranks_of(pipeline)}
    transfers = timeline.transfers
    mine = np.isin(transfers.source, list(places)) & np.isin(transfers.destination, list(places))
    largest = int(transfers.message_bytes[mine].max(initial=-1))
    chosen = transfers.where(mine & (transfers.message_bytes == largest))
    batched = _with_others(chosen)[0].any() or chosen.fused.any()
    slow = _slow_hops(chosen)
    for sender, receiver in slow:
        chosen = chosen.where((chosen.source != sender) | (chosen.destination != receiver))
    by_place = {(places[here], places[there]): times for (here, there), times in slow.items()}
    return replace(_pool(chosen, largest), slow=by_place, batched=bool(batched))


def join_pools(pools: WirePools, other: WirePools) -> WirePools:
    """Put the messages of two runs, all of one size, together."""
    joined = _complete(
        {name: np.concatenate((pools.seen[name], other.seen[name])) for name in _POOLS},
        pools.message_bytes,
        buffers=pools.buffers or other.buffers,
    )
    return replace(joined, slow=pools.slow)


def _slow_hops(transfers: Transfers) -> dict[Hop, float]:
    """Return hops, by ranks, nearly all of whose messages take much longer than those of others.

    With each, how many times as long as others its whole messages take. Of one that was there
    before it was asked for, what had been buffered is not seen.
    """
    wire, early = _wire(transfers), _early(transfers)
    size = max(int(transfers.message_bytes.max(initial=1)), 1)
    whole = np.where(early, wire / max(1 - BUFFERED_BYTES / size, _LEAST_SEEN), wire)
    slow = {}
    hops = sorted(set(zip(transfers.source.tolist(), transfers.destination.tolist(), strict=True)))
    for sender, receiver in hops:
        mine = (transfers.source == sender) & (transfers.destination == receiver)
        slower = []
        # What was there before it was asked for, what was waited for, and exchanges: each apart.
        for alike in (early, ~early & ~transfers.fused, transfers.fused):
            own, others = wire[mine & alike], wire[~mine & alike]
            if min(len(own), len(others)) >= _FEWEST:
                usual = max(float(np.median(others)), 1.0)
                slower.append(np.quantile(own, _NEARLY_ALL) > _SLOW * usual)
        if slower and all(slower):
            others = wire[~mine & ~early] if (~mine & ~early).any() else wire[~mine]
            times = np.median(whole[mine]) / max(float(np.median(others)), 1.0)
            slow[sender, receiver] = float(times)
    return slow


def _pool(transfers: Transfers, message_bytes: int) -> WirePools:
    wire, fused = _wire(transfers), transfers.fused
    early = _early(transfers)
    # Of a receive that begins while its message travels only the rest is seen: it tells no wire.
    waited = ~fused & (transfers.receive_start_ns <= transfers.send_start_ns)
    if not (waited | fused).any():
        waited = ~fused & ~early
        whole = (transfers.receive_end_ns - transfers.send_start_ns).astype(np.float64)
        wire = np.where(waited, whole, wire)
    sending = np.minimum(transfers.send_end_ns, transfers.receive_end_ns) - transfers.send_start_ns
    seen = {
        "both_ways": wire[fused],
        "one_way": wire[waited],
        "drain": wire[early],
        "sending": np.maximum(sending[~fused].astype(np.float64), 0),
    }
    return _complete(seen, message_bytes, buffers=bool(early.any()))


def _complete(seen: Mapping[str, F64], message_bytes: int, *, buffers: bool) -> WirePools:
    """Put something in place of what was not seen, and say so."""
    both, one_way, drain = seen["both_ways"], seen["one_way"], seen["drain"]
    said = []
    if len(one_way) < _FEWEST:
        said.append("one way takes what both ways at once take, over 1.15")
        one_way = both / _BOTH_OVER_ONE if len(both) else one_way
    if len(one_way) == 0:
        said = ["transfers take no time: none was seen"]
        one_way = np.zeros(1)
    if len(both) == 0:
        said.append("both ways at once take 1.15 times one way")
        both = one_way * _BOTH_OVER_ONE
    if len(drain) == 0:
        drain = one_way * DRAIN_OVER_WIRE
    return WirePools(
        both_ways=both,
        one_way=one_way,
        drain=drain,
        sending=seen["sending"] if len(seen["sending"]) else one_way,
        message_bytes=message_bytes,
        buffers=buffers,
        assumed=tuple(said),
        seen=seen,
        slow={},
    )


def _early(transfers: Transfers) -> Flags:
    """Tell messages that had been sent before their receive began."""
    early: Flags = ~transfers.fused & (transfers.send_end_ns <= transfers.receive_start_ns)
    return early


def _wire(transfers: Transfers) -> F64:
    """Return from when both sides were there, and all that their kernels wait for, to the end."""
    both_there = np.maximum(transfers.send_start_ns, transfers.receive_start_ns)
    several, all_there = _with_others(transfers)
    ends = np.where(
        several,
        np.minimum(transfers.send_end_ns, transfers.receive_end_ns) - all_there,
        transfers.receive_end_ns - both_there,
    )
    return np.maximum(ends, 0).astype(np.float64)


def _with_others(transfers: Transfers) -> tuple[Flags, I64]:
    """Tell messages whose kernel, on either side, waits for a third rank; and when all were there.

    Megatron puts all that goes and comes into one batch, which ends with the last of it.
    """
    sides = [
        list(zip(*(column.tolist() for column in columns), strict=True))
        for columns in (
            (transfers.source, transfers.send_queue, transfers.send_start_ns),
            (transfers.destination, transfers.receive_queue, transfers.receive_start_ns),
        )
    ]
    peers = (transfers.destination.tolist(), transfers.source.tolist())
    met = np.maximum(transfers.send_start_ns, transfers.receive_start_ns).tolist()
    partners: dict[tuple[int, int, int], set[int]] = {}
    ready: dict[tuple[int, int, int], int] = {}
    for side, others in zip(sides, peers, strict=True):
        for kernel, other, moment in zip(side, others, met, strict=True):
            partners.setdefault(kernel, set()).add(other)
            ready[kernel] = max(moment, ready.get(kernel, moment))
    pairs = list(zip(*sides, strict=True))
    several = [len(partners[sent]) > 1 or len(partners[taken]) > 1 for sent, taken in pairs]
    there = [max(ready[sent], ready[taken]) for sent, taken in pairs]
    return np.array(several, dtype=bool), np.array(there, dtype=np.int64)
