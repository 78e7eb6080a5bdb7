"""A hop test, started on this machine or read from its file, in → a verdict for each hop.

Each hop is a ladder of rungs, one a message size. It is held against its past, its peers and its
kind of wire; a slow one is measured once more, and its ends with other partners, so that a slow
link can be told from a slow rank:

```
slow: 2 → 3     again 2 → 3   2 → 1   1 → 3      ill
                slow          well    well       the link
                slow          well    slow       rank 3
                well          …       …          nobody: it was the machine
```
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import msgspec

from debubble.errors import LinkTestError, LogError, MissingExtra, UsageError
from debubble.links.hop_times import (
    Hop,
    Judgement,
    LinkClass,
    Past,
    TestedHop,
    fit_line,
    judge,
    judge_ratio,
    middle_of_others,
)
from debubble.simulate.costs.wire_pools import SLOW
from debubble.units import NS_PER_S

SCHEMA = "debubble.links.measured/1"
_SMALLEST = 1024
_STEP = 4
# Sizes of at least this share of the largest tell bandwidth; below, latency decides.
_LARGE = 0.2

Ladders = Mapping[Hop, Sequence["Rung"]]
"""The rungs of each hop, by size."""


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
class RankSite:
    """Where a rank runs."""

    rank: int
    host: str
    device: str


@dataclass(frozen=True, slots=True, kw_only=True)
class HopTestResult:
    """A hop test."""

    backend: str
    job_bytes: int | None
    """The size that the job itself sends."""
    places: tuple[RankSite, ...]
    rungs: tuple[Rung, ...]
    second: tuple[Rung, ...]
    """Slow hops once more, and their ends with other partners."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveHop(TestedHop):
    """A hop of a hop test, one way, the wire to itself."""

    rungs: tuple[Rung, ...]
    """By size."""
    ill: str | None
    """Of a slow hop: `link`, `rank 3`, or None where that could not be told."""

    @property
    def both_ways_bytes_per_s(self) -> float | None:
        """The rate with messages both ways at once: what one direction carries."""
        last = self.rungs[-1]
        return last.size_bytes / last.both_ways.median_s if last.both_ways else None


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


def pairs_of(ranks: int) -> tuple[Hop, ...]:
    """Return the pairs of neighbours, which are measured."""
    if ranks < 2:
        raise UsageError("one rank has no hops", hint="start two ranks or more")
    return tuple(pairwise(range(ranks)))


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


def write_measured(measured: HopTestResult) -> str:
    """Write a test as JSON."""
    return json.dumps({"schema": SCHEMA, **asdict(measured)}, indent=1)


def is_measured(data: Any) -> bool:
    """Tell whether a hop test wrote this."""
    return isinstance(data, dict) and data.get("schema") == SCHEMA


def read_measured(data: Any, file: str) -> HopTestResult:
    """Read a test."""
    try:
        return msgspec.convert(data, HopTestResult)
    except (msgspec.ValidationError, OverflowError) as error:
        raise LogError(
            f"a hop test that is damaged ({error})",
            hint="run it again: torchrun … -m debubble.links",
            file=file,
        ) from error


def judge_measured(
    measured: HopTestResult,
    *,
    classes: Mapping[Hop, LinkClass] | None = None,
    history: Mapping[Hop, Past] | None = None,
) -> tuple[LiveHop, ...]:
    """Judge each hop by its peers, its past, and its kind of wire where that is stated."""
    ladders, again = _ladders(measured.rungs), _ladders(measured.second)

    def judged(hop: Hop, ladders: Ladders) -> Judgement:
        by_peers = _by_peers(hop, ladders, measured.places)
        large = [
            (rung.size_bytes, rung.one_way.median_s * NS_PER_S) for rung in _large(ladders[hop])
        ]
        return judge(hop, large, by_peers, classes or {}, history or {})

    hops = []
    for hop, first in ladders.items():
        judgement, ill = judged(hop, ladders), None
        if judgement.slow and hop in again:
            # Slow once may have been the machine; slow twice is the hop.
            judgement = judged(hop, ladders | {hop: again[hop]})
        if judgement.slow:
            ill = _who_is_ill(hop, again, ladders, measured.places)
        rungs = _at_best(first, again.get(hop, ()))
        times_ns = [rung.one_way.alone_s * NS_PER_S for rung in rungs]
        hops.append(
            LiveHop(
                hop=hop,
                size_bytes=rungs[-1].size_bytes,
                time_s=rungs[-1].one_way.alone_s,
                fit=fit_line([rung.size_bytes for rung in rungs], times_ns),
                judgement=judgement,
                rungs=rungs,
                ill=ill,
            )
        )
    return tuple(hops)


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


def second_pass(measured: HopTestResult) -> tuple[Hop, ...]:
    """Return slow hops, to be measured again, and their ends with others that are well."""
    slow = [judged.hop for judged in judge_measured(measured) if judged.judgement.slow]
    ill = {rank for hop in slow for rank in hop}
    ranks = sorted(place.rank for place in measured.places)
    again: list[Hop] = list(slow)
    for sender, receiver in slow:
        others = [rank for rank in ranks if rank not in ill]
        others = others or [rank for rank in ranks if rank not in {sender, receiver}]
        if others:
            here, there = _nearest(others, sender), _nearest(others, receiver)
            again += [(sender, here), (there, receiver)]
    return tuple(dict.fromkeys(again))


