"""Sends and receives in → who passes to whom, each send with its receive, and what each hop took.

Messages between two ranks keep their order, so the k-th send of a step is the k-th receive:

    rank 0   send 0    send 1    send 2
    rank 1      receive 0 …   receive 1 …   receive 2

Where steps tell nothing, only the order counts, and a capture may have begun in the middle: then
the first receive is of a later send, or of one from before the capture (`find_shift`).

Forward comes before backward, so the first messages tell who passes to whom:

    rank 0   send to 1 …                              the first: it sends before it receives
    rank 1   receive from 0, send to 2 …
    rank 2   receive from 1, send to 1 (a gradient)   the last: what it answers is no hop
    →        chain 0, 1, 2

Three things stand in the way. gloo's operators tell the peer as its group counts it, and not which
group. The wrong groups contradict themselves: all first stages of a data-parallel group send to its
member 1, member 1 to itself; and what one rank sends under the wrong group, no other receives. A
group whose members agree about every message is believed; where several do, one that is called
after the pipeline.

Ranks that were not captured cannot tell whom they pass to: two of them side by side tear a pipeline
apart. The process group that the messages went through still lists all its ranks in their order.

Context parallelism sends keys and values around the ranks that share a stage, point to point, many
times in each pass. Nobody waits for an input before it sends: each rank of a ring posts its sends
together with as many receives, always, from the first on. In a pipeline all but the first rank
receive first, then compute, and then send. See docs/explanation/how-the-timeline-is-built.md.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product

import numpy as np

from debubble.errors import Code, Gap
from debubble.timeline.model import (
    I32,
    I64,
    MOST_IN_FLIGHT,
    TAIL_PERCENT,
    UNKNOWN,
    Flags,
    PassKind,
    RankTimeline,
    Role,
    Timeline,
    Transfers,
    UnmatchedMessages,
    join_columns,
    role_of,
    rows_by_hop,
)
from debubble.timeline.passes import Neighbours
from debubble.timeline.work import Messages, Work, ends_of_posts, find_messages
from debubble.trace.columns import Group, KernelKind, Operation, RankTrace
from debubble.units import NS_PER_S, counted

# Ways that differ by less of a turn are the same; so many of them, such a share, and so many times
# what any other pairing has, are no accident.
_ALIKE_SHARE, _FEWEST_ALIKE, _MANY_ALIKE, _CLEARLY = 0.02, 4, 0.25, 1.5
# Captures that lie apart by their stamps need so many times as many: four of 14 agreed by chance.
_APART_FACTOR = 2
# A message that is received so soon after it was sent, in shares of a turn, was waited for; and
# few wait so many turns, though before a stage that sets the pace some do (4.5 with eight in flight
# over four stages).
_AT_ONCE_SHARE, _MANY_TURNS = 0.15, 2.0
# A receive that takes such a share of a turn waited for its message: those that find it there take
# 1 to 3 % of a turn on our rig, those that wait 12 to 40 %, in the middle.
_WAITED_SHARE = 0.05
# A receive that takes so many times as long as the shortest waited; of such, at most this share may
# have been held up by something else.
_WAITED_FACTOR, _MOST_WRONG = 5, 0.5
# Hosts that keep their time by NTP are within a second of each other. A rank further off may be of
# another run, captured before or after: an end of a pipeline has one neighbour, whose messages it
# may fit by chance. Eleven of the mixes of two of our recordings do, all 25 s and more apart.
CLOCKS_OFF_NS = 10_000_000_000
# A sender runs ahead of its receiver by as many messages as are in flight, at the end of a capture.
_FEWEST_LOST, _MOST_LOST = 5, 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Shift:
    """Which send the first receive belongs to; below 0: to one from before the capture."""

    first: int
    least: int | None
    """It may be this one as well, or any up to `most`; None: nothing says how early it may be."""
    most: int
    waited: bool
    """Receives waited for their messages, which tells how far two clocks are apart."""

    @property
    def sure(self) -> bool:
        """Whether it can be no other."""
        return self.least == self.most


Shifts = Mapping[tuple[int, int], Shift | None]
"""How the messages of each hop are paired; None where the captures have none in common."""


def match_transfers(
    posted: Mapping[int, Messages],
    across_steps: Collection[tuple[int, int]] = (),
    shifts: Shifts | None = None,
) -> tuple[Transfers, tuple[UnmatchedMessages, ...]]:
    """Pair the k-th send of a step to a rank with its k-th receive; return also what is left over.

    Messages between two ranks keep their order: one communicator is one queue. A server's answers
    are received in a later step than they are sent, and a server may mark no steps: for such pairs
    of ranks only the order counts, and what the capture cut off at either end is no gap; `shifts`
    are those that are known.
    """
    parts = [Transfers.no_rows()]
    unmatched: list[UnmatchedMessages] = []
    pairs = {
        (rank, peer) if is_send else (peer, rank)
        for rank, mine in posted.items()
        for is_send in (True, False)
        for peer in np.unique(mine.peer[mine.is_send == is_send]).tolist()
        if peer in posted
    }
    for source, destination in sorted(pairs):
        sent, received = posted[source], posted[destination]
        ends = (source, destination)
        if ends in across_steps:
            known = shifts is not None and ends in shifts
            shift = shifts[ends] if shifts and known else find_shift(posted, *ends)
            parts.append(_pair_across_steps(posted, source, destination, shift))
            lost = _lost_inside(posted, ends, len(parts[-1]))
            if lost >= max(_FEWEST_LOST, _MOST_LOST * len(parts[-1])):
                unmatched.append(UnmatchedMessages(ends=ends, step=UNKNOWN, count=lost))
            continue
        steps = {*sent.step.tolist(), *received.step.tolist()}
        for step in sorted(step for step in steps if step >= 0):
            sends = sent.rows(destination, is_send=True, step=step)
            receives = received.rows(source, is_send=False, step=step)
            left_over = abs(len(sends) - len(receives))
            if left_over:
                unmatched.append(UnmatchedMessages(ends=ends, step=step, count=left_over))
                sends, receives = _cut_alike(sent, sends, received, receives)
            timed = sent.timed[sends] & received.timed[receives]
            if not timed.all():
                lost = int((~timed).sum())
                unmatched.append(UnmatchedMessages(ends=ends, step=step, count=lost))
            if timed.any():
                parts.append(_pair(ends, sent, sends[timed], received, receives[timed]))
    return join_columns(parts, by="receive_end_ns"), tuple(unmatched)


def _lost_inside(posted: Mapping[int, Messages], ends: tuple[int, int], paired: int) -> int:
    """Count messages of a stream that one side lacks although it was captured all that while.

    What the captures cut off lies before the first message of the other side, or after its last.
    """
    lost = 0
    for mine, other, is_send in ((ends[0], ends[1], True), (ends[1], ends[0], False)):
        at_ns = posted[mine].start_ns[posted[mine].rows(other, is_send=is_send)]
        seen = posted[other].start_ns
        if len(seen):
            inside = (at_ns > seen.min()) & (at_ns < seen.max())
            lost = max(lost, int(inside.sum()) - paired)
    return lost


def _cut_alike(sent: Messages, sends: I64, received: Messages, receives: I64) -> tuple[I64, I64]:
    """Leave out what one side has more, at the step's end or at its beginning.

    Where one capture began in the middle of the step, it is the beginning: paired from the first
    on, messages would arrive before they were sent.
    """
    count = min(len(sends), len(receives))
    ways = [(sends[:count], receives[:count])]
    ways += [(sends[len(sends) - count :], receives[len(receives) - count :])]
    return min(ways, key=lambda way: int((received.end_ns[way[1]] < sent.start_ns[way[0]]).sum()))


def _pair_across_steps(
    posted: Mapping[int, Messages], source: int, destination: int, shift: Shift | None
) -> Transfers:
    sent, received = posted[source], posted[destination]
    sends = sent.rows(destination, is_send=True)
    receives = received.rows(source, is_send=False)
    out, into = _overlap(len(sends), len(receives), shift.first if shift else len(sends))
    sends, receives = sends[out], receives[into]
    timed = sent.timed[sends] & received.timed[receives]
    return _pair((source, destination), sent, sends[timed], received, receives[timed])


def _pair(
    ends: tuple[int, int], sends: Messages, out: I64, receives: Messages, into: I64
) -> Transfers:
    """Put rows of two ranks' messages side by side; their step is the sender's."""
    return Transfers(
        source=np.full(len(out), ends[0], dtype=np.int32),
        destination=np.full(len(out), ends[1], dtype=np.int32),
        step=sends.step[out],
        message_bytes=np.maximum(sends.message_bytes[out], receives.message_bytes[into]),
        send_start_ns=sends.start_ns[out],
        send_end_ns=sends.end_ns[out],
        receive_start_ns=receives.start_ns[into],
        receive_end_ns=receives.end_ns[into],
        fused=sends.fused[out] & receives.fused[into],
        send_issued_ns=sends.issued_ns[out],
        receive_issued_ns=receives.issued_ns[into],
        send_queue=sends.queue[out],
        receive_queue=receives.queue[into],
        send_waited_ns=sends.waited_ns[out],
        receive_waited_ns=receives.waited_ns[into],
    )


def find_shifts(posted: Mapping[int, Messages], chains: Sequence[Sequence[int]]) -> Shifts:
    """Pair the messages of every hop of a stream whose two ranks were captured.

    Where it is not sure which is which, as few as may be are in flight.
    """
    hops = [hop for chain in chains for hop in pairwise(chain) if posted.keys() >= {*hop}]
    shifts = {hop: find_shift(posted, *hop) for hop in hops}
    return {hop: shift and replace(shift, first=shift.most) for hop, shift in shifts.items()}


def find_shift(posted: Mapping[int, Messages], source: int, destination: int) -> Shift | None:
    """Pair the messages of a stream; None where the captures have none in common.

    Sizes must agree, and tags where they differ from message to message. Then many messages take
    the same short way, whatever the clocks say, for their receive was waiting; paired a batch too
    early or too late, what a batch takes in turn is in it, which varies:

        sent          |    |       |  |            way, paired right: 2 2 2 2
        received        |    |       |  |          a batch too early: 7 10 5

    Where no pairing stands out: the latest under which nothing arrives before it is sent, if some
    then arrive at once; else captures are taken to begin at the same batch, if nothing then waits
    for long. What a receive was seen to wait for was not sent a turn earlier: that rules out the
    pairings before it. A receiver that always has messages waiting looks the same a batch earlier
    or later: which it is, is not sure, unless the first of all arrives at once, as in a pipeline
    that fills up.
    """
    sent = posted[source].where(posted[source].rows(destination, is_send=True))
    received = posted[destination].where(posted[destination].rows(source, is_send=False))
    turn = float(np.median(np.diff(sent.start_ns))) if len(sent) > 1 else 0.0
    waited = received.end_ns - received.start_ns > _WAITED_SHARE * turn
    alike: dict[int, int] = {}
    ways: dict[int, I64] = {}
    for shift in range(-MOST_IN_FLIGHT, MOST_IN_FLIGHT + 1):
        out, into = _overlap(len(sent), len(received), shift)
        size, tag = sent.message_bytes[out], sent.tag[out]
        others, tags = received.message_bytes[into], received.tag[into]
        if (
            not len(size)
            or ((tag != tags) & (tag >= 0) & (tags >= 0)).any()
            or ((size != others) & (size > 0) & (others > 0)).any()
        ):
            continue
        ways[shift] = received.end_ns[into] - sent.start_ns[out]
        telling = np.sort(ways[shift][waited[into] & (size == size.min())])
        limit = telling[:1] + _ALIKE_SHARE * turn
        alike[shift] = int(np.searchsorted(telling, limit, side="right").sum())
    if not alike:
        return Shift(first=0, least=0, most=0, waited=False)
    best = max(alike, key=lambda shift: (alike[shift], -abs(shift)))
    others_alike = max((count for shift, count in alike.items() if shift != best), default=0)
    early, late = (
        sent.start_ns.min() - received.end_ns.max(),
        received.start_ns.min() - sent.end_ns.max(),
    )
    enough = max(_FEWEST_ALIKE, _MANY_ALIKE * waited.sum())
    if alike[best] >= max(
        enough * (_APART_FACTOR if max(early, late) > 0 else 1), _CLEARLY * others_alike
    ):
        return Shift(first=best, least=best, most=best, waited=True)
    if 0 < early < CLOCKS_OFF_NS:
        return None
    told = bool(waited.sum() >= _FEWEST_ALIKE)
    # A wrong pair is off by a whole turn; less than half of one may be a clock that is off.
    soonest = {shift: int(way.min()) for shift, way in ways.items()}
    possible = [at for at, way_ns in soonest.items() if way_ns >= (0 if at else -turn / 2)]
    latest, nearest = max(possible, default=0), min(possible, key=abs, default=0)
    long = _MANY_TURNS * turn
    at_once = soonest.get(latest, 0) < _AT_ONCE_SHARE * turn
    if (soonest.get(nearest, 0) > long >= soonest.get(latest, 0)) or at_once:
        nearest = latest
    if nearest == 0 and 0 in ways and ways[0][0] == soonest[0] <= _AT_ONCE_SHARE * turn:
        return Shift(first=0, least=0, most=0, waited=told)
    # A batch earlier every way is a turn longer: as far as sizes and receives that waited allow.
    least = nearest
    while (earlier := least - 1) in ways and not _waits_for_less(received, ways[earlier], earlier):
        least = earlier
    open_ended = not len(sent.start_ns[_overlap(len(sent), len(received), least - 1)[0]])
    return Shift(
        first=nearest,
        least=None if open_ended else least,
        most=max(nearest, latest),
        waited=told,
    )


def _waits_for_less(received: Messages, ways: I64, shift: int) -> bool:
    """Tell whether receives that took long were for messages that had been sent before they began.

    What one waited for takes less time than the receive does.
    """
    into = slice(max(0, -shift), max(0, -shift) + len(ways))
    size, taken = received.message_bytes[into], (received.end_ns - received.start_ns)[into]
    alike = size == size.min()
    waited = alike & (taken > _WAITED_FACTOR * taken[alike].min())
    wrong = int((ways > taken)[waited].sum())
    return bool(waited.sum() >= _FEWEST_ALIKE and wrong > _MOST_WRONG * waited.sum())


def _overlap(sends: int, receives: int, shift: int) -> tuple[slice, slice]:
    """Return the rows that meet when receive i belongs to send i + shift."""
    early, late = max(0, -shift), max(0, shift)
    count = max(0, min(sends - late, receives - early))
    return slice(late, late + count), slice(early, early + count)


def answers_lag(first: Messages, following: int, last: int) -> bool:
    """Tell a server: its first rank takes the answer to an earlier batch before it sends the next.

    A loop that waits for each batch sends first, and training does too.
    """
    for step in np.unique(first.step[first.step >= 0]).tolist():
        sent = first.rows(following, is_send=True, step=step)
        received = first.rows(last, is_send=False, step=step)
        if len(sent) and len(received) and received[0] < sent[0]:
            return True
    return False


def count_cut_off(messages: Messages, beside: Neighbours) -> int:
    """Return how many sends go on with batches whose receive was before the rank's capture."""
    if beside.previous is None or beside.next is None:
        return 0
    receives = np.flatnonzero((messages.peer == beside.previous) & ~messages.is_send)
    sends = np.flatnonzero((messages.peer == beside.next) & messages.is_send)
    return int((sends < receives[0]).sum()) if len(receives) else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class HopFigures:
    """One direction between two ranks.

    Wire is from the moment both sides are there to the receive's end; where the message had left
    before the receive began (`buffered`), it is hidden, and no wire is claimed.
    """

    source: int
    destination: int
    stages: tuple[tuple[int, int], ...]
    """From which stage to which; several where ranks hold several."""
    message_bytes: int
    """The largest; below 0 where no size is known."""
    wire_ns: int | None
    wire_p95_ns: int | None
    wires: int
    """How many messages showed their wire."""
    wait_ns: int
    """How long the receive waited for its send."""
    wait_p95_ns: int
    buffered_fraction: float
    count: int

    @property
    def bytes_per_s(self) -> float | None:
        """What the wire carried, where both size and wire are known."""
        if self.message_bytes <= 0 or not self.wire_ns:
            return None
        return self.message_bytes * NS_PER_S / self.wire_ns


