"""Sends and receives in → messages, and what each hop took."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from debubble.timeline.model import (
    I32,
    I64,
    PassKind,
    RankTimeline,
    Timeline,
    Transfers,
    Unmatched,
    rows_by_hop,
)
from debubble.timeline.passes import Neighbours
from debubble.timeline.work import Messages
from debubble.units import NS_PER_S

# More batches in flight than servers keep: vLLM as many as ranks or one more, SGLang about so.
_MOST_SHIFT = 64
# With k of p batches in flight a rank waits 1 - k/p of each turn: a quarter with 3 of 4. A busy
# host wakes a receive late, too, but not often.
_WAITED_SHARE, _FEWEST_WAITS, _MOSTLY = 0.2, 3, 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Posted:
    """One rank's messages, and the step of each."""

    messages: Messages
    step: I32


def match_transfers(
    posted: Mapping[int, Posted], across_steps: Collection[tuple[int, int]] = ()
) -> tuple[Transfers, tuple[Unmatched, ...]]:
    """Pair the k-th send of a step to a rank with its k-th receive; return also what is left over.

    Messages between two ranks keep their order: one communicator is one queue. A server's answers
    are received in a later step than they are sent, and a server may mark no steps: for such pairs
    of ranks only the order counts, and what the capture cut off at either end is no gap.
    """
    parts: list[dict[str, NDArray[np.generic]]] = []
    unmatched: list[Unmatched] = []
    for source, destination in _pairs(posted):
        sent, received = posted[source], posted[destination]
        if (source, destination) in across_steps:
            parts.append(_pair_across_steps(posted, source, destination))
            continue
        for step in sorted(set(sent.step[sent.step >= 0].tolist())):
            sends = _rows(sent, step, destination, is_send=True)
            receives = _rows(received, step, source, is_send=False)
            left_over = abs(len(sends) - len(receives))
            if left_over:
                unmatched.append(Unmatched(source=source, step=step, count=left_over))
                sends, receives = _cut_alike((sent, sends), (received, receives))
            timed = sent.messages.timed[sends] & received.messages.timed[receives]
            if not timed.all():
                lost = int((~timed).sum())
                unmatched.append(Unmatched(source=source, step=step, count=lost))
                sends, receives = sends[timed], receives[timed]
            if len(sends):
                parts.append(_pair(source, destination, step, (sent, sends), (received, receives)))
    return _join(parts), tuple(unmatched)


