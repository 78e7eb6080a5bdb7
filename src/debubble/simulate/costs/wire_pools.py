"""Matched transfers in → what messages took: typical times, tails, and what others add.

Medians miss real runs by a tenth, for tails are the point. A message is measured by what it met:

    send         [send]          the receiver waited: from the send's start on it is `one_way`
    receive   [recv···]
    send      [send]             it was there already: what the receive lasts is its `drain`,
    receive          [recv]      what the send lasted `sending`
    0 to 1    [exchange]         an exchange, from when both were there: `both_ways`
    1 to 0       [exch.]

    1 to 2    [send]             others on their way make it longer: by `contention` each
    2 to 3      [send··]
    0 to 1      [send·········]  a stall, from twice its time on: all beyond its time is a tail

Where none is ever buffered a sender waits, and all count from when both were there. Each is held
against what is typical of its kind. Those of one step are drawn together: steps differ in how often
the wire stalls. What is drawn, and why: docs/explanation/how-predictions-are-made.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from debubble.simulate.costs.passes import time_under
from debubble.timeline.model import F64, I64, U8, Flags, Timeline, Transfers, surely_share

# Both ways at once against one way, where a run shows only one of them.
BOTH_OVER_ONE = 1.15
# Taking in what is there already, and handing over what is to be sent, against the wire.
DRAIN_OVER_WIRE, SENDING_OVER_WIRE = 0.5, 0.65
# Fewer are no sample.
_FEWEST = 4
# Of a message over a slow hop, so much is underway before it is received: what four recorded runs
# lack of a message that was waited for, 1.8 to 2.2 MiB in exchanges and alone, 3.1 in one.
BUFFERED_BYTES = 2.1 * 1024**2
# A hop is slow from so many times what it should take. Healthy hops of the recorded runs differ by
# up to 1.4, and so do two runs of one hop.
SLOW = 1.5
# From so many times what is typical on, a message was held up: what it takes more is a tail, which
# has nothing to do with its size.
STALLS_FROM = 2.0
# From launch to launch of one program there are more stalls or fewer by this share: recorded runs.
_LAUNCHES = 0.5
# On parts of one device, over a host's loopback, every twelfth message stalls that is alone on its
# way, and CROWDED times as many of those that meet another, as in an exchange: recorded runs.
# Between programs that differs less than between launches of one. Their tenths 1, 3, 5, 7 and 9.
_STALLED, CROWDED, _PROGRAMS = 0.085, 1.5, 0.3
_STALLS_NS = (2.4e6, 3.2e6, 4.4e6, 6.0e6, 7.8e6)
# Stalls come together: three tell as much as two would that have nothing to do with each other.
_TOGETHER = 1.5
# Another message on its way adds so much to the logarithm of a time. Recorded runs whose ranks
# share a host's loopback agree within the spread; of others nothing is known beforehand.
ON_ONE_HOST, _SHARED_SPREAD = 0.36, 0.06
_APART, _APART_SPREAD = 0.0, 0.15
_MOST_CONTENTION = 0.6
# A message of half the size takes 0.55 to 0.65 of the time, its drain and its send half of it.
_WIRE_GROWS, _ENDS_GROW = 0.75, 1.0

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
    others: F64
    """Messages of others on their way meanwhile, on the mean."""
    step: I64

    def of(self, kind: int) -> F64:
        """Return what messages of a kind took."""
        took: F64 = self.took_ns[self.kind == kind]
        return took


def no_messages() -> Messages:
    """Return none."""
    none = np.zeros(0)
    return Messages(
        kind=none.astype(np.uint8), took_ns=none, others=none, step=none.astype(np.int64)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class WirePools:
    """Nanoseconds of messages of one size."""

    both_ways: float
    """What is typical, with no other on the way."""
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
    crowd: F64
    """And how many times as likely it was to stall as one that is alone on its way."""
    contention: float
    """What each other message on its way adds, of the logarithm of the time."""
    message_bytes: int
    """Below 0 where not known."""
    buffers: bool
    """A send may end before its receive begins."""
    assumed: tuple[str, ...]
    """What the run does not show, in words."""
    messages: Messages
    slow: Mapping[Hop, SlowHop]
    """Hops that are slow, by places: what their messages took is not in these pools."""
    shared: bool = False
    """All ranks are on one device."""
    other: tuple[float, WirePools] | None = None
    """Messages of another size: how many times as large they are, and what they took."""
    batched: bool = False
    """Some kernel carried several messages."""

    @property
    def mean_body(self) -> float:
        """What a message takes on the mean, against what is typical, a tail left out."""
        return float(self.body.mean())

    @property
    def mean_tail_ns(self) -> float:
        """What tails add on the mean, in another launch, to messages that meet others."""
        stalls = self._stalls_ns
        return self.crowded_again * float(stalls.mean()) if len(stalls) else 0.0

    @property
    def stalled(self) -> float:
        """The share of messages that stalled."""
        return float((self.tail_ns > 0).mean())

    @property
    def tells_crowds(self) -> bool:
        """Whether it is known how often messages stall that meet others, and those that do not."""
        return self.shared and len(self.messages.kind) > 0

    @property
    def crowded_again(self) -> float:
        """The share of messages that will stall in another launch, of those that meet others.

        Launches differ so much that the share in one says little of the next: most of what is
        expected is what such runs have, where that is known.
        """
        if not self.tells_crowds:
            return self.stalled
        differ = _PROGRAMS**2 + _LAUNCHES**2
        count, of = (self.tail_ns > 0).sum() / _TOGETHER, self.crowd.sum() / _TOGETHER
        here = (count + 1 / differ) / (of + 1 / differ / _STALLED)
        return float(CROWDED * _STALLED * (here / _STALLED) ** (_PROGRAMS**2 / differ))

    @property
    def stalled_again(self) -> float:
        """The share of messages that will stall in another launch of the same."""
        if not self.tells_crowds:
            return self.stalled
        return self.crowded_again * float(self.crowd.mean()) / CROWDED

    @property
    def _stalls_ns(self) -> F64:
        """What stalls take: the run's own and, where it has few, those of such runs."""
        own: F64 = self.tail_ns[self.tail_ns > 0]
        few = self.shared and len(self.messages.kind) and len(own) < _FEWEST
        return np.concatenate((own, _STALLS_NS)) if few else own

    def of_size(self, scale: float) -> WirePools:
        """Return what messages take that are so many times as large; tails stay as they are.

        Of one size: a little less than in proportion. Of two: between them, with the tails of both.
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
                    crowd=np.concatenate((self.crowd, larger.crowd)),
                )
        grown = {}
        for name, power in _GROWS.items():
            typical = getattr(self, name)
            if self.other is not None:
                typical = (1 - way) * typical + way * getattr(self.other[1], name)
            grown[name] = typical * (scale / between) ** power
        own = {name: getattr(drawn, name) for name in ("body", "tail_ns", "step", "crowd")}
        slow = {
            hop: replace(
                own,
                wires=own.wires.of_size(scale),
                sends_both_ways=own.sends_both_ways * scale**_WIRE_GROWS,
                sends_ns=own.sends_ns * scale**_ENDS_GROW,
                buffered_ns=own.buffered_ns * scale**_ENDS_GROW,
            )
            for hop, own in self.slow.items()
        }
        return replace(self, **grown, **own, slow=slow)

    def draw(
        self, random: np.random.Generator, rows: int, runs: int, *, same_launch: bool = False
    ) -> tuple[F64, F64, F64]:
        """Draw body and tail of so many messages, in each of many runs from one measured step.

        Another launch has more stalls than the measured one, or fewer; where it is known how much
        that does, each as if it met others. Return also how often messages of each run's launch
        stall, against what is expected.
        """
        order = np.argsort(self.step, kind="stable")
        _, first, count = np.unique(self.step[order], return_index=True, return_counts=True)
        if len(first) == 0 or count.min() < _FEWEST:
            first, count = np.zeros(1, dtype=np.int64), np.array([len(self.step)])
        steps = random.integers(len(first), size=runs)
        picked = order[first[steps] + (random.random((rows, runs)) * count[steps]).astype(np.int64)]
        body, tail = self.body[picked], self.tail_ns[picked]
        stalls = self._stalls_ns
        if same_launch or not len(stalls):
            return body, tail, np.ones(runs)
        seen = (tail > 0).mean(axis=0)
        launch = random.gamma(_LAUNCHES**-2, _LAUNCHES**2, runs)
        often = launch * (self.crowded_again if self.shared else seen)
        stays, comes = often / np.maximum(seen, 1e-9), (often - seen) / np.maximum(1 - seen, 1e-9)
        stalled = random.random(tail.shape) < np.where(tail > 0, stays, comes)
        others = random.choice(stalls, size=tail.shape)
        return body, np.where(stalled, np.where(tail > 0, tail, others), 0.0), launch


_GROWS = {
    "both_ways": _WIRE_GROWS,
    "one_way": _WIRE_GROWS,
    "drain": _ENDS_GROW,
    "sending": _ENDS_GROW,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowHop:
    """A hop that was judged slow, as its own messages show it."""

    times: float
    """How many times as long as those of its peers its messages take."""
    wires: WirePools
    """Of its own messages alone; what they do not show, as many times as long as its peers'."""
    sends_both_ways: float
    """In an exchange, how long its sender is kept from when both are there."""
    sends_ns: F64
    """What each other send took that somebody received before it was over."""
    buffered_ns: F64
    """And those that were over before anybody received."""


