"""Sizes and times of probes in → what each hop does, and its verdict."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations, pairwise
from statistics import median, quantiles
from typing import Any

from debubble.errors import LogError, UsageError
from debubble.links.classes import LinkClass
from debubble.links.expectation import Hop
from debubble.links.hop_times import Fit, fit_line
from debubble.links.judge import (
    SLOW,
    SLOW_FOR_ITS_CLASS,
    Judgement,
    Past,
    judge_ratio,
    judge_time,
    unknown,
)
from debubble.units import NS_PER_S

_SMALLEST = 1024
_STEP = 4
# Fewer give no steady median.
FEWEST_SAMPLES = 20


def sizes_of(largest: int, job: int | None = None) -> tuple[int, ...]:
    """Return a ladder of sizes, each four times the one before, with the job's own among them."""
    if largest < _SMALLEST:
        raise UsageError(f"messages of {largest} bytes tell no bandwidth", hint="give 1MiB or more")
    sizes = {largest}
    size = _SMALLEST
    while size < largest:
        sizes.add(size)
        size *= _STEP
    return tuple(sorted(sizes | ({job} if job else set())))


def pairs_of(ranks: int, *, every: bool) -> tuple[Hop, ...]:
    """Return the pairs to be measured: neighbours, or all."""
    if ranks < 2:
        raise UsageError("one rank has no hops", hint="start two ranks or more")
    return tuple(combinations(range(ranks), 2) if every else pairwise(range(ranks)))


SCHEMA = "debubble.links.measured/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Seconds of some messages."""

    alone_s: float
    """A tenth of them are quicker, as in traces: what the wire takes with nothing beside it."""
    quick_s: float
    """A quarter of them are quicker."""
    median_s: float
    p95_s: float
    n: int


