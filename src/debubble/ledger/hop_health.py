"""A measured pipeline in → each of its hops: what it takes, the verdict, what it costs.

The one place where a slow hop gets its price: `find`, `links` and `plan` all ask here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

import msgspec
import numpy as np

from debubble.ledger.ledger import Job, Ledger, build_ledger
from debubble.links.hop_times import (
    CLASSES,
    Hop,
    HopTimes,
    Judgement,
    LinkClass,
    Past,
    Verdict,
    against_peers,
    expect_stream,
    judge_hops,
    nccl_command,
    nvlink_of,
    time_hops,
    wires_between,
)
from debubble.links.wiring import Wiring
from debubble.simulate.costs.wire_pools import Slower, SlowHop
from debubble.timeline.figures import PipelineFigures
from debubble.timeline.model import Timeline, surely_share
from debubble.timeline.steps import only_steps
from debubble.units import NS_PER_S


def saved_by_repair(ledger: Ledger, shares: Mapping[Hop, float | None]) -> int:
    """Replay the steps with some hops as their peers are, or at a share of what they take."""
    numbers = {_number(ledger, hop): share for hop, share in shares.items()}
    return ledger.saved_by(lambda remedies: remedies.repaired_hops(numbers))


def _number(ledger: Ledger, hop: Hop) -> int:
    names = [rank.rank for rank in ledger.ranks]
    return names.index(hop[0]) * len(names) + names.index(hop[1])


_NO_WIRING = Wiring(stated={}, guessed={})


@dataclass(frozen=True, slots=True, kw_only=True)
class HopHealth:
    """One direction between two ranks."""

    times: HopTimes
    judgement: Judgement
    wire: LinkClass | None
    wire_stated: bool
    """Not merely guessed from the devices."""
    cost_ns: int | None
    """What a batch would save with this hop as it should be; None where that is not known."""
    slower: SlowHop | None
    """How slow it is, of a slow one."""

    @property
    def hop(self) -> Hop:
        """The rank that sends and the rank that receives."""
        return self.times.hop

    @property
    def slow(self) -> bool:
        """Whether it is slow."""
        return self.judgement.slow

    @property
    def expected_bytes_per_s(self) -> float | None:
        """What the hop would carry if it were as fast as its peers."""
        rate, times = self.times.figures.bytes_per_s, self.judgement.times
        return rate * times if rate is not None and times is not None else None


# A message's start takes 20 to 90 us with NCCL: of shorter ones, as answers of a server are, that
# is most of their time, and no wire looks like itself.
_TELLS_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Alike:
    """Hops that differ from each other by nothing: that they are healthy, none of them can tell."""

    hops: int
    bytes_per_s: float | None
    """In the middle of them; None where no message shows it."""
    share_of: dict[str, float]
    """The share of what wires carry that such devices may have, by the name of the wire; empty
    where messages are too small to tell."""
    message_bytes: int
    """Of their largest messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkHealth:
    """All hops of a pipeline."""

    hops: tuple[HopHealth, ...]
    commands: tuple[str, ...]
    """To measure each pair with nccl-tests."""
    batch_latency_ns: int | None
    shared: bool
    """Ranks share a device, so that what one hop gains slows what is beside it."""
    costs_ns: Mapping[frozenset[Hop], int] = field(default_factory=dict)
    """What a batch would save with slow hops repaired: one, both ways between two ranks, all of a
    rank, and all there are. Slack may hide each of them, and not all. Empty where not known."""

    alike: Alike | None = None
    """What all hops do, where none is slow and only other hops say what it should do."""

    @property
    def slow_cost_ns(self) -> int | None:
        """What a batch would save with all slow hops as they should be; None where not known."""
        return self.cost_of([hop.hop for hop in self.slow])

    @property
    def slow_hops(self) -> dict[Hop, SlowHop]:
        """How slow each slow hop is."""
        return {hop.hop: hop.slower for hop in self.hops if hop.slower is not None}

    def cost_of(self, hops: Sequence[Hop]) -> int | None:
        """Return what some slow hops cost together: one, or what is repaired at once."""
        known = any(health.cost_ns is not None for health in self.hops)
        return self.costs_ns.get(frozenset(hops)) if hops else (0 if known else None)

    def of(self, hop: Hop) -> HopHealth | None:
        """Return a hop by its ranks; None where there is none such."""
        return next((health for health in self.hops if health.hop == hop), None)

    @property
    def slow(self) -> list[HopHealth]:
        """Slow hops, the most expensive first."""
        slow = [health for health in self.hops if health.judgement.slow]
        return sorted(slow, key=lambda health: -(health.cost_ns or 0))