def pool_wires(
    timeline: Timeline, pipeline: int, slow: Mapping[Hop, float] | None = None
) -> WirePools:
    """Gather the messages between ranks of a pipeline; those of slow hops, by ranks, each apart.

    `slow` tells how many times as long as its peers' the messages of each slow hop take. Of the
    other way of a slow hop, exchanges that are as long tell nothing: each may wait for the other.
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
    buffers = bool((_early(chosen) & kept).any())
    shared = surely_share(ranks)
    pools = _fit(_measure(chosen, kept, buffers=buffers), largest, buffers=buffers, shared=shared)
    by_place = {
        (places[here], places[there]): _fit_slow(chosen, own, pools, slow[here, there])
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


def _fit_slow(transfers: Transfers, mine: Flags, peers: WirePools, times: float) -> SlowHop:
    """Tell what a slow hop's messages take, from its own."""
    measured = _measure(transfers, mine, buffers=peers.buffers)
    seen = {
        name: _typical(measured.took_ns[np.isin(measured.kind, kinds)])
        for name, kinds in _KINDS.items()
    }
    drain, one_way, both = seen["drain"], seen["one_way"], seen["both_ways"]
    if one_way is None:
        # What is left of a message takes no longer than all of it.
        one_way = max(drain or 0.0, peers.one_way * times)
    if both is None:
        both = max(drain or 0.0, peers.both_ways * times)
    drain = min(one_way, peers.drain * times if drain is None else drain)
    buffered = measured.of(_SENDING)
    buffered = buffered if len(buffered) else np.array([peers.sending])
    sends = measured.of(_SENT)
    shapes = np.isin(measured.kind, (_BOTH, _ONE, _DRAIN))
    typical = np.array([both, one_way, 1.0, drain])[measured.kind[shapes]]
    body = measured.took_ns[shapes] / np.maximum(typical, 1.0)
    body, step = (body, measured.step[shapes]) if len(body) else (np.ones(1), np.zeros(1, np.int64))
    exchanged = mine & transfers.fused
    met = np.maximum(transfers.send_start_ns, transfers.receive_start_ns)[exchanged]
    kept = np.minimum(transfers.send_end_ns, transfers.receive_end_ns)[exchanged] - met
    return SlowHop(
        times=times,
        wires=replace(
            peers,
            one_way=one_way,
            both_ways=both,
            drain=drain,
            body=body,
            tail_ns=np.zeros(len(body)),
            step=step,
            crowd=np.ones(len(body)),
            contention=0.0,
            messages=measured,
            slow={},
            other=None,
        ),
        sends_both_ways=both if not exchanged.any() else float(np.median(kept)),
        sends_ns=sends if len(sends) else buffered,
        buffered_ns=buffered,
    )


