"""What hops take, and what others say they should, in → healthy, slow or unknown.

A device, a topology or a word of the user tells what kind of wire a hop is, and what that can do.
Rates are one direction's, of point-to-point messages sent by kernels as NCCL does. Copy engines are
quicker, so their figures are never held against these.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from debubble.errors import UsageError
from debubble.links.hop_times import (
    FEWEST,
    Fit,
    Hop,
    HopTimes,
    middle_of_others,
    usual_of_others,
)
from debubble.simulate.costs.wire_pools import SLOW
from debubble.timeline.model import F64, RankTimeline, may_share


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkClass:
    """A kind of wire."""

    name: str
    words: str
    line_bytes_per_s: float
    """What the standard says."""
    bytes_per_s: float
    """What large messages of a healthy one reach."""


GB = 1e9
# Line rates from the standards. What healthy ones reach: NCCL's own model of NVLink (20.0, 20.6 and
# 40.1 GB/s a link); acceptance limits that operators of such machines publish for PCIe and
# InfiniBand; for Ethernet and sockets, nine tenths of the line. In GB/s: the line, what is reached.
CLASSES = {
    name: LinkClass(name=name, words=words, line_bytes_per_s=line * GB, bytes_per_s=reached * GB)
    for name, words, line, reached in (
        ("nvlink3", "NVLink 3, 12 links (A100)", 300, 230),
        ("nvlink4", "NVLink 4, 18 links (H100, H200)", 450, 335),
        ("nvlink4-h800", "NVLink 4, 8 links (H800)", 200, 160),
        ("nvlink5", "NVLink 5, 18 links (B200)", 900, 722),
        ("pcie4", "PCIe 4, 16 lanes", 31, 21),
        ("pcie5", "PCIe 5, 16 lanes", 63, 48),
        ("ib-edr", "InfiniBand EDR, 100 Gb/s", 12.5, 12.0),
        ("ib-hdr", "InfiniBand HDR, 200 Gb/s", 25, 22.5),
        ("ib-ndr", "InfiniBand NDR, 400 Gb/s", 50, 45),
        ("ib-xdr", "InfiniBand XDR, 800 Gb/s", 100, 90),
        ("roce-100", "RoCE, 100 Gb/s", 12.5, 11.2),
        ("roce-200", "RoCE, 200 Gb/s", 25, 22.5),
        ("roce-400", "RoCE, 400 Gb/s", 50, 45),
        ("ethernet-10", "TCP over Ethernet, 10 Gb/s", 1.25, 1.1),
        ("ethernet-25", "TCP over Ethernet, 25 Gb/s", 3.125, 2.8),
        ("ethernet-100", "TCP over Ethernet, 100 Gb/s", 12.5, 5.0),
        ("sockets", "sockets on one machine", 10, 1.0),
    )
}
_NVLINK_OF = {
    "H800": "nvlink4-h800",
    "A100": "nvlink3",
    "H100": "nvlink4",
    "H200": "nvlink4",
    "B200": "nvlink5",
}
_WITHOUT_NVLINK = ("PCIe", "NVL")


def find_class(name: str) -> LinkClass:
    """Return the kind of wire of that name."""
    if name not in CLASSES:
        raise UsageError(f"no kind of wire is called {name!r}", hint=f"one of {', '.join(CLASSES)}")
    return CLASSES[name]


def nvlink_of(device_name: str) -> LinkClass | None:
    """Return the NVLink of a device, where its name tells."""
    if any(word in device_name for word in _WITHOUT_NVLINK):
        return None
    found = next((name for device, name in _NVLINK_OF.items() if device in device_name), None)
    return CLASSES[found] if found else None


def guess_class(here: RankTimeline, there: RankTimeline) -> LinkClass | None:
    """Guess a hop's wire from its devices: two of one host, of a kind that has NVLink.

    A guess names a wire, and says what it could do. It never makes a verdict: how devices are wired
    and what the transport takes is not in a trace.
    """
    if here.device[0] != there.device[0] or may_share((here, there)):
        return None
    if here.device_name != there.device_name or min(here.device[1], there.device[1]) < 0:
        return None
    return nvlink_of(here.device_name)


def wires_between(ranks: Sequence[RankTimeline]) -> dict[Hop, str]:
    """Tell hops inside a host from those between hosts; no others than these are peers."""
    if not all(rank.device[0] for rank in ranks) or len({rank.device[0] for rank in ranks}) < 2:
        return {}
    return {
        (here.rank, there.rank): "inside" if here.device[0] == there.device[0] else "between"
        for here in ranks
        for there in ranks
        if here is not there
    }


_PROGRAM = "./build/sendrecv_perf"
# Enough iterations for a steady mean, after enough to set everything up.
_ITERATIONS = "-n 50 -w 10"
_UNKNOWN_SIZE = "-b 8 -e 64M -f 2"


_DEVICES_A_HOST = 8


def nccl_command(here: RankTimeline, there: RankTimeline, message_bytes: int) -> str:
    """Write the command for two ranks: messages both ways at once, at the job's own size."""
    size = f"-b {message_bytes} -e {message_bytes}" if message_bytes > 0 else _UNKNOWN_SIZE
    out = f"-J hop_{here.rank}_{there.rank}.json"
    words = f"{size} {_ITERATIONS} {out}"
    (host, device), (other_host, other_device) = here.device, there.device
    if host != other_host:
        hosts = shlex.quote(f"{host},{other_host}")
        devices = (
            f"-x NCCL_TESTS_DEVICE={device} " if device == other_device and device >= 0 else ""
        )
        return f"mpirun -np 2 -H {hosts} {devices}{_PROGRAM} -g 1 {words}"
    if may_share((here, there)) or min(device, other_device) < 0:
        # Ranks that each see one device do not tell which of the host's it is: on a single host
        # it is mostly that of their number.
        numbers = [
            str(rank) if max(here.rank, there.rank) < _DEVICES_A_HOST else f"DEVICE_OF_RANK_{rank}"
            for rank in (here.rank, there.rank)
        ]
        return f"CUDA_VISIBLE_DEVICES={','.join(numbers)} {_PROGRAM} -g 2 {words}"
    return f"CUDA_VISIBLE_DEVICES={device},{other_device} {_PROGRAM} -g 2 {words}"


