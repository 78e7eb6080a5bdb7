"""What hops take, and what others say they should, in → healthy, slow or unknown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from debubble.links.classes import LinkClass
from debubble.links.expectation import Hop, middle_of_others
from debubble.links.hop_times import FEWEST, Fit, HopTimes
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
    peers = {one.hop: _Ratios.of(one, usual) for one in hops}
    return {
        one.hop: _decide(
            one,
            [
                _by_past(one, history.get(one.hop)),
                _by_peers(peers[one.hop], peers.get(one.hop[::-1]), alone.get(one.hop, 1.0)),
                _by_class(one, classes.get(one.hop)),
            ],
        )
        for one in hops
    }


def _decide(hop: HopTimes, found: Sequence[Judgement | None]) -> Judgement:
    if hop.figures.count < FEWEST:
        return unknown("too few messages to tell")
    told = [one for one in found if one is not None]
    slow = [one for one in told if one.slow]
    if slow:
        return max(slow, key=lambda one: one.times or 0.0)
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


def judge_ratio(times: float, *, slow: bool, against: str) -> Judgement:
    """Put a verdict that was made into words."""
    of = {"history": "before", "peers": "its peers", "class": "its kind of wire should"}[against]
    return Judgement(
        verdict=Verdict.SLOW if slow else Verdict.HEALTHY,
        against=against,
        times=times,
        why=f"takes {times:.1f} times as long as {of}",
    )


def _by_past(hop: HopTimes, past: Past | None) -> Judgement | None:
    before = past.time_ns(hop.figures.message_bytes) if past else None
    if before is None or hop.alone_ns is None:
        return None
    return judge_time(hop.alone_ns, before, "history")


def _by_class(hop: HopTimes, wire: LinkClass | None) -> Judgement | None:
    if wire is None or hop.alone_ns is None or hop.figures.message_bytes <= 0:
        return None
    expected = hop.figures.message_bytes / wire.bytes_per_s * 1e9
    return judge_time(hop.alone_ns, expected, "class", limit=SLOW_FOR_ITS_CLASS)


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
    dragged = _slow(own.exchanged) and other_way is not None and _is_dragged(own, other_way)
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


def _is_dragged(own: _Ratios, other_way: _Ratios) -> bool:
    """Tell by the messages outside exchanges whether it is the other direction that is slow."""
    if min(len(own.alone), len(other_way.alone)) < 2:
        return False
    return bool(np.median(own.alone) < SLOW < np.median(other_way.alone))


def _slow(ratios: F64) -> bool:
    """Nearly all have to be slow; where they are few, all of them."""
    share = _NEARLY_ALL if len(ratios) >= FEWEST else 0.0
    return len(ratios) > 0 and bool(np.quantile(ratios, share) > SLOW)


def _usual(hops: Sequence[HopTimes], wires: Mapping[Hop, str]) -> dict[tuple[Hop, str], float]:
    """Return what messages of each hop and kind should take, by its peers where it has any.

    Peers have messages as large, over the same kind of wire.
    """
    medians: dict[_Alike, dict[Hop, float]] = {}
    for one in hops:
        for kind, lengths in one.lengths:
            of_hops = medians.setdefault(_alike(one, kind, wires), {})
            if len(lengths) >= 2:
                of_hops[one.hop] = max(float(np.median(lengths)), 1.0)
    in_order = {alike: sorted(of_hops.values()) for alike, of_hops in medians.items()}
    found = {}
    for one in hops:
        for kind, _ in one.lengths:
            alike = _alike(one, kind, wires)
            middle = middle_of_others(in_order[alike], medians[alike].get(one.hop))
            if middle is not None:
                found[one.hop, kind] = middle
    return found


def _alone(hops: Sequence[HopTimes], wires: Mapping[Hop, str]) -> dict[Hop, float]:
    """Return how many times as long as its peers' one message takes with the wire to itself.

    Only where enough found their receiver waiting.
    """
    times: dict[_Alike, dict[Hop, float]] = {}
    for one in hops:
        if one.alone_ns is not None and one.waited >= FEWEST:
            times.setdefault(_alike(one, "alone", wires), {})[one.hop] = max(one.alone_ns, 1.0)
    found = {}
    for of_hops in times.values():
        in_order = sorted(of_hops.values())
        for hop, own in of_hops.items():
            middle = middle_of_others(in_order, own)
            if middle is not None:
                found[hop] = own / middle
    return found


_Alike = tuple[int, str | None, str]
"""Bytes of messages, the kind of wire, and what messages met."""


def _alike(hop: HopTimes, kind: str, wires: Mapping[Hop, str]) -> _Alike:
    return hop.figures.message_bytes, wires.get(hop.hop), kind