def _cut_alike(
    sent: tuple[Posted, NDArray[np.intp]], received: tuple[Posted, NDArray[np.intp]]
) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Leave out what one side has more, at the step's end or at its beginning.

    Where one capture began in the middle of the step, it is the beginning: paired from the first
    on, messages would arrive before they were sent.
    """
    sends, receives = sent[1], received[1]
    count = min(len(sends), len(receives))
    ways = [(sends[:count], receives[:count])]
    ways += [(sends[len(sends) - count :], receives[len(receives) - count :])]
    start, end = sent[0].messages.start_ns, received[0].messages.end_ns
    return min(ways, key=lambda way: int((end[way[1]] < start[way[0]]).sum()))


def answers_lag(first: Posted, following: int, last: int) -> bool:
    """Tell a server: its first rank takes the answer to an earlier batch before it sends the next.

    A loop that waits for each batch sends first, and training does too.
    """
    messages = first.messages
    sends = messages.is_send & (messages.peer == following)
    receives = ~messages.is_send & (messages.peer == last)
    for step in np.unique(first.step[first.step >= 0]).tolist():
        sent = np.flatnonzero(sends & (first.step == step))
        received = np.flatnonzero(receives & (first.step == step))
        if len(sent) and len(received) and received[0] < sent[0]:
            return True
    return False


def find_shift(posted: Mapping[int, Posted], source: int, destination: int) -> int:
    """Return which send the first receive belongs to; below 0: to one from before the capture.

    It is the nearest to 0 under which nothing arrives before it is sent: captures are taken to
    begin at the same batch. Only receives that had to wait can tell otherwise: they end soon after
    their message was sent. Tags that differ from message to message tell all.
    """
    sends, receives = _all_rows(posted, source, destination)
    started = posted[source].messages.start_ns[sends]
    begun = posted[destination].messages.start_ns[receives]
    ended = posted[destination].messages.end_ns[receives]
    turn = float(np.median(np.diff(started))) if len(started) > 1 else 0.0
    waited = ended - begun > _WAITED_SHARE * turn
    enough = max(_FEWEST_WAITS, int(waited.sum()) // 2)
    nearest = None
    out_tag, in_tag = posted[source].messages.tag[sends], posted[destination].messages.tag[receives]
    for shift in sorted(range(-_MOST_SHIFT, _MOST_SHIFT + 1), key=abs):
        sent, received = _overlap(len(started), len(ended), shift)
        if _differ(out_tag[sent], in_tag[received]):
            continue
        way = ended[received] - started[sent]
        # A wrong pair is off by a whole turn; less than half of one may be a clock that is off.
        # Any other shift needs proof: clocks are fitted to it.
        if not len(way) or way.min() < (0 if shift else -turn / 2):
            continue
        nearest = shift if nearest is None else nearest
        prompt = (way < turn / 2)[waited[received]]
        if len(prompt) >= enough and prompt.mean() > _MOSTLY:
            return shift
    return nearest or 0


def _differ(sent: I32, received: I32) -> bool:
    """Tell whether messages cannot be the same: their tags are known and not equal."""
    return bool(((sent != received) & (sent >= 0) & (received >= 0)).any())


def count_cut_off(messages: Messages, beside: Neighbours) -> int:
    """Return how many sends go on with batches whose receive was before the rank's capture."""
    if beside.previous is None or beside.next is None:
        return 0
    receives = np.flatnonzero((messages.peer == beside.previous) & ~messages.is_send)
    sends = np.flatnonzero((messages.peer == beside.next) & messages.is_send)
    return int((sends < receives[0]).sum()) if len(receives) else 0


def _overlap(sends: int, receives: int, shift: int) -> tuple[slice, slice]:
    """Return the rows that meet when receive i belongs to send i + shift."""
    early, late = max(0, -shift), max(0, shift)
    count = max(0, min(sends - late, receives - early))
    return slice(late, late + count), slice(early, early + count)


def _all_rows(
    posted: Mapping[int, Posted], source: int, destination: int
) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    sent, received = posted[source].messages, posted[destination].messages
    return (
        np.flatnonzero((sent.peer == destination) & sent.is_send),
        np.flatnonzero((received.peer == source) & ~received.is_send),
    )


def _pair_across_steps(
    posted: Mapping[int, Posted], source: int, destination: int
) -> dict[str, NDArray[np.generic]]:
    sent, received = posted[source], posted[destination]
    sends, receives = _all_rows(posted, source, destination)
    shift = find_shift(posted, source, destination)
    sent_rows, received_rows = _overlap(len(sends), len(receives), shift)
    sends, receives = sends[sent_rows], receives[received_rows]
    timed = sent.messages.timed[sends] & received.messages.timed[receives]
    sends, receives = sends[timed], receives[timed]
    pair = _pair(source, destination, 0, (sent, sends), (received, receives))
    return {**pair, "step": sent.step[sends]}


def _pairs(posted: Mapping[int, Posted]) -> Iterator[tuple[int, int]]:
    for source, sent in sorted(posted.items()):
        messages = sent.messages
        for destination in np.unique(messages.peer[messages.is_send]).tolist():
            if destination in posted:
                yield source, destination


def _rows(posted: Posted, step: int, peer: int, *, is_send: bool) -> NDArray[np.intp]:
    messages = posted.messages
    return np.flatnonzero(
        (posted.step == step) & (messages.peer == peer) & (messages.is_send == is_send)
    )


