"""Messages in → one clock for all ranks; and whether these ranks ran together at all.

No message arrives before it was sent: each transfer bounds the difference of two clocks from one
side, and the bounds add up along every way from rank to rank. Stamps in ms, each by its own clock:

    rank 0   send begins at 10    │  receive ends at 19
    rank 1   receive ends at 23   │  send begins at 31
    →        rank 1 is ahead      │  rank 1 is ahead
             by 23 - 10 at most   │  by 31 - 19 at least:  by 12 to 13, and not to be believed

Stamps that keep all bounds where both sides are bounded are believed as they are: the ranks share a
host, or a good clock.

Otherwise the offsets are fitted to all hops at once. A receive that waited ends one wire time after
its send began; the shortest receive of the hop is a measure of that time, and where messages come
back, by whatever way, the fit finds the factor between the two, or how small and large it can be.
A fused exchange ends on both ranks at once. Receives that did not wait for their sender say little:
it may just have run ahead. Where two ranks have no others, the middle of what can be is taken.

A clock may be wrong by hours, and still one offset puts every receive after its send. Ranks of
different runs show no such offset: their steps took different times. Or they do not fit together
at all: other worlds, other messages.

docs/explanation/how-the-timeline-is-built.md ("One clock", "Whether the ranks are of one run")
tells why.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise

import numpy as np

from debubble.errors import Code, Gap
from debubble.timeline.model import (
    F64,
    FEWEST_SAMPLES,
    I32,
    I64,
    Flags,
    Transfers,
    rows_by_hop,
)
from debubble.timeline.steps import RankRecord, numbered
from debubble.timeline.transfers import CLOCKS_OFF_NS, Chain
from debubble.units import show_duration, show_ranks

# Ends of fused exchanges agree within 0.3 ms, seen on NCCL over sockets.
_ENDS_AGREE_NS = 300_000
# A receive this much longer than the shortest message of its hop was waiting when the data came; a
# send as much longer waited itself, for its receive or for buffers that are full.
_WAITED_FACTOR = 3
# Of receives that did not wait, one in fifty takes about as long a way as the quickest, by chance.
_MANY_WAITED = 0.25
# Wire time over the shortest receive: 1.3 to 1.8 ms over 0.7 to 0.9 ms for 8 MiB over sockets. Only
# a guess, for hops that nothing comes back over; it counts a hundredth of a measurement.
_WIRE_FACTOR, _WIRE_FACTOR_WEIGHT = 1.8, 0.1
# What even an empty message takes between two hosts.
_LATENCY_NS = 30_000.0
_UNBOUNDED = float("inf")
# Clocks drift by tens of millionths; stamps of host and device are laid together to some 0.1 ms. Of
# our recordings, any two runs of one program contradict each other by 20 ms and more.
_DRIFT, _STAMPS_NS = 1e-4, 1_000_000

# A clock may be wrong by hours; by a day, it is the trace that states a wrong time.
_FAR_NS = 86_400_000_000_000

Ends = tuple[int, int]
"""The rank that sends, and the one that receives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Clocks:
    """What to add to each rank's stamps, and how sure that is."""

    offset_ns: dict[int, int]
    uncertainty_ns: int


