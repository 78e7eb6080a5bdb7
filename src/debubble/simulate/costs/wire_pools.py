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

from debubble.timeline.model import F64, I64, U8, Flags, Timeline, Transfers

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
_KINDS = {
    "both_ways": (_BOTH,),
    "one_way": (_ONE,),
    "sending": (_SENDING, _SENT),
    "drain": (_DRAIN,),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Messages:
    """Messages of one size as they were measured, those of slow hops left out."""

    kind: U8
    """What was seen of it: an exchange, one way, its sending, or its drain."""
    took_ns: F64
    step: I64

    def of(self, kind: int) -> F64:
        """Return what messages of a kind took."""
        took: F64 = self.took_ns[self.kind == kind]
        return took


def no_messages() -> Messages:
    """Return none."""
    none = np.zeros(0)
    return Messages(kind=none.astype(np.uint8), took_ns=none, step=none.astype(np.int64))


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
    messages: Messages
    slow: Mapping[Hop, SlowHop]
    """Hops that are slow, by places: their messages are not in these pools, unless all are."""
    other: tuple[float, WirePools] | None = None
    """Messages of another size: how many times as large they are, and what they took."""
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
        """Return what messages take that are so many times as large; tails stay as they are.

        Of one size: in proportion. Of two: between them, with the tails of both.
        """
        if scale == 1.0:
            return self
        way, between, drawn = 0.0, 1.0, self
        if self.other is not None:
            size, larger = self.other
            way = min(max((scale - 1) / (size - 1), 0.0), 1.0)
            between = 1 + way * (size - 1)
            drawn = self if way == 0 else larger
            if 0 < way < 1:
                later = larger.step + 1 + int(self.step.max(initial=-1))
                drawn = replace(
                    self,
                    body=np.concatenate((self.body, larger.body)),
                    tail_ns=np.concatenate((self.tail_ns, larger.tail_ns)),
                    step=np.concatenate((self.step, later)),
                )
        grown = {}
        for name in _KINDS:
            typical = getattr(self, name)
            if self.other is not None:
                typical = (1 - way) * typical + way * getattr(self.other[1], name)
            grown[name] = typical * scale / between
        return replace(self, **grown, body=drawn.body, tail_ns=drawn.tail_ns, step=drawn.step)

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
    pools = _fit(_measure(chosen, kept, buffers=buffers), largest, buffers=buffers)
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


def join_pools(pools: WirePools, other: WirePools) -> WirePools:
    """Put the messages of two runs, all of one size, together.

    Hops that are slow in the first stay as slow as they are there; those of the other are its own.
    """
    own, more = pools.messages, other.messages
    later = more.step + 1 + int(own.step.max(initial=-1))
    messages = Messages(
        kind=np.concatenate((own.kind, more.kind)),
        took_ns=np.concatenate((own.took_ns, more.took_ns)),
        step=np.concatenate((own.step, later)),
    )
    joined = _fit(messages, pools.message_bytes, buffers=pools.buffers or other.buffers)
    return replace(joined, slow=pools.slow, batched=pools.batched)


def _measure(transfers: Transfers, kept: Flags, *, buffers: bool) -> Messages:
    """Measure what is seen of each message that is kept."""
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
    parts = [
        (_BOTH, fused, wire),
        (_ONE, waited, wire),
        (_SENDING, early, sending.astype(np.float64)),
        (_DRAIN, early, wire),
        (_SENT, ~fused & ~early, sending.astype(np.float64)),
        (_LATE, ~fused & ~early & ~waited & ~several, (over - begun).astype(np.float64)),
    ]
    rows = [np.flatnonzero(mine & kept) for _, mine, _ in parts]
    every = np.concatenate(rows)
    steps = np.unique(transfers.step[every], return_inverse=True)[1].reshape(-1)
    return Messages(
        kind=np.repeat(np.arange(len(parts), dtype=np.uint8), [len(part) for part in rows]),
        took_ns=np.concatenate(
            [np.maximum(took[part], 0.0) for part, (_, _, took) in zip(rows, parts, strict=True)]
        ),
        step=steps.astype(np.int64),
    )


def _fit(messages: Messages, message_bytes: int, *, buffers: bool) -> WirePools:
    """Tell what is typical, and what is left; say what was not seen."""
    seen = {
        name: _typical(messages.took_ns[np.isin(messages.kind, kinds)])
        for name, kinds in _KINDS.items()
    }
    both, one_way, drain, sending = (
        seen[name] for name in ("both_ways", "one_way", "drain", "sending")
    )
    said = []
    if len(messages.of(_ONE)) < _FEWEST and both is not None:
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
    shapes = np.isin(messages.kind, (_BOTH, _ONE, _SENDING, _LATE))
    typical = np.array([both, one_way, sending or 0.0, 0.0, 0.0, one_way])[messages.kind[shapes]]
    took, step = messages.took_ns[shapes], messages.step[shapes]
    body = took / np.maximum(typical, 1.0)
    held = body >= STALLS_FROM
    body[held] = 1.0
    tail = np.where(held, took - typical, 0.0)
    if not len(body):
        body, tail, step = np.ones(1), np.zeros(1), np.zeros(1, dtype=np.int64)
    return WirePools(
        both_ways=both,
        one_way=one_way,
        drain=one_way if drain is None else drain,
        sending=one_way if sending is None else sending,
        body=body,
        tail_ns=np.maximum(tail, 0.0),
        step=step,
        message_bytes=message_bytes,
        buffers=buffers,
        assumed=tuple(said),
        messages=messages,
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