def times_of(seconds: Sequence[float]) -> Times:
    """Sum up the seconds of some messages, two or more."""
    quick, middle, _ = quantiles(seconds, n=4, method="inclusive")
    return Times(
        alone_s=quantiles(seconds, n=10, method="inclusive")[0],
        quick_s=quick,
        median_s=middle,
        p95_s=quantiles(seconds, n=20, method="inclusive")[-1],
        n=len(seconds),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """Messages of one size over one hop."""

    source: int
    destination: int
    size_bytes: int
    one_way: Times
    both_ways: Times | None
    """None where only one way was measured."""

    @property
    def hop(self) -> Hop:
        """The rank that sends and the rank that receives."""
        return self.source, self.destination


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a rank runs."""

    rank: int
    host: str
    device: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A hop test."""

    backend: str
    job_bytes: int | None
    """The size that the job itself sends."""
    places: tuple[Place, ...]
    rungs: tuple[Rung, ...]
    second: tuple[Rung, ...]
    """Slow hops once more, and their ends with other partners."""


def write_measured(measured: Measured) -> str:
    """Write a test as JSON."""
    return json.dumps({"schema": SCHEMA, **asdict(measured)}, indent=1)


def is_measured(data: Any) -> bool:
    """Tell whether a hop test wrote this."""
    return isinstance(data, dict) and data.get("schema") == SCHEMA


def read_measured(data: dict[str, Any], file: str) -> Measured:
    """Read a test."""
    try:
        return Measured(
            backend=str(data["backend"]),
            job_bytes=None if data["job_bytes"] is None else int(data["job_bytes"]),
            places=tuple(
                Place(rank=int(one["rank"]), host=str(one["host"]), device=str(one["device"]))
                for one in data["places"]
            ),
            rungs=tuple(_rungs(data["rungs"])),
            second=tuple(_rungs(data["second"])),
        )
    except (KeyError, OverflowError, TypeError, ValueError) as error:
        raise LogError(
            f"a hop test that is damaged ({type(error).__name__}: {error})",
            hint="run it again: torchrun … -m debubble.links",
            file=file,
        ) from error


def _rungs(rows: Iterable[dict[str, Any]]) -> Iterable[Rung]:
    for row in rows:
        yield Rung(
            source=int(row["source"]),
            destination=int(row["destination"]),
            size_bytes=int(row["size_bytes"]),
            one_way=_times(row["one_way"]),
            both_ways=None if row["both_ways"] is None else _times(row["both_ways"]),
        )


def _times(row: dict[str, Any]) -> Times:
    return Times(
        alone_s=float(row.get("alone_s", row["quick_s"])),
        quick_s=float(row["quick_s"]),
        median_s=float(row["median_s"]),
        p95_s=float(row["p95_s"]),
        n=int(row["n"]),
    )


# Sizes of at least this share of the largest tell bandwidth; below, latency decides.
_LARGE = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveHop:
    """One direction between two ranks, measured."""

    hop: Hop
    rungs: tuple[Rung, ...]
    """By size."""
    fit: Fit | None
    judgement: Judgement
    ill: str | None
    """Of a slow hop: `link`, `rank 3`, or None where that could not be told."""

    @property
    def bytes_per_s(self) -> float:
        """Of the largest messages, one way."""
        return self.rungs[-1].size_bytes / self.rungs[-1].one_way.alone_s

    @property
    def both_ways_bytes_per_s(self) -> float | None:
        """The same with messages both ways at once: what one direction carries."""
        last = self.rungs[-1]
        return last.size_bytes / last.both_ways.median_s if last.both_ways else None


def judge_measured(
    measured: Measured,
    *,
    classes: Mapping[Hop, LinkClass] | None = None,
    history: Mapping[Hop, Past] | None = None,
) -> tuple[LiveHop, ...]:
    """Judge each hop by its peers, its past, and its kind of wire where that is stated."""
    ladders, again = _ladders(measured.rungs), _ladders(measured.second)
    judged = {}
    for hop in ladders:
        known = measured.places, (classes or {}).get(hop), (history or {}).get(hop)
        judged[hop] = _judge(hop, ladders, *known)
        if judged[hop].slow and hop in again:
            # Slow once may have been the machine; slow twice is the hop.
            judged[hop] = _judge(hop, ladders | {hop: again[hop]}, *known)
    return tuple(
        LiveHop(
            hop=hop,
            rungs=rungs,
            fit=fit_line(
                [rung.size_bytes for rung in rungs],
                [rung.one_way.alone_s * NS_PER_S for rung in rungs],
            ),
            judgement=judged[hop],
            ill=_who_is_ill(hop, again, ladders, measured.places) if judged[hop].slow else None,
        )
        for hop, first in ladders.items()
        for rungs in [_at_best(first, again.get(hop, ()))]
    )


def _at_best(first: Sequence[Rung], again: Sequence[Rung]) -> tuple[Rung, ...]:
    """Let a message alone take what it took in the quieter of two passes: load only adds to it."""
    second = {rung.size_bytes: rung.one_way.alone_s for rung in again}
    return tuple(
        replace(
            rung,
            one_way=replace(
                rung.one_way,
                alone_s=min(rung.one_way.alone_s, second.get(rung.size_bytes, math.inf)),
            ),
        )
        for rung in first
    )


def second_pass(measured: Measured) -> tuple[Hop, ...]:
    """Return slow hops, to be measured again, and their ends with others that are well."""
    slow = [one.hop for one in judge_measured(measured) if one.judgement.slow]
    ill = {rank for hop in slow for rank in hop}
    ranks = sorted(place.rank for place in measured.places)
    found: list[Hop] = list(slow)
    for sender, receiver in slow:
        others = [rank for rank in ranks if rank not in ill]
        others = others or [rank for rank in ranks if rank not in {sender, receiver}]
        if others:
            here, there = _nearest(others, sender), _nearest(others, receiver)
            found += [(sender, here), (there, receiver)]
    return tuple(dict.fromkeys(found))


def _nearest(ranks: Sequence[int], to: int) -> int:
    return min(ranks, key=lambda rank: (abs(rank - to), rank))


def _ladders(rungs: Iterable[Rung]) -> dict[Hop, tuple[Rung, ...]]:
    found: dict[Hop, list[Rung]] = {}
    for rung in rungs:
        found.setdefault(rung.hop, []).append(rung)
    return {
        hop: tuple(sorted(mine, key=lambda rung: rung.size_bytes)) for hop, mine in found.items()
    }


def _judge(
    hop: Hop,
    ladders: Mapping[Hop, Sequence[Rung]],
    places: Sequence[Place],
    wire: LinkClass | None,
    past: Past | None,
) -> Judgement:
    large = _large(ladders[hop])
    found: list[Judgement] = []
    before = [past.time_ns(rung.size_bytes) for rung in large] if past else []
    ratios = [
        rung.one_way.median_s * NS_PER_S / then
        for rung, then in zip(large, before, strict=bool(before))
        if then
    ]
    if ratios:
        found.append(judge_time(median(ratios), 1.0, "history"))
    by_peers = _by_peers(hop, ladders, places)
    if by_peers is not None:
        found.append(by_peers)
    if wire is not None:
        last = large[-1]
        expected = last.size_bytes / wire.bytes_per_s
        found.append(
            judge_time(last.one_way.median_s / expected, 1.0, "class", limit=SLOW_FOR_ITS_CLASS)
        )
    slow = [one for one in found if one.slow]
    if slow:
        return max(slow, key=lambda one: one.times or 0.0)
    return found[0] if found else unknown("no peers, no history and no --class to hold it against")


def _large(rungs: Sequence[Rung]) -> list[Rung]:
    most = rungs[-1].size_bytes
    return [rung for rung in rungs if rung.size_bytes >= _LARGE * most]


def _by_peers(
    hop: Hop, ladders: Mapping[Hop, Sequence[Rung]], places: Sequence[Place]
) -> Judgement | None:
    """Hold the large sizes against the middle of what hops over the same kind of wire take.

    As with traces, nearly all messages must be slow: on a noisy machine the peers' medians rise,
    and a hop's quick messages stay below them. And it must be their size that makes them so: where
    ranks wake up late, the smallest messages take as long as the large ones.
    """
    at_least = ladders[hop][0].one_way.median_s if len(ladders[hop]) > 1 else 0.0
    peers = [
        rungs
        for other, rungs in ladders.items()
        if other != hop and _between_hosts(other, places) == _between_hosts(hop, places)
    ]
    typical, quick = [], []
    for rung in _large(ladders[hop]):
        others = sorted(
            one.one_way.median_s
            for rungs in peers
            for one in rungs
            if one.size_bytes == rung.size_bytes
        )
        if others:
            usual = others[(len(others) - 1) // 2]
            typical.append(rung.one_way.median_s / usual)
            quick.append((rung.one_way.quick_s - at_least) / usual)
    if not typical:
        return None
    return judge_ratio(median(typical), slow=median(quick) > SLOW, against="peers")


def _between_hosts(hop: Hop, places: Sequence[Place]) -> bool:
    host = {place.rank: place.host for place in places}
    return host.get(hop[0]) != host.get(hop[1])


def _who_is_ill(
    hop: Hop,
    again: Mapping[Hop, Sequence[Rung]],
    ladders: Mapping[Hop, Sequence[Rung]],
    places: Sequence[Place],
) -> str | None:
    """Say whether an end is slow with others, too, in the same direction, and about as slow.

    On a busy machine a partner may look slow for a while, but not in all its messages: that is no
    ill rank.
    """
    every = {
        other: _at_best(again.get(other, ladders.get(other, ())), ladders.get(other, ()))
        for other in (*ladders, *again)
    }
    own = _by_peers(hop, every, places)
    limit = math.sqrt(own.times) if own and own.times else SLOW
    sends = [other for other in every if other[0] == hop[0] and other != hop]
    takes = [other for other in every if other[1] == hop[1] and other != hop]
    ill = [
        f"rank {rank}"
        for rank, others in ((hop[0], sends), (hop[1], takes))
        if others and all(_is_slow(other, every, places, limit) for other in others)
    ]
    if ill:
        return " and ".join(ill)
    return "link" if sends and takes else None


def _is_slow(
    hop: Hop, ladders: Mapping[Hop, Sequence[Rung]], places: Sequence[Place], limit: float
) -> bool:
    found = _by_peers(hop, ladders, places)
    return found is not None and found.slow and _times_alone(hop, ladders, places) > limit


def _times_alone(hop: Hop, ladders: Mapping[Hop, Sequence[Rung]], places: Sequence[Place]) -> float:
    """Return how many times as long as on its peers the largest message takes by itself."""
    last = ladders[hop][-1]
    others = sorted(
        rung.one_way.alone_s
        for other, rungs in ladders.items()
        if other != hop and _between_hosts(other, places) == _between_hosts(hop, places)
        for rung in rungs
        if rung.size_bytes == last.size_bytes
    )
    return last.one_way.alone_s / others[(len(others) - 1) // 2] if others else 1.0