def align(transfers: Transfers, ranks: Iterable[int]) -> Clocks:
    """Lay all ranks on the clock of the first.

    Clocks that are far apart are first laid together by their first messages: doubles hold no
    nanoseconds of years.
    """
    names = sorted(ranks)
    apart = _far_apart(transfers, names)
    near = shift_transfers(transfers, Clocks(offset_ns=apart, uncertainty_ns=0))
    hops, scale = _by_ends(near), _ns_per_byte(near)
    as_stamped = dict.fromkeys(names, 0)
    widths = None if any(apart.values()) else _believable_widths(hops, scale, names)
    if widths is not None:
        return Clocks(offset_ns=as_stamped, uncertainty_ns=max(widths, default=0) // 2)
    fitted = _fit(hops, scale, names)
    if _contradictions(near, fitted.offset_ns) > _contradictions(near, as_stamped):
        fitted = replace(fitted, offset_ns=as_stamped)
    offset_ns = {rank: offset + apart[rank] for rank, offset in fitted.offset_ns.items()}
    return replace(fitted, offset_ns=offset_ns)


def _far_apart(transfers: Transfers, names: Sequence[int]) -> dict[int, int]:
    """Return what lays each rank's first message with the first rank's; nothing where it is near.

    A rank's messages begin within minutes of those of the others.
    """
    first: dict[int, int] = {}
    for ranks, start_ns in (
        (transfers.source, transfers.send_start_ns),
        (transfers.destination, transfers.receive_start_ns),
    ):
        for rank in np.unique(ranks).tolist():
            began = int(start_ns[ranks == rank].min())
            first[rank] = min(first.get(rank, began), began)
    origin = next((first[rank] for rank in names if rank in first), 0)
    ahead = {rank: first.get(rank, origin) - origin for rank in names}
    far = any(abs(shift) > _FAR_NS for shift in ahead.values())
    return {rank: -shift if far else 0 for rank, shift in ahead.items()}


def name_wrong(clocks: Clocks) -> list[Gap]:
    """Name each rank whose clock is off by more than clocks are, against the middle of all."""
    offsets = clocks.offset_ns
    middle = sorted(offsets.values())[len(offsets) // 2] if offsets else 0
    return [
        Gap(
            code=Code.CLOCK_OFF,
            message=f"its clock is {show_duration(abs(offset - middle))} "
            f"{'behind' if offset > middle else 'ahead of'} the others; corrected by its "
            f"messages, to within {show_duration(clocks.uncertainty_ns)}",
            hint="is it of another run? Else set the clocks of the hosts by NTP; a trace may also "
            "state a wrong base time",
            rank=rank,
        )
        for rank, offset in offsets.items()
        if abs(offset - middle) > CLOCKS_OFF_NS
    ]


def shift_transfers(transfers: Transfers, clocks: Clocks) -> Transfers:
    """Lay both sides of each transfer on one clock."""
    offset_ns = {
        "send": _offsets(clocks.offset_ns, transfers.source),
        "receive": _offsets(clocks.offset_ns, transfers.destination),
    }
    moments = [column.name for column in fields(transfers) if column.name.endswith("_ns")]
    return replace(
        transfers,
        **{name: getattr(transfers, name) + offset_ns[name.split("_")[0]] for name in moments},
    )


def _contradictions(transfers: Transfers, offset_ns: Mapping[int, int]) -> int:
    """Count the messages that would have arrived before they were sent."""
    arrived = transfers.receive_end_ns + _offsets(offset_ns, transfers.destination)
    sent = transfers.send_start_ns + _offsets(offset_ns, transfers.source)
    return int((arrived < sent).sum())


def _offsets(offset_ns: Mapping[int, int], rank: I32) -> I64:
    """Return what is to be added to the stamps of each of some ranks."""
    ranks = np.array(sorted(offset_ns), dtype=np.int64)
    offsets = np.array([offset_ns[known] for known in ranks.tolist()], dtype=np.int64)
    return offsets[np.searchsorted(ranks, rank)]


def _believable_widths(
    hops: Mapping[Ends, Transfers], scale: float, names: list[int]
) -> list[int] | None:
    """Return how far each clock could be off although it contradicts nothing; None if one does.

    A rank that is bounded from one side only is not believed if a receive shows that it can be
    estimated: a late clock would look just the same.
    """
    most = _bounds(hops, names)
    widths = []
    for row, rank in enumerate(names[1:], start=1):
        high, low = most[0, row], -most[row, 0]
        if low > 0 or high < 0:
            return None
        if high - low < _UNBOUNDED:
            widths.append(int(high - low))
        elif any(_waited(hop, scale).any() for ends, hop in hops.items() if ends[1] == rank):
            return None
    return widths


def _bounds(hops: Mapping[Ends, Transfers], names: Sequence[int]) -> F64:
    """Return by how much each clock can be ahead of each other one, over all ways of messages.

    Row and column are as in `names`.
    """
    row = {rank: number for number, rank in enumerate(names)}
    most = np.full((len(names), len(names)), _UNBOUNDED)
    np.fill_diagonal(most, 0.0)
    for (source, destination), hop in hops.items():
        most[row[source], row[destination]] = _quickest(hop)
    for middle in range(len(names)):
        np.minimum(most, most[:, middle, None] + most[None, middle, :], out=most)
    return most


def _fit(hops: Mapping[Ends, Transfers], scale: float, names: list[int]) -> Clocks:
    """Solve for all offsets and the wire factor at once, each hop weighted by its own wire."""
    told = [(ends, equation) for ends, hop in hops.items() for equation in _equations(hop, scale)]
    middles = _middles(hops, {ends for ends, _ in told})
    # Where nothing waited, two clocks that may agree are taken to; others are laid together.
    known = {ends for ends, _ in (*told, *middles)}
    others = []
    for ends, hop in hops.items():
        if not {ends, ends[::-1]} & known:
            quickest, wire = _quickest(hop), _wire(hop, scale)
            agree = 0 <= quickest <= CLOCKS_OFF_NS
            others.append(
                (ends, (0.0, 0.0, max(quickest, wire)) if agree else (quickest, wire, wire))
            )
    equations = [*told, *middles, *others]
    matrix = np.zeros((len(equations) + 1, len(names) + 1))
    target = np.zeros(len(equations) + 1)
    group = {rank: rank for rank in names}  # ranks that can be compared, by the lowest of them
    for row, ((source, destination), (measured, wire, unsure)) in enumerate(equations):
        matrix[row, names.index(source)] = -1.0 / unsure
        matrix[row, names.index(destination)] = 1.0 / unsure
        matrix[row, -1] = wire / unsure
        target[row] = measured / unsure
        low, high = sorted((group[source], group[destination]))
        group = {rank: low if lowest == high else lowest for rank, lowest in group.items()}
    least, most = _limits_of_wire_factor(hops, scale)
    matrix[-1, -1] = _WIRE_FACTOR_WEIGHT
    target[-1] = min(max(_WIRE_FACTOR, least), most) * _WIRE_FACTOR_WEIGHT
    ahead = np.linalg.lstsq(matrix, target, rcond=None)[0]
    off = np.abs(matrix @ ahead - target)[:-1] / np.abs(matrix[:-1, :-1]).max(axis=1, initial=1e-18)
    offsets = {
        rank: -round(float(ahead[row] - ahead[names.index(group[rank])]))
        for row, rank in enumerate(names)
    }
    unsure = max(off.max(initial=0.0), _ENDS_AGREE_NS, *(width for _, (_, _, width) in middles))
    return Clocks(offset_ns=offsets, uncertainty_ns=int(unsure))


def _middles(
    hops: Mapping[Ends, Transfers], told: Collection[Ends]
) -> list[tuple[Ends, tuple[float, float, float]]]:
    """Return the middle of what is possible, for ranks between which no receive waited visibly.

    As NTP does: the quickest message each way; what they take together is how unsure that is.
    """
    found = []
    for (source, destination), there in hops.items():
        back = hops.get((destination, source))
        known = (source, destination) in told or (destination, source) in told
        if back is None or known or source > destination:
            continue
        high, low = _quickest(there), -_quickest(back)
        found.append(((source, destination), ((high + low) / 2, 0.0, max((high - low) / 2, 1.0))))
    return found


def _limits_of_wire_factor(hops: Mapping[Ends, Transfers], scale: float) -> tuple[float, float]:
    """Return the least and the largest factor that the messages allow.

    No receive that waited ends before its send has sent everything. And all messages there and back
    take their wire time: what the quickest there and the quickest back take together is the same
    on any clocks, also where no receive waited.
    """
    least, most = 1.0, _UNBOUNDED
    for (source, destination), there in hops.items():
        waited = there.where(_waited(there, scale))
        if len(waited):
            sent = float((waited.send_end_ns - waited.send_start_ns).min())
            least = max(least, sent / _wire(there, scale))
        back = hops.get((destination, source))
        if back is not None and source < destination:
            way = _quickest(there) + _quickest(back)
            most = min(most, way / (_wire(there, scale) + _wire(back, scale)))
    return least, most


def _quickest(hop: Transfers) -> float:
    """Return the shortest time from a send's start to its receive's end, on their own clocks."""
    return float((hop.receive_end_ns - hop.send_start_ns).min())


def _by_ends(transfers: Transfers) -> dict[Ends, Transfers]:
    """Return the transfers of each pair of ranks and direction."""
    return {ends: transfers.where(np.sort(rows)) for ends, rows in rows_by_hop(transfers).items()}


def _equations(hop: Transfers, scale: float) -> list[tuple[float, float, float]]:
    """Return what a hop tells: (clock difference plus wire, wire, give or take) in ns."""
    told = []
    fused = hop.where(hop.fused)
    if len(fused) >= FEWEST_SAMPLES:
        ends = float(np.median(fused.receive_end_ns - fused.send_end_ns))
        told.append((ends, 0.0, float(_ENDS_AGREE_NS)))
    waited = hop.where(_waited(hop, scale))
    if len(waited):
        wire = _wire(hop, scale)
        told.append((_quickest(waited), wire, wire))
    return told


def _ns_per_byte(transfers: Transfers) -> float:
    """Return how long the quickest message took for each of its bytes."""
    length = _lengths(transfers)
    known = transfers.message_bytes > 0
    return float((length[known] / transfers.message_bytes[known]).min()) if known.any() else 0.0


def _lengths(transfers: Transfers) -> I64:
    """Return the shorter side of each message: the one that came last and did not wait."""
    received = transfers.receive_end_ns - transfers.receive_start_ns
    shorter: I64 = np.minimum(received, transfers.send_end_ns - transfers.send_start_ns)
    return shorter


def _wire(hop: Transfers, scale: float) -> float:
    """Return the shortest message of a hop; less, where that waited too: a small lone message."""
    shortest = float(_lengths(hop).min())
    size = float(hop.message_bytes.max())
    return max(min(shortest, max(scale * size, _LATENCY_NS)) if size > 0 else shortest, 1.0)


def _waited(hop: Transfers, scale: float) -> Flags:
    """Return which receives were there before the data.

    A copy out of a full buffer takes longer than the send into it did, and looks the same. But what
    waited began before its send, on whatever clock, and so takes longer than its way:

        way of each, beyond the quickest   0.0  0.1  0.1  0.0     received in 3 to 5: they waited
                                           0.0  3.1  6.2  1.4     received in 0.1: they did not
    """
    received: I64 = hop.receive_end_ns - hop.receive_start_ns
    sent: I64 = hop.send_end_ns - hop.send_start_ns
    wire = _wire(hop, scale)
    long: Flags = (received > _WAITED_FACTOR * wire) & (sent <= _WAITED_FACTOR * wire)
    if not long.any():
        return long
    way: I64 = hop.receive_end_ns - hop.send_start_ns
    waited: Flags = long & (way - way[long].min() + wire <= received)
    return waited if waited.sum() > _MANY_WAITED * long.sum() else np.zeros_like(long)


def find_mixed(
    ranks: Sequence[RankRecord],
    chain: Chain,
    transfers: Transfers,
    across_steps: Collection[Ends],
) -> Gap | None:
    """Say why the ranks of a pipeline cannot be of one run; None where they may be."""
    captured = {rank.rank: rank for rank in ranks if rank.rank in chain.ranks}
    names = [rank for rank in chain.ranks if rank in captured]
    worlds: dict[int, list[int]] = {}
    for rank, record in sorted(captured.items()):
        if record.trace.header.world_size:
            worlds.setdefault(record.trace.header.world_size, []).append(rank)
    if len(worlds) > 1:
        told = (f"rank {show_ranks(mine)} of {size}" for size, mine in sorted(worlds.items()))
        reason = f"their jobs had different numbers of ranks ({', '.join(told)})"
        return _mixed(names, set(), reason)
    pairs = list(pairwise(names))
    hops = [pair for both in pairs for pair in (both, both[::-1]) if pair not in across_steps]
    unlike = {frozenset(hop) for hop in hops if _sizes_differ(captured, *hop)}
    if unlike:
        return _mixed(names, unlike, "what one sends is not of the size that the other receives")
    inside = _surely_paired(captured, transfers, across_steps)
    apart = {frozenset(pair) for pair in pairs if contradict(inside, pair)}
    if apart or contradict(inside, names):
        return _mixed(names, apart, "no clock puts every receive after its send")
    return None


def contradict(transfers: Transfers, names: Sequence[int]) -> bool:
    """Tell whether going around some ranks, messages arrive before they were sent."""
    among = np.isin(transfers.source, names) & np.isin(transfers.destination, names)
    transfers = transfers.where(among)
    if not len(transfers):
        return False
    most = _bounds(_by_ends(transfers), names)
    own = transfers.where(transfers.source == transfers.source[0]).send_start_ns
    allowed = _STAMPS_NS + _DRIFT * float(own.max() - own.min())
    return bool((np.diag(most) < -allowed).any())


def _surely_paired(
    captured: Mapping[int, RankRecord], transfers: Transfers, across_steps: Collection[Ends]
) -> Transfers:
    """Return transfers of steps in which the one sends as often as the other receives.

    In a step in which messages are missing, those that are there may be paired wrongly.
    """

    def steps_of(rank: int, peer: int, *, sends: bool) -> Counter[int]:
        messages = captured[rank].messages
        return Counter(
            messages.step[(messages.peer == peer) & (messages.is_send == sends)].tolist()
        )

    sure = np.zeros(len(transfers), dtype=bool)
    for (source, destination), rows in rows_by_hop(transfers).items():
        if {source, destination} <= captured.keys() and (source, destination) not in across_steps:
            sent = steps_of(source, destination, sends=True)
            received = steps_of(destination, source, sends=False)
            even = [s for s, count in sent.items() if s >= 0 and received[s] == count]
            sure[rows] = np.isin(transfers.step[rows], even)
    return transfers.where(sure)


def _sizes_differ(captured: Mapping[int, RankRecord], source: int, destination: int) -> bool:
    sent, received = captured[source].messages, captured[destination].messages
    out = sent.message_bytes[sent.is_send & (sent.peer == destination)]
    into = received.message_bytes[~received.is_send & (received.peer == source)]
    sizes, others = set(out[out > 0].tolist()), set(into[into > 0].tolist())
    return bool(sizes and others) and not sizes & others


def _mixed(names: Sequence[int], apart: set[frozenset[int]], reason: str) -> Gap:
    groups: list[list[int]] = [[names[0]]]
    for left, right in pairwise(names):
        if frozenset((left, right)) in apart:
            groups.append([])
        groups[-1].append(right)
    who = " and ".join(numbered("rank", group) for group in groups)
    return Gap(
        code=Code.MIXED_RUNS,
        message=f"{who} are not of one run: {reason}",
        hint="give the traces of one run, captured together",
    )