# Of a slow hop the messages are slow from this share on, counted from the quickest: tails make no
# slow hop.
NEARLY_ALL = 0.25
# Where bad moments of other hops hide it, what a message takes with the wire to itself tells a slow
# hop, if most of its messages take longer, too. No healthy hop of 52 recorded runs shows both: at
# most 2.1 with 0.7, and 1.5 with 1.4.
_SLOW_ALONE, _MOST_AS_WELL = 2.0, 1.25
# Messages that have their like on other hops; two may both be of the tail.
_FEWEST_RATIOS = 3
# Against what its kind of wire can do, half is slow: tables are of large messages alone.
SLOW_FOR_ITS_CLASS = 2.0

_Alike = tuple[int, str | None, str]
"""Bytes of messages, the kind of wire, and what messages met."""


class Verdict(StrEnum):
    """What is said of a hop."""

    HEALTHY = "healthy"
    SLOW = "slow"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """A verdict, and what it rests on."""

    verdict: Verdict
    against: str | None
    """`history`, `peers` or `class`: what told; None where nothing did."""
    times: float | None
    """How many times as long as it should its messages take, by what told."""
    why: str
    dragged: bool = False
    """Only its exchanges are slow, and it is the other direction that makes them so."""

    @property
    def slow(self) -> bool:
        """Whether the hop is slow."""
        return self.verdict == Verdict.SLOW


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """What earlier answers tell of a hop: the time of one message, by size."""

    times_ns: Mapping[int, float]
    fit: Fit | None

    def time_ns(self, size: int) -> float | None:
        """Return what a message of this size took, by the fit where none was of this size."""
        if size in self.times_ns:
            return self.times_ns[size]
        return self.fit.time_ns(size) if self.fit else None