def join_pools(pools: WirePools, other: WirePools) -> WirePools:
    """Put the messages of two runs, all of one size, together.

    Hops that are slow in the first stay as slow as they are there; those of the other are its own.
    """
    own, more = pools.messages, other.messages
    later = more.step + 1 + int(own.step.max(initial=-1))
    messages = Messages(
        kind=np.concatenate((own.kind, more.kind)),
        took_ns=np.concatenate((own.took_ns, more.took_ns)),
        others=np.concatenate((own.others, more.others)),
        step=np.concatenate((own.step, later)),
    )
    joined = _fit(
        messages,
        pools.message_bytes,
        buffers=pools.buffers or other.buffers,
        shared=pools.shared and other.shared,
    )
    return replace(joined, slow=pools.slow, batched=pools.batched)


def _measure(transfers: Transfers, kept: Flags, *, buffers: bool) -> Messages:
    """Measure what is seen of each message that is kept."""
    wire, fused, early = _wire(transfers), transfers.fused, _early(transfers)
    sent, over = transfers.send_start_ns, transfers.receive_end_ns
    both_there = np.maximum(sent, transfers.receive_start_ns)
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
    # On its way it is from when it leaves to when it is there, as far as either side shows it.
    arrives = np.where(several, np.minimum(transfers.send_end_ns, over), over)
    arrives = np.maximum(np.where(early, transfers.send_end_ns, arrives), leaves)
    # What a slow hop holds back is on nobody else's way.
    under = time_under(leaves, arrives, leaves[kept], arrives[kept])
    beside = under / np.maximum(arrives - leaves, 1) - kept
    # What goes in the same kernel is part of it: the other half of an exchange, and all partners'.
    others = np.where(several, 0.0, np.maximum(beside - fused, 0.0))
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
        others=others[every],
        step=steps.astype(np.int64),
    )