def _pair(
    source: int,
    destination: int,
    step: int,
    sent: tuple[Posted, NDArray[np.intp]],
    received: tuple[Posted, NDArray[np.intp]],
) -> dict[str, NDArray[np.generic]]:
    sends, receives = sent[0].messages, received[0].messages
    out, into = sent[1], received[1]
    return {
        "source": np.full(len(out), source, dtype=np.int32),
        "destination": np.full(len(out), destination, dtype=np.int32),
        "step": np.full(len(out), step, dtype=np.int32),
        "message_bytes": np.maximum(sends.message_bytes[out], receives.message_bytes[into]),
        "send_start_ns": sends.start_ns[out],
        "send_end_ns": sends.end_ns[out],
        "receive_start_ns": receives.start_ns[into],
        "receive_end_ns": receives.end_ns[into],
        "fused": sends.fused[out] & receives.fused[into],
        "send_issued_ns": sends.issued_ns[out],
        "receive_issued_ns": receives.issued_ns[into],
        "send_queue": sends.queue[out],
        "receive_queue": receives.queue[into],
        "send_waited_ns": sends.waited_ns[out],
        "receive_waited_ns": receives.waited_ns[into],
    }


def _join(parts: list[dict[str, NDArray[np.generic]]]) -> Transfers:
    empty = {
        name: np.zeros(0, dtype=dtype)
        for name, dtype in (
            ("source", np.int32),
            ("destination", np.int32),
            ("step", np.int32),
            ("message_bytes", np.int64),
            ("send_start_ns", np.int64),
            ("send_end_ns", np.int64),
            ("receive_start_ns", np.int64),
            ("receive_end_ns", np.int64),
            ("fused", np.bool_),
            ("send_issued_ns", np.int64),
            ("receive_issued_ns", np.int64),
            ("send_queue", np.int32),
            ("receive_queue", np.int32),
            ("send_waited_ns", np.int64),
            ("receive_waited_ns", np.int64),
        )
    }
    columns = {
        name: np.concatenate([none, *(part[name] for part in parts)])
        for name, none in empty.items()
    }
    order = np.argsort(columns["receive_end_ns"], kind="stable")
    return Transfers(**{name: column[order] for name, column in columns.items()})


# One message in twenty is slower: transfers are heavy-tailed, and a median hides it.
_TAIL_PERCENT = 95


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
    place = {rank.rank: number for number, rank in enumerate(ranks)}
    figures = []
    of_hops = {
        (place[source], place[destination]): rows
        for (source, destination), rows in rows_by_hop(transfers).items()
        if source in place and destination in place
    }
    # Pairs as ranks stand, each both ways.
    for source, destination in sorted(of_hops, key=lambda hop: (min(hop), max(hop), hop)):
        here, there = ranks[source], ranks[destination]
        stages = _neighbours(here, there, trains=trains)
        if stages:
            rows = transfers.where(of_hops[source, destination])
            figures.append(_measure(rows, here.rank, there.rank, stages))
    return tuple(figures)


def _neighbours(
    source: RankTimeline, destination: RankTimeline, *, trains: bool
) -> tuple[tuple[int, int], ...]:
    """Return the stages that pass activations on, and gradients back where there are any."""
    ways = (1, -1) if trains else (1,)
    return tuple(
        (stage, stage + way)
        for stage in source.stages
        for way in ways
        if stage + way in destination.stages
    )


def _measure(
    rows: Transfers, source: int, destination: int, stages: tuple[tuple[int, int], ...]
) -> HopFigures:
    buffered = rows.send_end_ns < rows.receive_start_ns
    both_there = np.maximum(rows.send_start_ns, rows.receive_start_ns)
    wire = (rows.receive_end_ns - both_there)[~buffered]
    wait = np.maximum(both_there - rows.receive_start_ns, 0)
    return HopFigures(
        source=source,
        destination=destination,
        stages=stages,
        message_bytes=int(rows.message_bytes.max()),
        wire_ns=_percentile(wire, 50) if len(wire) else None,
        wire_p95_ns=_percentile(wire, _TAIL_PERCENT) if len(wire) else None,
        wires=len(wire),
        wait_ns=_percentile(wait, 50),
        wait_p95_ns=_percentile(wait, _TAIL_PERCENT),
        buffered_fraction=float(buffered.mean()),
        count=len(rows),
    )


def _percentile(values: I64, percent: int) -> int:
    return round(float(np.percentile(values, percent)))
