"""Sends and receives in → messages, each send with its receive; and what each hop took.

Messages between two ranks keep their order, so the k-th send of a step is the k-th receive:

    rank 0   send 0    send 1    send 2
    rank 1      receive 0 …   receive 1 …   receive 2

Where steps tell nothing, only the order counts, and a capture may have begun in the middle: then
the first receive is of a later send, or of one from before the capture (`find_shift`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from debubble.timeline.model import (
    I32,
    I64,
    MOST_IN_FLIGHT,
    TAIL_PERCENT,
    UNKNOWN,
    PassKind,
    RankTimeline,
    Timeline,
    Transfers,
    UnmatchedMessages,
    join_columns,
    rows_by_hop,
)
from debubble.timeline.passes import Neighbours
from debubble.timeline.work import Messages
from debubble.units import NS_PER_S

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


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMessages:
    """One rank's messages, and the step of each."""

    messages: Messages
    step: I32

    def rows(self, peer: int, *, is_send: bool, step: int | None = None) -> I64:
        """Return the rows that go to a peer, or come from it; of one step, or of all."""
        messages = self.messages
        mine = (messages.peer == peer) & (messages.is_send == is_send)
        return np.flatnonzero(mine if step is None else mine & (self.step == step))


def pair_with_more(ranks: Sequence[int], shifts: Shifts, more: int) -> Shifts:
    """Pair messages of the hops that are not sure so that so many more batches are in flight.

    Nothing where no pairing gives that.
    """
    found: dict[tuple[int, int], Shift | None] = {}
    for hop in pairwise(ranks):
        shift = shifts.get(hop)
        if shift is not None and not shift.sure:
            first = min(shift.first - more, shift.most)
            first = first if shift.least is None else max(first, shift.least)
            more -= shift.first - first
            # Who waited was told by another pairing.
            found[hop] = replace(shift, first=first, least=first, most=first, waited=False)
    return {} if more else found


def match_transfers(
    posted: Mapping[int, RankMessages],
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
        for peer in np.unique(mine.messages.peer[mine.messages.is_send == is_send]).tolist()
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
                lacking = source if len(sends) < len(receives) else destination
                unmatched.append(
                    UnmatchedMessages(ends=ends, step=step, count=left_over, lacking=lacking)
                )
                sends, receives = _cut_alike(sent, sends, received, receives)
            timed = sent.messages.timed[sends] & received.messages.timed[receives]
            if not timed.all():
                lost = int((~timed).sum())
                unmatched.append(UnmatchedMessages(ends=ends, step=step, count=lost))
            if timed.any():
                parts.append(_pair(ends, sent, sends[timed], received, receives[timed]))
    return join_columns(parts, by="receive_end_ns"), tuple(unmatched)


def _lost_inside(posted: Mapping[int, RankMessages], ends: tuple[int, int], paired: int) -> int:
    """Count messages of a stream that one side lacks although it was captured all that while.

    What the captures cut off lies before the first message of the other side, or after its last.
    """
    lost = 0
    for mine, other, is_send in ((ends[0], ends[1], True), (ends[1], ends[0], False)):
        at_ns = posted[mine].messages.start_ns[posted[mine].rows(other, is_send=is_send)]
        seen = posted[other].messages.start_ns
        if len(seen):
            inside = (at_ns > seen.min()) & (at_ns < seen.max())
            lost = max(lost, int(inside.sum()) - paired)
    return lost


def _cut_alike(
    sent: RankMessages, sends: I64, received: RankMessages, receives: I64
) -> tuple[I64, I64]:
    """Leave out what one side has more, at the step's end or at its beginning.

    Where one capture began in the middle of the step, it is the beginning: paired from the first
    on, messages would arrive before they were sent.
    """
    count = min(len(sends), len(receives))
    ways = [(sends[:count], receives[:count])]
    ways += [(sends[len(sends) - count :], receives[len(receives) - count :])]
    start, end = sent.messages.start_ns, received.messages.end_ns
    return min(ways, key=lambda way: int((end[way[1]] < start[way[0]]).sum()))


def _pair_across_steps(
    posted: Mapping[int, RankMessages], source: int, destination: int, shift: Shift | None
) -> Transfers:
    sent, received = posted[source], posted[destination]
    sends = sent.rows(destination, is_send=True)
    receives = received.rows(source, is_send=False)
    out, into = _overlap(len(sends), len(receives), shift.first if shift else len(sends))
    sends, receives = sends[out], receives[into]
    timed = sent.messages.timed[sends] & received.messages.timed[receives]
    return _pair((source, destination), sent, sends[timed], received, receives[timed])


def _pair(
    ends: tuple[int, int], sent: RankMessages, out: I64, received: RankMessages, into: I64
) -> Transfers:
    """Put rows of two ranks' messages side by side; their step is the sender's."""
    sends, receives = sent.messages, received.messages
    return Transfers(
        source=np.full(len(out), ends[0], dtype=np.int32),
        destination=np.full(len(out), ends[1], dtype=np.int32),
        step=sent.step[out],
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


def find_shifts(posted: Mapping[int, RankMessages], chains: Sequence[Sequence[int]]) -> Shifts:
    """Pair the messages of every hop of a stream whose two ranks were captured.

    Where it is not sure which is which, as few as may be are in flight.
    """
    hops = [hop for chain in chains for hop in pairwise(chain) if posted.keys() >= {*hop}]
    shifts = {hop: find_shift(posted, *hop) for hop in hops}
    return {hop: shift and replace(shift, first=shift.most) for hop, shift in shifts.items()}


def find_shift(posted: Mapping[int, RankMessages], source: int, destination: int) -> Shift | None:
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
    sent = posted[source].messages.where(posted[source].rows(destination, is_send=True))
    received = posted[destination].messages.where(posted[destination].rows(source, is_send=False))
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


def answers_lag(first: RankMessages, following: int, last: int) -> bool:
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
    buffered = rows.send_end_ns < rows.receive_start_ns
    both_there = np.maximum(rows.send_start_ns, rows.receive_start_ns)
    # Of a server's messages, which differ in size, those of the size that is named.
    largest = rows.message_bytes == rows.message_bytes.max()
    wire = (rows.receive_end_ns - both_there)[~buffered & largest]
    wait = np.maximum(both_there - rows.receive_start_ns, 0)
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