def _fit(messages: Messages, message_bytes: int, *, buffers: bool, shared: bool) -> WirePools:
    """Tell what is typical, what others add, and what is left; say what was not seen."""
    contention = _contention(messages, shared=shared)
    alone = messages.took_ns / np.exp(contention * messages.others)
    both, one_way, sending, drain = (
        _typical(alone[np.isin(messages.kind, kinds)]) for kinds in _KINDS.values()
    )
    said = []
    if len(messages.of(_ONE)) < _FEWEST and both is not None:
        said.append("a one-way transfer takes 1/1.15 of a two-way exchange")
        one_way = both / BOTH_OVER_ONE
    if one_way is None and drain is not None:
        said.append("a one-way transfer takes twice the receive time of a message that has arrived")
        one_way = drain / DRAIN_OVER_WIRE
    if one_way is None:
        said, one_way = ["transfers take no time: none was measured"], 0.0
    if both is None:
        said += ["a two-way exchange takes 1.15 times a one-way transfer"] if one_way else []
        both = one_way * BOTH_OVER_ONE
    # Each message once: a stall that the receiver came too late to see is one, too.
    shapes = np.isin(messages.kind, (_BOTH, _ONE, _SENDING, _LATE))
    usual = np.array([both, one_way, sending or 0.0, 0.0, 0.0, one_way])
    typical = usual[messages.kind[shapes]]
    body = alone[shapes] / np.maximum(typical, 1.0)
    stalled = body >= STALLS_FROM
    body[stalled] = 1.0
    beside = np.exp(contention * messages.others[shapes])
    tail = np.where(~stalled, 0.0, messages.took_ns[shapes] - body * typical * beside)
    step = messages.step[shapes]
    meets = np.where(messages.kind[shapes] == _BOTH, 1.0, np.minimum(messages.others[shapes], 1.0))
    crowd = crowded(meets)
    if not len(body):
        body, tail, step = np.ones(1), np.zeros(1), np.zeros(1, dtype=np.int64)
        crowd = np.ones(1)
    return WirePools(
        both_ways=both,
        one_way=one_way,
        drain=one_way * DRAIN_OVER_WIRE if drain is None else drain,
        sending=one_way * SENDING_OVER_WIRE if sending is None else sending,
        body=body,
        tail_ns=np.maximum(tail, 0.0),
        step=step,
        crowd=crowd,
        contention=contention,
        message_bytes=message_bytes,
        buffers=buffers,
        assumed=tuple(said),
        messages=messages,
        slow={},
        shared=shared,
    )


def crowded(others: F64) -> F64:
    """Return how many times as likely messages are to stall that meet so many on their way."""
    likely: F64 = 1 + (CROWDED - 1) * np.minimum(others, 1.0)
    return likely


def _typical(took_ns: F64) -> float | None:
    return float(np.median(took_ns)) if len(took_ns) else None


def _contention(messages: Messages, *, shared: bool) -> float:
    """Return what each other message adds: what the run shows, drawn to what others showed."""
    known, spread = (ON_ONE_HOST, _SHARED_SPREAD) if shared else (_APART, _APART_SPREAD)
    xs, ys = [np.zeros(0)], [np.zeros(0)]
    for kind in (_BOTH, _ONE):
        mine = messages.kind == kind
        took = np.maximum(messages.took_ns[mine], 1.0)
        usual = took < STALLS_FROM * np.median(took) if len(took) else np.zeros(0, dtype=bool)
        if usual.sum() >= _FEWEST:
            x, y = messages.others[mine][usual], np.log(took[usual])
            xs.append(x - x.mean())
            ys.append(y - y.mean())
    x, y = np.concatenate(xs), np.concatenate(ys)
    noise = max(float(y @ y) / max(len(y) - 1, 1), 1e-4)
    seen = (known / spread**2 + float(x @ y) / noise) / (1 / spread**2 + float(x @ x) / noise)
    return float(min(max(seen, 0.0), _MOST_CONTENTION))


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
    sides: I64 = np.stack(
        (
            np.concatenate((transfers.source, transfers.destination)),
            np.concatenate((transfers.send_queue, transfers.receive_queue)),
            np.concatenate((transfers.send_start_ns, transfers.receive_start_ns)),
        )
    ).astype(np.int64)
    kernel = _number_alike(sides)
    met = np.maximum(transfers.send_start_ns, transfers.receive_start_ns)
    peers = np.concatenate((transfers.destination, transfers.source))
    kernels = int(kernel.max(initial=-1)) + 1
    # A kernel that meets two ranks has one above its least.
    least, most = np.full(kernels, np.iinfo(np.int64).max), np.full(kernels, -1)
    np.minimum.at(least, kernel, peers)
    np.maximum.at(most, kernel, peers)
    ready = np.full(kernels, np.iinfo(np.int64).min)
    np.maximum.at(ready, kernel, np.tile(met, 2))
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
