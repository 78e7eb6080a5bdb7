"""Matched transfers in → what messages took: typical times, what differs from them, and tails.

Medians miss real runs by a tenth, for tails are the point. A message is measured by what it met:

    send         [send]          the receiver waited: from the send's start on it is `one_way`
    receive   [recv···]
    send      [send]             it was there already: what the receive lasts is its `drain`,
    receive          [recv]      what the send lasted `sending`
    0 to 1    [exchange]         an exchange, from when both were there: `both_ways`
    1 to 0       [exch.]

    0 to 1    [send·········]    a stall, from twice its time on: all beyond its time is a tail

Where none is ever buffered a sender waits, and all count from when both were there. Each is held
against what is typical of its kind. Those of one step are drawn together: steps differ in how often
the wire stalls. What is drawn, and why: docs/explanation/how-predictions-are-made.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from debubble.timeline.model import F64, I64, Flags, Timeline, Transfers

# Fewer are no sample.
_FEWEST = 4
# A hop is slow from so many times what it should take. Healthy hops of the recorded runs differ by
# up to 1.4, and so do two runs of one hop.
SLOW = 1.5
# Of a message over a slow hop, so much is underway before it is received: what four recorded runs
# lack of a message that was waited for, 1.8 to 2.2 MiB in exchanges and alone, 3.1 in one.
BUFFERED_BYTES = 2.1 * 1024**2
# From so many times what is typical on, a message was held up: what it takes more is a tail, which
# has nothing to do with its size.
STALLS_FROM = 2.0

Hop = tuple[int, int]
"""Places of the rank that sends and of the rank that receives."""
_BOTH, _ONE, _SENDING, _DRAIN, _SENT, _LATE = range(6)
"""What is seen of a message: an exchange, one way, its sending, its drain; or where a part of it
was a wait, what is left of its sending, of all of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WirePools:
    """Nanoseconds of messages of one size."""

    both_ways: float
    """What is typical."""
    one_way: float
    """From the send's start to the receive's end, the receiver waiting."""
    drain: float
    """Of the receive, the message being there."""
    sending: float
    """Of the send alone, buffered."""
    body: F64
    """Of each measured message: how many times what is typical; 1 of one that was held up."""
    tail_ns: F64
    """And what it took beyond that."""
    step: I64
    """And its step, counted from 0."""
    message_bytes: int
    """Below 0 where not known."""
    buffers: bool
    """A send may end before its receive begins."""
    assumed: tuple[str, ...]
    """What the run does not show, in words."""
    slow: Mapping[Hop, SlowHop]
    """Hops that are slow, by places: their messages are not in these pools, unless all are."""
    batched: bool = False
    """Some kernel carried several messages."""

    @property
    def mean_body(self) -> float:
        """What a message takes on the mean, against what is typical, a tail left out."""
        return float(self.body.mean())

    @property
    def stalls_ns(self) -> F64:
        """What messages that were held up took beyond their time."""
        held: F64 = self.tail_ns[self.tail_ns > 0]
        return held

    def of_size(self, scale: float) -> WirePools:
        """Return what messages take that are so many times as large; tails stay as they are."""
        return replace(
            self,
            both_ways=self.both_ways * scale,
            one_way=self.one_way * scale,
            drain=self.drain * scale,
            sending=self.sending * scale,
        )

    def draw(self, random: np.random.Generator, rows: int, runs: int) -> tuple[F64, F64]:
        """Draw body and tail of so many messages, in each of many runs from one measured step."""
        order = np.argsort(self.step, kind="stable")
        _, first, count = np.unique(self.step[order], return_index=True, return_counts=True)
        if len(first) == 0 or count.min() < _FEWEST:
            first, count = np.zeros(1, dtype=np.int64), np.array([len(self.step)])
        steps = random.integers(len(first), size=runs)
        picked = order[first[steps] + (random.random((rows, runs)) * count[steps]).astype(np.int64)]
        return self.body[picked], self.tail_ns[picked]


class Slower(NamedTuple):
    """How many times as long as those of its peers the messages of a hop take."""

    wire: float
    drain: float
    sending: float
    """Of buffered messages a send may be quick where the wire is slow."""