def known_to_leave(transfers: Transfers) -> Flags:
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


def measure_hops(timeline: Timeline, ranks: tuple[RankTimeline, ...]) -> tuple[HopFigures, ...]:
    """Measure each direction between ranks with neighbouring stages.

    A last rank's answer to the first is no hop, unless stages go around from the one to the other.
    """
    passes, transfers = timeline.passes, timeline.transfers
    mine = np.isin(passes.rank, [rank.rank for rank in ranks])
    trains = bool((passes.kind[mine] != PassKind.F).any())
    position = {rank.rank: number for number, rank in enumerate(ranks)}
    figures = []
    of_hops = {
        (position[source], position[destination]): rows
        for (source, destination), rows in rows_by_hop(transfers).items()
        if source in position and destination in position
    }
    # Pairs as ranks stand, each both ways.
    for source, destination in sorted(of_hops, key=lambda hop: (min(hop), max(hop), hop)):
        here, there = ranks[source], ranks[destination]
        stages = tuple(
            (stage, stage + way)
            for stage in here.stages
            for way in ((1, -1) if trains else (1,))  # activations on, gradients back
            if stage + way in there.stages
        )
        if stages:
            rows = transfers.where(of_hops[source, destination])
            figures.append(_measure(rows, here.rank, there.rank, stages))
    return tuple(figures)