def judge_hops(
    hops: Sequence[HopTimes],
    *,
    wires: Mapping[Hop, str],
    classes: Mapping[Hop, LinkClass],
    history: Mapping[Hop, Past],
    beside: Sequence[HopTimes] = (),
) -> dict[Hop, Judgement]:
    """Judge each hop by its own past, by its peers, and by its kind of wire where that is stated.

    What is slow by any of them is slow; what is healthy by one of them and slow by none is healthy.
    Hops of replicas `beside` are peers as well: in a pipeline of two an exchange has no other.
    """
    known = [times for times in hops if times.told]
    all_known = [*known, *(times for times in beside if times.told)]
    usual, alone = _usual(all_known, wires), _alone(all_known, wires)
    peers = {times.hop: _Ratios.of(times, usual) for times in known}
    judged = {}
    for times in hops:
        hop, size = times.hop, times.figures.message_bytes
        if not times.told:
            judged[hop] = unknown("when its messages left was not recorded")
            continue
        if times.figures.count < FEWEST:
            judged[hop] = unknown("too few messages to tell")
            continue
        found: list[Judgement | None] = []
        past, wire = history.get(hop), classes.get(hop)
        before = past.time_ns(size) if past else None
        if times.alone_ns is not None and before is not None:
            found.append(judge_time(times.alone_ns, before, "history"))
        found.append(_by_peers(peers[hop], peers.get(hop[::-1]), alone.get(hop, 1.0)))
        if times.alone_ns is not None and wire is not None and size > 0:
            found.append(judge_by_class(times.alone_ns, size, wire))
        judged[hop] = decide(found)
    return judged


def decide(found: Sequence[Judgement | None]) -> Judgement:
    """Return the worst of what tells slow; else the first that tells anything."""
    told = [judgement for judgement in found if judgement is not None]
    slow = [judgement for judgement in told if judgement.slow]
    if slow:
        return max(slow, key=lambda judgement: judgement.times or 0.0)
    return told[0] if told else unknown("no peers, no history and no --class to hold it against")


def unknown(why: str) -> Judgement:
    """Say that nothing can be said."""
    return Judgement(verdict=Verdict.UNKNOWN, against=None, times=None, why=why)


def judge_time(
    time_ns: float, expected_ns: float, against: str, *, limit: float = SLOW
) -> Judgement:
    """Hold one figure, itself made of many messages, against another."""
    times = time_ns / max(expected_ns, 1.0)
    return judge_ratio(times, slow=times > limit, against=against)


def judge_by_class(time_ns: float, size: int, wire: LinkClass) -> Judgement:
    """Hold a message's time against what its kind of wire can do."""
    expected = size / wire.bytes_per_s * 1e9
    return judge_time(time_ns, expected, "class", limit=SLOW_FOR_ITS_CLASS)


