"""What hops take, and what others say they should, in → healthy, slow or unknown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from debubble.links.classes import LinkClass
from debubble.links.hop_times import FEWEST, Fit, Hop, HopTimes, middle_of_others
from debubble.timeline.model import F64

# A hop is slow from so many times what it should take. Healthy hops of the recorded runs differ by
# up to 1.4, and so do two runs of one hop.
SLOW = 1.5
# So must its messages, from this share on, counted from the quickest: tails make no slow hop.
_NEARLY_ALL = 0.25
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
) -> dict[Hop, Judgement]:
    """Judge each hop by its own past, by its peers, and by its kind of wire where that is stated.

    What is slow by any of them is slow; what is healthy by one of them and slow by none is healthy.
    """
    usual, alone = _usual(hops, wires), _alone(hops, wires)
    peers = {times.hop: _Ratios.of(times, usual) for times in hops}
    judged = {}
    for times in hops:
        hop, size = times.hop, times.figures.message_bytes
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

    @classmethod
    def of(cls, hop: HopTimes, usual: Mapping[tuple[Hop, str], float]) -> _Ratios:
        found: dict[bool, list[F64]] = {False: [np.zeros(0)], True: [np.zeros(0)]}
        for kind, own in hop.lengths:
            if (hop.hop, kind) in usual:
                found[kind == "exchange"].append(own / usual[hop.hop, kind])
        return cls(alone=np.concatenate(found[False]), exchanged=np.concatenate(found[True]))

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
    if dragged:
        return replace(judged, dragged=True, why="its exchanges wait for the other direction")
    if alone >= _SLOW_ALONE and np.median(ratios) >= _MOST_AS_WELL:
        return judge_ratio(alone, slow=True, against="peers")
    return judged


def _slow(ratios: F64) -> bool:
    """Nearly all have to be slow; where they are few, all of them."""
    share = _NEARLY_ALL if len(ratios) >= FEWEST else 0.0
    return len(ratios) > 0 and bool(np.quantile(ratios, share) > SLOW)


def _usual(hops: Sequence[HopTimes], wires: Mapping[Hop, str]) -> dict[tuple[Hop, str], float]:
    """Return what messages of each hop and kind should take, by its peers where it has any.

    Peers have messages as large, over the same kind of wire.
    """
    medians: dict[_Alike, dict[Hop, float]] = {}
    for times in hops:
        for kind, lengths in times.lengths:
            of_hops = medians.setdefault(_alike(times, kind, wires), {})
            if len(lengths) >= 2:
                of_hops[times.hop] = max(float(np.median(lengths)), 1.0)
    in_order = {alike: sorted(of_hops.values()) for alike, of_hops in medians.items()}
    found = {}
    for times in hops:
        for kind, _ in times.lengths:
            alike = _alike(times, kind, wires)
            middle = middle_of_others(in_order[alike], medians[alike].get(times.hop))
            if middle is not None:
                found[times.hop, kind] = middle
    return found


def _alone(hops: Sequence[HopTimes], wires: Mapping[Hop, str]) -> dict[Hop, float]:
    """Return how many times as long as its peers' one message takes with the wire to itself.

    Only where enough found their receiver waiting.
    """
    alone: dict[_Alike, dict[Hop, float]] = {}
    for times in hops:
        if times.alone_ns is not None and times.waited >= FEWEST:
            alike = _alike(times, "alone", wires)
            alone.setdefault(alike, {})[times.hop] = max(times.alone_ns, 1.0)
    found = {}
    for of_hops in alone.values():
        in_order = sorted(of_hops.values())
        for hop, own in of_hops.items():
            middle = middle_of_others(in_order, own)
            if middle is not None:
                found[hop] = own / middle
    return found


def _alike(hop: HopTimes, kind: str, wires: Mapping[Hop, str]) -> _Alike:
    return hop.figures.message_bytes, wires.get(hop.hop), kind