def _measure(
    rows: Transfers, source: int, destination: int, stages: tuple[tuple[int, int], ...]
) -> HopFigures:
    buffered = rows.buffered
    # Of a server's messages, which differ in size, those of the size that is named.
    largest = rows.message_bytes == rows.message_bytes.max()
    wire = (rows.receive_end_ns - rows.met_ns)[~buffered & largest]
    wait = rows.met_ns - rows.receive_start_ns
    return HopFigures(
        source=source,
        destination=destination,
        stages=stages,
        message_bytes=int(rows.message_bytes.max()),
        wire_ns=_percentile(wire, 50) if len(wire) else None,
        wire_p95_ns=_percentile(wire, TAIL_PERCENT) if len(wire) else None,
        wires=len(wire),
        wait_ns=_percentile(wait, 50),
        wait_p95_ns=_percentile(wait, TAIL_PERCENT),
        buffered_fraction=float(buffered.mean()),
        count=len(rows),
    )


def _percentile(values: I64, percent: int) -> int:
    return round(float(np.percentile(values, percent)))


# A buffer made for a receive, between the send and it, is no compute.
_ALLOCATION = "aten::empty"

Edges = set[tuple[bool, int]]
"""Whether sent, and the peer as its group counts it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """The ranks of one pipeline in the order a microbatch goes through them."""

    ranks: tuple[int, ...]

    def beside(self, rank: int) -> Neighbours:
        """Return a rank's neighbours."""
        position = self.ranks.index(rank)
        return Neighbours(
            previous=self.ranks[position - 1] if position else None,
            next=self.ranks[position + 1] if position + 1 < len(self.ranks) else None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RingPlace:
    """Whom a rank receives from and sends to in a ring."""

    source: int
    target: int


def choose_groups(
    traces: Sequence[RankTrace],
) -> tuple[dict[int, tuple[int, ...]], tuple[Gap, ...]]:
    """Return whom each rank's unnamed peers are counted among, where that is certain."""
    edges: dict[int, Edges] = {}
    for trace in traces:
        if trace.rank is not None:
            rows, operators = _unnamed(trace), trace.operators
            sent = (operators.operation[rows] == Operation.SEND).tolist()
            peers = operators.local_peer[rows].tolist()
            edges[trace.rank] = set(zip(sent, peers, strict=True))
    chosen: dict[int, tuple[int, ...]] = {}
    gaps = []
    for trace in traces:
        rank = trace.rank
        if rank is None or not edges[rank]:
            continue
        fitting = [group for group in trace.groups if _agrees(group, rank, edges)]
        if len({group.ranks for group in fitting}) > 1:
            fitting = [group for group in fitting if role_of(group) is Role.PIPELINE]
        members = {group.ranks for group in fitting}
        if len(members) == 1:
            chosen[rank] = members.pop()
            continue
        count = counted(int(_unnamed(trace).sum()), "message")
        gaps.append(
            Gap(
                code=Code.UNKNOWN_GROUP,
                message=f"{count} left out: their process group, and so their peer, is unknown",
                hint="name the pipeline's group, such as new_group(ranks, group_desc='pp')",
                file=trace.file,
                rank=rank,
            )
        )
    return chosen, tuple(gaps)


def _unnamed(trace: RankTrace) -> Flags:
    """Tell messages whose peer is counted in a group that is not named.

    Where kernels carry those of a named one, such a message without a kernel goes the host's way:
    a plan, a sampled token. It is no message of the pipeline.
    """
    operators = trace.operators
    messages = np.isin(operators.operation, (Operation.SEND, Operation.RECEIVE))
    unnamed: Flags = messages & (operators.peer < 0) & (operators.local_peer >= 0)
    if (messages & (operators.peer >= 0) & (operators.kernel >= 0)).any():
        unnamed &= operators.kernel >= 0
    return unnamed


def _agrees(group: Group, rank: int, edges: Mapping[int, Edges]) -> bool:
    """Tell whether all captured members of a group could have exchanged these messages in it."""
    if rank not in group.ranks:
        return False
    for position, member in enumerate(group.ranks):
        for sent, peer in edges.get(member, ()):
            if peer >= len(group.ranks) or peer == position:
                return False
            other = edges.get(group.ranks[peer])
            if other is not None and (not sent, position) not in other:
                return False
    return True


def translate_peers(trace: RankTrace, members: tuple[int, ...] | None) -> RankTrace:
    """Fill in the peers that are counted inside a group, once it is known which."""
    if members is None:
        return trace
    operators = trace.operators
    rows = _unnamed(trace)
    peer: I32 = operators.peer.copy()
    peer[rows] = np.array(members, dtype=np.int32)[operators.local_peer[rows]]
    found = next(row for row, group in enumerate(trace.groups) if group.ranks == members)
    group = np.where(rows, np.int32(found), operators.group)
    return replace(trace, operators=replace(operators, peer=peer, group=group))


def rank_of(trace: RankTrace) -> int:
    """Return a rank that was settled; -1 where none was."""
    return UNKNOWN if trace.rank is None else trace.rank


def find_chains(messages: Mapping[int, Messages]) -> tuple[Chain, ...]:
    """Follow the first messages: forward comes before backward, whatever the schedule.

    A rank's first receive comes from the rank before it, its first send goes to the rank after it.
    A rank that sends first is the first of its pipeline; a last rank's answer to it is no hop.
    Receives count from their end: they may be posted long ahead.
    Where a rank only ever receives from one and sends to another, the order does not matter: a
    server may be captured while it runs.
    """
    after: dict[int, int] = {}
    heads = set()
    for rank, posts in sorted(messages.items()):
        if not (posts.peer >= 0).any():
            continue
        first = _first(posts, posts.peer >= 0)
        peer = int(posts.peer[first])
        if (way := _one_way(posts)) is not None:
            previous, following = way
            after.setdefault(previous, rank)
            after.setdefault(rank, following)
        elif posts.is_send[first]:
            heads.add(rank)
            after.setdefault(rank, peer)
        else:
            after.setdefault(peer, rank)
    # A rank that was not captured cannot tell who leads to it.
    for rank, posts in sorted(messages.items()):
        peer = _first_peer(posts, is_send=True)
        if rank in after or peer in messages or peer in after.values():
            continue
        if peer != UNKNOWN and peer != _first_peer(posts, is_send=False):
            after[rank] = peer
    heads |= set(after) - set(after.values())  # the pipeline's first rank was not captured
    chains = [_follow(head, after) for head in sorted(heads)]
    placed = {rank for chain in chains for rank in chain.ranks}
    while left := sorted(set(after) - placed):
        ring = _follow(left[0], after).ranks
        chains.append(_follow(min(ring), after))
        placed.update(ring)
    return tuple(chains)


def _first_peer(posts: Messages, *, is_send: bool) -> int:
    """Return whom a rank first sends to or receives from; a last rank may send to nobody."""
    mine = (posts.is_send == is_send) & (posts.peer >= 0)
    return int(posts.peer[_first(posts, mine)]) if mine.any() else UNKNOWN


def _first(posts: Messages, kept: Flags) -> int:
    """Return which of some messages was used first: a send begins, a receive ends.

    Of those that one kernel carried, it is the one that was issued first.
    Only the host's call is known of one whose kernel was not recorded, and hosts run ahead.
    """
    timed = kept & posts.timed
    rows = np.flatnonzero(timed if timed.any() else kept)
    used = np.where(posts.is_send, posts.start_ns, posts.end_ns)
    first = int(rows[used[rows].argmin()])
    together = (posts.start_ns == posts.start_ns[first]) & (posts.end_ns == posts.end_ns[first])
    return int(np.flatnonzero(together & kept)[0])


def _one_way(posts: Messages) -> tuple[int, int] | None:
    """Return whom a rank receives from and sends to, where it is one and another."""
    known = posts.peer >= 0
    sources = set(posts.peer[known & ~posts.is_send].tolist())
    targets = set(posts.peer[known & posts.is_send].tolist())
    if len(sources) != 1 or len(targets) != 1 or sources == targets:
        return None
    return sources.pop(), targets.pop()


def _follow(head: int, after: Mapping[int, int]) -> Chain:
    ranks = [head]
    while (following := after.get(ranks[-1])) is not None and following not in ranks:
        ranks.append(following)
    return Chain(ranks=tuple(ranks))


def join_over_missing(chains: Sequence[Chain], traces: Sequence[RankTrace]) -> tuple[Chain, ...]:
    """Put the pieces of each pipeline together in the order of its process group."""
    captured = {trace.rank for trace in traces if trace.rank is not None}
    joined = list(chains)
    for members in sorted(pipeline_groups(traces)):
        inside = [chain for chain in joined if set(chain.ranks) <= set(members)]
        if inside and not captured >= set(members) and _fit(inside, members, captured):
            joined = [chain for chain in joined if chain not in inside]
            joined.append(Chain(ranks=members))
    return tuple(sorted(joined, key=lambda chain: chain.ranks))


def _fit(pieces: Sequence[Chain], members: tuple[int, ...], captured: Collection[int]) -> bool:
    """Tell whether the pieces lie in a group one after the other, torn at missing ranks only."""
    hops = set(pairwise(members))
    answer = (members[-1], members[0])
    found = {hop for piece in pieces for hop in pairwise(piece.ranks)} - {answer}
    torn = [rank for hop in hops - found for rank in hop]
    return found <= hops and not set(torn) & set(captured)


def pipeline_groups(traces: Sequence[RankTrace]) -> set[tuple[int, ...]]:
    """Return the members of the groups that messages went through, each for one pipeline.

    A group of all ranks may hold several pipelines, unless it is called after one or the job has no
    other: replicas would have a group to reduce their gradients in.
    """
    found = set()
    for trace in traces:
        operators = trace.operators
        posts = np.isin(operators.operation, (Operation.SEND, Operation.RECEIVE))
        alone = bool(trace.header.groups) and len({group.ranks for group in trace.groups}) == 1
        for row in np.unique(operators.group[posts & (operators.group >= 0)]).tolist():
            group = trace.groups[row]
            named = role_of(group) is Role.PIPELINE
            part = len(group.ranks) < (trace.header.world_size or 0)
            if len(group.ranks) > 1 and (named or alone or part):
                found.add(group.ranks)
    return found


def find_rings(traces: Sequence[RankTrace], work: Sequence[Work]) -> dict[int, RingPlace]:
    """Return the place of each rank that passes blocks around a ring."""
    messages: dict[int, Messages] = {}
    could: dict[int, list[RingPlace]] = {}
    for trace, computed in zip(traces, work, strict=True):
        if trace.rank is not None:
            messages[trace.rank] = find_messages(trace)
            allocates = np.array([n.startswith(_ALLOCATION) for n in trace.names] or [False])
            computes_at = computed.issued_ns[~allocates[computed.name]]
            could[trace.rank] = _ring_places(messages[trace.rank], computes_at)
    rings: dict[int, RingPlace] = {}
    for rank in sorted(could):
        for place in could[rank]:
            ring = _follow_ring(rank, place, could) if rank not in rings else {}
            # One rank alone may as well be the first of a pipeline, with one microbatch a step.
            if len(ring) > 1 and _all_alike(ring, messages):
                rings |= ring
    # Ranks whose whole ring is missing, where others of the run have one.
    return rings | {
        rank: place
        for rank, places in could.items()
        for place in places
        if rings and rank not in rings and not {place.source, place.target} & set(could)
    }


def as_collectives(trace: RankTrace, rings: Mapping[int, RingPlace]) -> RankTrace:
    """Call a rank's messages around its ring what they are: no pipeline lever removes them."""
    place = rings.get(rank_of(trace))
    if place is None:
        return trace
    operators, kernels = trace.operators, trace.kernels
    sent = (operators.operation == Operation.SEND) & (operators.peer == place.target)
    received = (operators.operation == Operation.RECEIVE) & (operators.peer == place.source)
    rows = sent | received
    carriers = operators.kernel[rows & (operators.kernel >= 0)]
    kind = kernels.kind.copy()
    kind[carriers] = KernelKind.COLLECTIVE
    duration = operators.duration_ns.copy()
    posts = np.flatnonzero(rows)
    duration[posts] = ends_of_posts(trace, posts) - operators.start_ns[posts]
    return replace(
        trace,
        kernels=replace(kernels, kind=kind),
        operators=replace(
            operators,
            operation=np.where(rows, np.uint8(Operation.COLLECTIVE), operators.operation),
            duration_ns=duration,
        ),
    )


def _ring_places(posts: Messages, computes_at: I64) -> list[RingPlace]:
    """Return all pairs of peers between which a rank could stand in a ring.

    Each batch of messages, with no compute between them, sends to one as often as it receives from
    the other.
    """
    batch = np.searchsorted(computes_at, posts.issued_ns)
    known = posts.peer >= 0
    targets = np.unique(posts.peer[known & posts.is_send]).tolist()
    sources = np.unique(posts.peer[known & ~posts.is_send]).tolist()
    return [
        RingPlace(source=source, target=target)
        for source, target in product(sources, targets)
        if np.array_equal(
            batch[posts.is_send & (posts.peer == target)],
            batch[~posts.is_send & (posts.peer == source)],
        )
    ]


def _follow_ring(
    rank: int, place: RingPlace, could: Mapping[int, list[RingPlace]]
) -> dict[int, RingPlace]:
    """Return the captured ranks of a ring; nothing where one of them does not fit into it."""
    ring = {rank: place}
    for back in (False, True):
        here, at = rank, place
        while (following := at.source if back else at.target) in could and following not in ring:
            fitting = [
                other
                for other in could[following]
                if (other.target if back else other.source) == here
            ]
            if len(fitting) != 1:
                return {}
            here, at = following, fitting[0]
            ring[here] = at
        if following == rank or (following in ring and not back):
            closes = ring[following].source == here
            return ring if closes else {}
    return ring


def _all_alike(ring: Mapping[int, RingPlace], messages: Mapping[int, Messages]) -> bool:
    """Tell whether every hop of a ring carries the same: a server's answer weighs less."""
    sizes = set()
    for rank, place in ring.items():
        posts = messages[rank]
        mine = posts.is_send & (posts.peer == place.target)
        sizes.add(frozenset(posts.message_bytes[mine].tolist()))
    return len(sizes) == 1
