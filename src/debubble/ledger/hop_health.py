"""A measured pipeline in → each of its hops: what it takes, the verdict, what it costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from debubble.costs.devices import surely_share
from debubble.ledger.ledger import Ledger, build_ledger
from debubble.ledger.repair import saved_by_repair, saved_by_repairs, times_expected
from debubble.links.classes import LinkClass, wires_between
from debubble.links.expectation import Hop
from debubble.links.hop_times import HopTimes, time_hops
from debubble.links.judge import Judgement, Past, Verdict, judge_hops, judge_ratio
from debubble.links.nccl_command import nccl_command
from debubble.links.wiring import Wiring
from debubble.timeline.figures import PipelineFigures
from debubble.timeline.keep import only_steps
from debubble.timeline.model import Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class HopHealth:
    """One direction between two ranks."""

    times: HopTimes
    judgement: Judgement
    wire: LinkClass | None
    wire_stated: bool
    """Not merely guessed from the devices."""
    times_expected: float | None
    """As `find` tells it: how many times as long as its peers its messages mostly take."""
    cost_ns: int | None
    """What a batch would save with this hop as it should be; None where that is not known."""

    @property
    def hop(self) -> Hop:
        """The rank that sends and the rank that receives."""
        return self.times.hop

    @property
    def expected_bytes_per_s(self) -> float | None:
        """What the hop would carry if it were as fast as its peers."""
        return expected_rate(self.times.figures.bytes_per_s, self.times_expected)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkHealth:
    """All hops of a pipeline."""

    hops: tuple[HopHealth, ...]
    commands: tuple[str, ...]
    """To measure each pair with nccl-tests."""
    batch_latency_ns: int | None
    shared: bool
    """Ranks share a device, so that what one hop gains slows what is beside it."""
    slow_cost_ns: int | None = None
    """What a batch would save with all slow hops as they should be; None where not known."""

    @property
    def slow(self) -> list[HopHealth]:
        """Slow hops, the dearest first."""
        found = [one for one in self.hops if one.judgement.slow]
        return sorted(found, key=lambda one: -(one.cost_ns or 0))


def expected_rate(bytes_per_s: float | None, times: float | None) -> float | None:
    """Return what a hop would carry at its peers' speed."""
    return bytes_per_s * times if bytes_per_s is not None and times is not None else None


def account_for(
    timeline: Timeline, one: PipelineFigures, wires: Mapping[Hop, str] | None = None
) -> Ledger | None:
    """Say where the time went; batches that overlap, or are cut, have no window to account for."""
    if not one.one_run or one.cut or one.kind == "stream":
        return None
    return build_ledger(timeline, one.pipeline, [window.step for window in one.windows], wires)


def judge_links(
    timeline: Timeline, figures: PipelineFigures, wiring: Wiring, history: Mapping[Hop, Past]
) -> LinkHealth:
    """Time, judge and price every hop of a pipeline."""
    ledger = account_for(timeline, figures, _wires(figures, wiring))
    return judge_with(ledger, timeline, figures, wiring, history)


def judge_with(
    ledger: Ledger | None,
    timeline: Timeline,
    figures: PipelineFigures,
    wiring: Wiring = Wiring(stated={}, guessed={}),  # noqa: B008 (frozen)
    history: Mapping[Hop, Past] = MappingProxyType({}),
) -> LinkHealth:
    """Do the same with the account of the pipeline that is at hand."""
    wires = _wires(figures, wiring)
    steps = [window.step for window in figures.windows]
    timed = time_hops(only_steps(timeline, steps) if steps else timeline, figures.hops)
    judged = judge_hops(timed, wires=wires, classes=wiring.stated, history=history)
    judged = {hop: _as_priced(one, hop, ledger) for hop, one in judged.items()}
    hops = tuple(
        HopHealth(
            times=one,
            judgement=judged[one.hop],
            wire=wiring.of(one.hop),
            wire_stated=one.hop in wiring.stated,
            times_expected=times_expected(ledger, one.hop) if ledger else None,
            cost_ns=_cost(ledger, one.hop, judged[one.hop]),
        )
        for one in timed
    )
    return LinkHealth(
        hops=hops,
        commands=_commands(figures),
        batch_latency_ns=figures.batch_latency_ns,
        shared=surely_share(figures.ranks),
        slow_cost_ns=_cost_together(ledger, judged),
    )


def _wires(figures: PipelineFigures, wiring: Wiring) -> dict[Hop, str]:
    stated = {hop: wire.name for hop, wire in wiring.stated.items()}
    return wires_between(figures.ranks) | stated


def _cost(ledger: Ledger | None, hop: Hop, judgement: Judgement) -> int | None:
    """Price a hop against its peers; by its past or its kind of wire where these tell."""
    if ledger is None or not ledger.replays or judgement.verdict == Verdict.UNKNOWN:
        return None
    if not judgement.slow:
        return 0
    return saved_by_repair(ledger, [hop], _share(judgement))


def _as_priced(judgement: Judgement, hop: Hop, ledger: Ledger | None) -> Judgement:
    """Say how slow a hop is as `find` and `plan` do, who price it: all its messages decided."""
    if ledger is None or not judgement.slow or judgement.against != "peers":
        return judgement
    times = times_expected(ledger, hop)
    if times is None or times <= 1:
        return judgement
    return judge_ratio(times, slow=True, against="peers")


def _cost_together(ledger: Ledger | None, judged: Mapping[Hop, Judgement]) -> int | None:
    """Price all slow hops at once: slack may hide each of them, and not all."""
    if ledger is None or not ledger.replays:
        return None
    slow = {hop: _share(one) for hop, one in judged.items() if one.slow}
    return saved_by_repairs(ledger, slow) if slow else 0


def _share(judgement: Judgement) -> float | None:
    """Return what its messages should take of what they do; None: as peers tell."""
    by_peers = judgement.against == "peers" or not judgement.times
    return None if by_peers or judgement.times is None else 1 / judgement.times


def _commands(figures: PipelineFigures) -> tuple[str, ...]:
    ranks = {rank.rank: rank for rank in figures.ranks}
    sizes: dict[Hop, int] = {}
    for hop in figures.hops:
        pair = min(hop.source, hop.destination), max(hop.source, hop.destination)
        sizes[pair] = max(hop.message_bytes, sizes.get(pair, -1))
    return tuple(
        nccl_command(ranks[here], ranks[there], size) for (here, there), size in sizes.items()
    )