class SlowHop(NamedTuple):
    """A hop that is slow."""

    times: float
    """By most of its messages."""
    alone: Slower
    exchanged: Slower


def pool_wires(
    timeline: Timeline, pipeline: int, slow: Mapping[Hop, SlowHop] | None = None
) -> WirePools:
    """Gather the messages between ranks of a pipeline but those of `slow` hops, by ranks.

    Of the other way of a slow hop, exchanges that are as long tell nothing: each may wait for the
    other. Where all hops are slow, their messages tell what they should take.
    """
    ranks, slow = timeline.ranks_of(pipeline), slow or {}
    places = {rank.rank: rank.position for rank in ranks}
    transfers = timeline.transfers
    mine = np.isin(transfers.source, list(places)) & np.isin(transfers.destination, list(places))
    largest = int(transfers.message_bytes[mine].max(initial=-1))
    chosen = transfers.where(mine & (transfers.message_bytes == largest))
    batched = _with_others(chosen)[0].any() or chosen.fused.any()
    of_hop = {hop: _of_hop(chosen, hop) for hop in slow}
    kept = np.ones(len(chosen), dtype=bool)
    for hop, own in of_hop.items():
        kept &= ~own & ~_dragged(chosen, own, _of_hop(chosen, hop[::-1]))
    none_well = len(slow) > 0 and not kept.any()
    kept |= none_well
    buffers = bool((chosen.buffered & kept).any())
    pools = _fit(chosen, kept, largest, buffers=buffers)
    if none_well:
        pools = pools.of_size(1 / float(np.median([hop.times for hop in slow.values()])))
    by_place = {
        (places[here], places[there]): slow[here, there]
        for (here, there), own in of_hop.items()
        if own.any()
    }
    return replace(pools, slow=by_place, batched=bool(batched))


def _of_hop(transfers: Transfers, hop: Hop) -> Flags:
    mine: Flags = (transfers.source == hop[0]) & (transfers.destination == hop[1])
    return mine


def _dragged(transfers: Transfers, slow: Flags, back: Flags) -> Flags:
    """Tell the exchanges of the way back, where they are about as long as those of a slow hop."""
    wire, both = _wire(transfers), transfers.fused
    if not (slow & both).any() or not (back & both).any():
        return back & both
    alike = np.median(wire[slow & both]) < SLOW * np.median(wire[back & both])
    return back & both & bool(alike)