def repaired_together(slow: Sequence[Hop]) -> list[tuple[Hop, ...]]:
    """Return what is repaired at once: a link, both ways; all slow hops of a rank; all there are.

    A card or a slot that is ill slows all hops of its rank: repairing one of them gains nothing.
    """
    slow = sorted(slow)
    pairs = dict.fromkeys(frozenset(hop) for hop in slow)
    together = [tuple(hop for hop in slow if set(hop) == pair) for pair in pairs]
    ranks = sorted({rank for pair in pairs for rank in pair})
    together += [tuple(hop for hop in slow if rank in hop) for rank in ranks]
    together.append(tuple(slow))
    return list(dict.fromkeys(hops for hops in together if hops))


def account_for(
    timeline: Timeline,
    figures: PipelineFigures,
    wiring: Wiring | None = None,
    history: Mapping[Hop, Past] | None = None,
    job: Job | None = None,
) -> Ledger | None:
    """Say where the time went; batches that overlap, or are cut, have no window to account for.

    With it comes what each hop takes and costs, also by what else is known of wires: whoever names,
    lists or repairs hops asks that.
    """
    if not figures.one_run or figures.cut or figures.kind == "stream":
        return None
    wiring = wiring or _NO_WIRING
    by_bubble = sorted(figures.windows, key=lambda window: window.bubble_fraction)
    middle = by_bubble[(len(by_bubble) - 1) // 2 : len(by_bubble) // 2 + 1]
    ledger = build_ledger(
        timeline,
        figures.pipeline,
        [window.step for window in figures.windows],
        _wires(figures, wiring),
        batch_latency_ns=figures.batch_latency_ns,
        middle=sorted(window.step for window in middle),
        job=job,
    )
    return ledger and replace(
        ledger, links=_judge(ledger, timeline, figures, wiring, history or {})
    )


def judge_links(
    timeline: Timeline,
    figures: PipelineFigures,
    wiring: Wiring | None = None,
    history: Mapping[Hop, Past] | None = None,
) -> LinkHealth:
    """Time and judge every hop of a pipeline, and price it where there is an account of it."""
    ledger = account_for(timeline, figures, wiring, history)
    if ledger is not None and ledger.links is not None:
        return ledger.links
    return _judge(None, timeline, figures, wiring or _NO_WIRING, history or {})


def _judge(
    ledger: Ledger | None,
    timeline: Timeline,
    figures: PipelineFigures,
    wiring: Wiring,
    history: Mapping[Hop, Past],
) -> LinkHealth:
    steps = [window.step for window in figures.windows]
    timed = time_hops(only_steps(timeline, steps) if steps else timeline, figures.hops)
    if ledger is not None:
        expected = [remedies.expected for remedies in ledger.remedies]
    else:
        expected = [expect_stream(timeline.transfers, figures.ranks, _wires(figures, wiring))]
    judged = judge_hops(
        timed,
        against_peers(expected, [rank.rank for rank in figures.ranks]),
        classes=wiring.stated,
        history=history,
    )
    priced = ledger is not None and bool(ledger.replays)
    costs_ns = _price(ledger, judged) if ledger is not None and priced else {}
    hops = tuple(
        HopHealth(
            times=hop,
            judgement=judged[hop.hop],
            wire=wiring.of(hop.hop),
            wire_stated=hop.hop in wiring.stated,
            cost_ns=costs_ns.get(frozenset({hop.hop}), 0)
            if priced and judged[hop.hop].verdict != Verdict.UNKNOWN
            else None,
            slower=_slower(ledger, hop.hop, judged[hop.hop]),
        )
        for hop in timed
    )
    return LinkHealth(
        hops=hops,
        commands=_commands(figures),
        batch_latency_ns=figures.batch_latency_ns,
        shared=surely_share(figures.ranks),
        costs_ns=costs_ns,
        alike=_alike(hops, figures),
    )


def _alike(hops: Sequence[HopHealth], figures: PipelineFigures) -> Alike | None:
    """Tell what all hops do, where nothing but these hops themselves says what they should do."""
    judged = [hop for hop in hops if hop.judgement.verdict != Verdict.UNKNOWN]
    by_peers = [hop.judgement.against == "peers" and not hop.wire_stated for hop in judged]
    if not all(by_peers) or any(hop.slow for hop in judged) or not judged:
        return None
    rates = [hop.times.bytes_per_s for hop in judged if hop.times.bytes_per_s]
    rate = float(median(rates)) if rates else None
    nvlinks = {nvlink_of(rank.device_name) for rank in figures.ranks}
    nvlink = nvlinks.pop() if len(nvlinks) == 1 else None
    wires = {nvlink.words.partition(",")[0]: nvlink.line_bytes_per_s} if nvlink else {}
    wires["a 400 Gb/s port"] = CLASSES["ib-ndr"].line_bytes_per_s
    longest = max(hop.times.figures.message_bytes for hop in judged)
    shares = {}
    if rate is not None and longest >= _TELLS_BYTES:
        shares = {name: rate / line for name, line in wires.items()}
    return Alike(hops=len(judged), bytes_per_s=rate, share_of=shares, message_bytes=longest)


def _wires(figures: PipelineFigures, wiring: Wiring) -> dict[Hop, str]:
    stated = {hop: wire.name for hop, wire in wiring.stated.items()}
    return wires_between(figures.ranks) | stated


def _slower(ledger: Ledger | None, hop: Hop, judgement: Judgement) -> SlowHop | None:
    """Say how slow a slow hop is, as the account has it; by its past or kind of wire alike."""
    if not judgement.slow:
        return None
    times = judgement.times or 1.0
    alike = Slower(times, times, 1.0)
    if ledger is None or judgement.against != "peers":
        return SlowHop(times, alike, alike)
    number = _number(ledger, hop)
    parts = []
    for exchanged in (False, True):
        took = [
            getattr(remedies.expected, name).times[
                (remedies.expected.hop == number) & (remedies.step.fused == exchanged)
            ]
            for name in ("wire", "drain", "sending")
            for remedies in ledger.remedies
        ]
        count = len(ledger.remedies)
        columns = [np.concatenate(took[each : each + count]) for each in range(0, 3 * count, count)]
        parts.append(
            Slower(*(float(np.median(column)) for column in columns)) if len(columns[0]) else alike
        )
    return SlowHop(times, *parts)


def _price(ledger: Ledger, judged: Mapping[Hop, Judgement]) -> dict[frozenset[Hop], int]:
    """Price slow hops against their peers; by their past or kind of wire where these tell."""
    slow = {
        hop: 1 / judgement.times if judgement.against != "peers" and judgement.times else None
        for hop, judgement in judged.items()
        if judgement.slow
    }
    together = {*((hop,) for hop in slow), *repaired_together(list(slow))}
    return {
        frozenset(hops): saved_by_repair(ledger, {hop: slow[hop] for hop in hops})
        for hops in sorted(together)
    }


def _commands(figures: PipelineFigures) -> tuple[str, ...]:
    ranks = {rank.rank: rank for rank in figures.ranks}
    sizes: dict[Hop, int] = {}
    for hop in figures.hops:
        pair = min(hop.source, hop.destination), max(hop.source, hop.destination)
        sizes[pair] = max(hop.message_bytes, sizes.get(pair, -1))
    return tuple(
        nccl_command(ranks[here], ranks[there], size) for (here, there), size in sizes.items()
    )


class RankWires(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank sends and receives, all its hops together."""

    rank: int
    sends_slowly: bool
    receives_slowly: bool
    slow_cost_per_batch_s: float | None


def judge_ranks(links: LinkHealth) -> list[RankWires]:
    """Say of each rank whether all that it sends, or receives, is slow."""
    ranks = sorted({rank for health in links.hops for rank in health.hop})
    judged = []
    for rank in ranks:
        sent = [health for health in links.hops if health.hop[0] == rank]
        received = [health for health in links.hops if health.hop[1] == rank]
        slow = [health.hop for health in (*sent, *received) if health.slow]
        cost_ns = links.cost_of(slow) if slow else 0
        judged.append(
            RankWires(
                rank=rank,
                sends_slowly=bool(sent) and all(health.slow for health in sent),
                receives_slowly=bool(received) and all(health.slow for health in received),
                slow_cost_per_batch_s=cost_ns / NS_PER_S if cost_ns is not None else None,
            )
        )
    return judged