def _nearest(ranks: Sequence[int], to: int) -> int:
    return min(ranks, key=lambda rank: (abs(rank - to), rank))


def _ladders(rungs: Iterable[Rung]) -> dict[Hop, tuple[Rung, ...]]:
    ladders: dict[Hop, list[Rung]] = {}
    for rung in rungs:
        ladders.setdefault(rung.hop, []).append(rung)
    return {
        hop: tuple(sorted(mine, key=lambda rung: rung.size_bytes)) for hop, mine in ladders.items()
    }


def _large(rungs: Sequence[Rung]) -> list[Rung]:
    return [rung for rung in rungs if rung.size_bytes >= _LARGE * rungs[-1].size_bytes]


def _by_peers(hop: Hop, ladders: Ladders, places: Sequence[RankSite]) -> Judgement | None:
    """Hold the large sizes against the middle of what hops over the same kind of wire take.

    As with traces, nearly all messages must be slow: on a noisy machine the peers' medians rise,
    and a hop's quick messages stay below them. And it must be their size that makes them so: where
    ranks wake up late, the smallest messages take as long as the large ones.
    """
    at_least = ladders[hop][0].one_way.median_s if len(ladders[hop]) > 1 else 0.0
    typical, quick = [], []
    for rung in _large(ladders[hop]):
        peers = _peers_of(hop, rung.size_bytes, ladders, places)
        usual = middle_of_others(sorted(peer.median_s for peer in peers), None)
        if usual is not None:
            typical.append(rung.one_way.median_s / usual)
            quick.append((rung.one_way.quick_s - at_least) / usual)
    if not typical:
        return None
    return judge_ratio(median(typical), slow=median(quick) > SLOW, against="peers")


def _peers_of(hop: Hop, size: int, ladders: Ladders, places: Sequence[RankSite]) -> list[Times]:
    """Return what messages of a size take on other hops: inside a host, or between hosts."""
    host = {place.rank: place.host for place in places}

    def leaves_host(hop: Hop) -> bool:
        return host.get(hop[0]) != host.get(hop[1])

    return [
        rung.one_way
        for other, rungs in ladders.items()
        if other != hop and leaves_host(other) == leaves_host(hop)
        for rung in rungs
        if rung.size_bytes == size
    ]


def _who_is_ill(
    hop: Hop, again: Ladders, ladders: Ladders, places: Sequence[RankSite]
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

    def is_slow(other: Hop) -> bool:
        """Tell whether most messages are slow, and the largest even with the wire to itself."""
        judged, last = _by_peers(other, every, places), every[other][-1]
        if judged is None or not judged.slow:
            return False
        peers = _peers_of(other, last.size_bytes, every, places)
        usual = middle_of_others(sorted(peer.alone_s for peer in peers), None)
        return (last.one_way.alone_s / usual if usual is not None else 1.0) > limit

    sends = [other for other in every if other[0] == hop[0] and other != hop]
    takes = [other for other in every if other[1] == hop[1] and other != hop]
    ill = [
        f"rank {rank}"
        for rank, others in ((hop[0], sends), (hop[1], takes))
        if others and all(map(is_slow, others))
    ]
    if ill:
        return " and ".join(ill)
    return "link" if sends and takes else None


_POLL_S = 0.1
_LOG_TAIL_LINES = 8


def run_here(
    ranks: int, words: Sequence[str], out: Path, *, on_progress: Callable[[int, int], None]
) -> None:
    """Start a hop test on this machine and wait for its file."""
    if importlib.util.find_spec("torch") is None:
        raise MissingExtra("measuring hops needs torch", hint="pip install 'debubble[torch]'")
    with tempfile.TemporaryDirectory() as folder:
        progress, log = Path(folder) / "progress", Path(folder) / "log"
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", str(ranks), "-m", "debubble.links"),
            *("--out", str(out), "--progress", str(progress), *words),
        ]
        with log.open("wb") as sink:
            job = subprocess.Popen(  # noqa: S603 (our own module, no shell)
                command,
                # What lies in the folder of the call is no module of ours.
                env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"},
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
            )
            try:
                while job.poll() is None:
                    with suppress(OSError, ValueError):  # not written yet, or not whole
                        done, total = map(int, progress.read_text("utf-8").split())
                        on_progress(done, total)
                    time.sleep(_POLL_S)
            finally:
                if job.poll() is None:
                    job.terminate()
                    job.wait()
        if job.returncode != 0:
            tail = log.read_text("utf-8", errors="replace").splitlines()[-_LOG_TAIL_LINES:]
            raise LinkTestError(
                "the hop test failed:\n" + "\n".join(tail),
                hint="see the lines above; --backend gloo needs no GPU",
            )