def _fit(transfers: Transfers, kept: Flags, message_bytes: int, *, buffers: bool) -> WirePools:
    """Tell what is typical of the messages that are kept, and what is left; say what was unseen."""
    wire, fused, early = _wire(transfers), transfers.fused, transfers.buffered
    sent, over = transfers.send_start_ns, transfers.receive_end_ns
    both_there = transfers.met_ns
    # Where none is ever buffered a sender waits for its receiver, and all of a message is seen from
    # when both are there. Else, of a receive that begins while its message travels, only the rest.
    leaves = np.where(fused | (not buffers), both_there, sent)
    # A kernel that meets several others lets nothing leave before all are there.
    several, all_there = _with_others(transfers)
    leaves = np.where(several, all_there, leaves)
    waited = ~fused & (leaves >= transfers.receive_start_ns)
    if not ((waited | fused) & kept).any():
        waited = ~fused & ~early
        wire = np.where(waited, (over - sent).astype(np.float64), wire)
    sending = np.minimum(transfers.send_end_ns, over) - leaves
    # A send whose receiver comes much later than a message takes was kept waiting for it.
    usual = np.median(wire[(waited | fused) & kept]) if ((waited | fused) & kept).any() else np.inf
    begun = np.where(both_there - sent > STALLS_FROM * usual, both_there, sent)
    parts = {
        _BOTH: (fused, wire),
        _ONE: (waited, wire),
        _SENDING: (early, sending),
        _DRAIN: (early, wire),
        _SENT: (~fused & ~early, sending),
        _LATE: (~fused & ~early & ~waited & ~several, over - begun),
    }
    took = {
        kind: np.maximum(lasted[chosen & kept], 0).astype(np.float64)
        for kind, (chosen, lasted) in parts.items()
    }
    both, one_way, drain = (_typical(took[kind]) for kind in (_BOTH, _ONE, _DRAIN))
    sending_ns = _typical(np.concatenate((took[_SENDING], took[_SENT])))
    said = []
    if len(took[_ONE]) < _FEWEST and both is not None:
        said.append("a one-way transfer takes as long as a two-way exchange")
        one_way = both
    if one_way is None and drain is not None:
        said.append("a one-way transfer takes the receive time of a message that has arrived")
        one_way = drain
    if one_way is None:
        said, one_way = ["transfers take no time: none was measured"], 0.0
    if both is None:
        said += ["a two-way exchange takes as long as a one-way transfer"] if one_way else []
        both = one_way
    # Each message once: a stall that the receiver came too late to see is one, too.
    shapes = {_BOTH: both, _ONE: one_way, _SENDING: sending_ns or 0.0, _LATE: one_way}
    step = np.concatenate([transfers.step[parts[kind][0] & kept] for kind in shapes])
    step = np.unique(step, return_inverse=True)[1].reshape(-1).astype(np.int64)
    every = np.concatenate([took[kind] for kind in shapes])
    typical = np.repeat(list(shapes.values()), [len(took[kind]) for kind in shapes])
    body = every / np.maximum(typical, 1.0)
    held = body >= STALLS_FROM
    body[held] = 1.0
    tail = np.where(held, every - typical, 0.0)
    if not len(body):
        body, tail, step = np.ones(1), np.zeros(1), np.zeros(1, dtype=np.int64)
    return WirePools(
        both_ways=both,
        one_way=one_way,
        drain=one_way if drain is None else drain,
        sending=one_way if sending_ns is None else sending_ns,
        body=body,
        tail_ns=np.maximum(tail, 0.0),
        step=step,
        message_bytes=message_bytes,
        buffers=buffers,
        assumed=tuple(said),
        slow={},
    )


def _typical(took_ns: F64) -> float | None:
    return float(np.median(took_ns)) if len(took_ns) else None


def _wire(transfers: Transfers) -> F64:
    """Return from when both sides were there, and all that their kernels wait for, to the end."""
    several, all_there = _with_others(transfers)
    ends = np.where(
        several,
        np.minimum(transfers.send_end_ns, transfers.receive_end_ns) - all_there,
        transfers.receive_end_ns - transfers.met_ns,
    )
    return np.maximum(ends, 0).astype(np.float64)


def _with_others(transfers: Transfers) -> tuple[Flags, I64]:
    """Tell messages whose kernel, on either side, waits for a third rank; and when all were there.

    Megatron puts all that goes and comes into one batch, which ends with the last of it.
    """
    sides: I64 = np.stack(
        (
            np.concatenate((transfers.source, transfers.destination)),
            np.concatenate((transfers.send_queue, transfers.receive_queue)),
            np.concatenate((transfers.send_start_ns, transfers.receive_start_ns)),
        )
    ).astype(np.int64)
    kernel = _number_alike(sides)
    peers = np.concatenate((transfers.destination, transfers.source))
    kernels = int(kernel.max(initial=-1)) + 1
    # A kernel that meets two ranks has one above its least.
    least, most = np.full(kernels, np.iinfo(np.int64).max), np.full(kernels, -1)
    np.minimum.at(least, kernel, peers)
    np.maximum.at(most, kernel, peers)
    ready = np.full(kernels, np.iinfo(np.int64).min)
    np.maximum.at(ready, kernel, np.tile(transfers.met_ns, 2))
    sent, taken = kernel.reshape(2, -1)
    meets_two = most > least
    several: Flags = meets_two[sent] | meets_two[taken]
    return several, np.maximum(ready[sent], ready[taken])


def _number_alike(columns: I64) -> I64:
    """Return a number for each column of rows: the same for those that are the same."""
    order = np.lexsort(columns)
    ordered = columns[:, order]
    number = np.empty(len(order), dtype=np.int64)
    differs = (ordered[:, 1:] != ordered[:, :-1]).any(axis=0)
    number[order] = np.append(0, np.cumsum(differs))[: len(order)]
    return number