def judge_ratio(times: float, *, slow: bool, against: str) -> Judgement:
    """Put a verdict that was made into words."""
    of = {"history": "before", "peers": "its peers", "class": "its kind of wire should"}[against]
    return Judgement(
        verdict=Verdict.SLOW if slow else Verdict.HEALTHY,
        against=against,
        times=times,
        why=f"takes {times:.1f} times as long as {of}",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ratios:
    """What each message of a hop took, against those of its peers that met the same.

    Messages that came before they were asked for count: what is seen of them is no wire, but on a
    slow hop it lasts as many times as long.
    """

    alone: F64
    exchanged: F64
    as_long: bool
    """Its exchanges last about as long as its messages outside of them, or longer."""

    @classmethod
    def of(cls, hop: HopTimes, usual: Mapping[tuple[Hop, str, int], float]) -> _Ratios:
        found: dict[bool, list[F64]] = {False: [np.zeros(0)], True: [np.zeros(0)]}
        largest: dict[bool, list[F64]] = {False: [np.zeros(0)], True: [np.zeros(0)]}
        for kind, size, own in hop.lengths:
            if (hop.hop, kind, size) in usual:
                found[kind == "exchange"].append(own / usual[hop.hop, kind, size])
            if size == hop.figures.message_bytes:
                largest[kind == "exchange"].append(own)
        both, one = np.concatenate(largest[True]), np.concatenate(largest[False])
        return cls(
            alone=np.concatenate(found[False]),
            exchanged=np.concatenate(found[True]),
            as_long=bool(len(both) and len(one) and SLOW * np.median(both) >= np.median(one)),
        )

    @property
    def every(self) -> F64:
        return np.concatenate((self.alone, self.exchanged))


def _by_peers(own: _Ratios, other_way: _Ratios | None, alone: float) -> Judgement | None:
    """Judge a hop by its peers; an exchange alone does not tell which of its two ways is slow."""
    ratios = own.every
    if len(ratios) < _FEWEST_RATIOS:
        return None
    # Messages outside exchanges tell whether it is the other direction that is slow.
    dragged = (
        other_way is not None
        and _slow(own.exchanged)
        and min(len(own.alone), len(other_way.alone)) >= 2
        and bool(np.median(own.alone) < SLOW < np.median(other_way.alone))
    )
    if dragged:
        ratios = own.alone
    judged = judge_ratio(float(np.median(ratios)), slow=_slow(ratios), against="peers")
    if judged.slow:
        return judged
    # Exchanges that others' hold up as well say nothing against what those outside exchanges say.
    if not dragged and _slow(own.alone) and len(own.alone) >= _FEWEST_RATIOS and own.as_long:
        return judge_ratio(float(np.median(own.alone)), slow=True, against="peers")
    if dragged:
        return replace(judged, dragged=True, why="its exchanges wait for the other direction")
    if alone >= _SLOW_ALONE and np.median(ratios) >= _MOST_AS_WELL:
        return judge_ratio(alone, slow=True, against="peers")
    return judged


def _slow(ratios: F64) -> bool:
    """Nearly all have to be slow; where they are few, all of them."""
    share = NEARLY_ALL if len(ratios) >= FEWEST else 0.0
    return len(ratios) > 0 and bool(np.quantile(ratios, share) > SLOW)


def _usual(hops: Sequence[HopTimes], wires: Mapping[Hop, str]) -> dict[tuple[Hop, str, int], float]:
    """Return what messages of each hop, kind and size should take, by its peers where it has any.

    Peers have messages as large, over the same kind of wire.
    """
    medians: dict[_Alike, dict[Hop, float]] = {}
    for times in hops:
        for kind, size, lengths in times.lengths:
            of_hops = medians.setdefault((size, wires.get(times.hop), kind), {})
            if len(lengths) >= 2:
                of_hops[times.hop] = max(float(np.median(lengths)), 1.0)
    back = {times.hop: times.hop[::-1] for times in hops}
    usual = {
        alike: usual_of_others(of_hops, back if alike[2] == "exchange" else {})
        for alike, of_hops in medians.items()
    }
    found = {}
    for times in hops:
        for kind, size, lengths in times.lengths:
            wire = wires.get(times.hop)
            middle = usual[size, wire, kind].get(times.hop)
            if kind == "early" and len(lengths):
                # What is left of a message takes no longer than a whole one of its peers.
                waited = medians.get((size, wire, "waited"), {})
                others = sorted(own for hop, own in waited.items() if hop != times.hop)
                whole = middle_of_others(others, None)
                if whole is not None and np.median(lengths) > SLOW * whole:
                    middle = whole if middle is None else min(middle, whole)
            if middle is not None:
                found[times.hop, kind, size] = middle
    return found


def _alone(hops: Sequence[HopTimes], wires: Mapping[Hop, str]) -> dict[Hop, float]:
    """Return how many times as long as its peers' one message takes with the wire to itself.

    Only where enough found their receiver waiting.
    """
    alone: dict[_Alike, dict[Hop, float]] = {}
    for times in hops:
        if times.alone_ns is not None and times.waited >= FEWEST:
            alike = times.figures.message_bytes, wires.get(times.hop), "alone"
            alone.setdefault(alike, {})[times.hop] = max(times.alone_ns, 1.0)
    return {
        hop: of_hops[hop] / usual
        for of_hops in alone.values()
        for hop, usual in usual_of_others(of_hops, {}).items()
    }
