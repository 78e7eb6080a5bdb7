"""Judged hops in → what `debubble links` answers, and what every other verb says of a hop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec

from debubble.analysis import Analysis
from debubble.errors import Code
from debubble.ledger.hop_health import Alike, HopHealth, LinkHealth, RankWires, judge_ranks
from debubble.ledger.ledger import MATTERS
from debubble.ledger.verdict import LITTLE
from debubble.links.hop_times import Verdict
from debubble.links.wiring import SCHEMA
from debubble.report.answers.base import Answer, AnswerWarning, Part, list_warnings, seconds
from debubble.report.answers.ledger import say_cause
from debubble.report.answers.link_tests import TestedHopPart
from debubble.timeline.transfers import HopFigures
from debubble.units import counted, show_bytes, show_duration, show_percent, show_rate


class SpreadPart(Part, frozen=True, kw_only=True):
    """The median and the slow end of some times."""

    median: Annotated[float | None, "median_ns"]
    p95: Annotated[float | None, "p95_ns"]
    n: Annotated[int, "count"]


class WaitPart(Part, frozen=True, kw_only=True):
    """How long receivers waited."""

    median: Annotated[float, "wait_ns"]
    p95: Annotated[float, "wait_p95_ns"]


class HopPart(Part, frozen=True, kw_only=True):
    """One direction between two ranks: the same in `find`, `links` and `plan`."""

    from_rank: Annotated[int, "source"]
    to_rank: Annotated[int, "destination"]
    from_stage: int | None
    to_stage: int | None
    stages: list[list[int]]
    bytes: int | None
    wire_s: SpreadPart
    wait_s: Annotated[WaitPart, "."]
    n: Annotated[int, "count"]
    buffered_fraction: float
    bytes_per_s: float | None
    expected_bytes_per_s: float | None
    times_expected: float | None
    verdict: str | None
    times: float | None
    cost_per_batch_s: float | None


class LinkPart(HopPart, frozen=True, kw_only=True):
    """The same, with all that is known of its wire."""

    one_message_s: Annotated[float | None, "times.alone_ns"]
    one_message_bytes_per_s: Annotated[float | None, "times.bytes_per_s"]
    waited_n: Annotated[int, "times.waited"]
    one_way_s: Annotated[SpreadPart | None, "times.one_way"]
    both_ways_s: Annotated[SpreadPart | None, "times.both_ways"]
    alpha_s: Annotated[float | None, "times.fit.latency_ns"]
    beta_bytes_per_s: Annotated[float | None, "times.fit.bytes_per_s"]
    fit_error_fraction: Annotated[float | None, "times.fit.worst_error"]
    class_: Annotated[str | None, "wire.name"] = msgspec.field(name="class")
    class_stated: Annotated[bool, "wire_stated"]
    against: Annotated[str | None, "judgement.against"]
    why: Annotated[str, "judgement.why"]


class LinksAnswer(Answer, frozen=True, kw_only=True):
    """What `debubble links` says of the hops of a run."""

    schema: str = SCHEMA
    source: str = "traces"
    basis: str
    """Of all times: profiled, or unprofiled."""
    batch_latency_s: float | None
    cost_is_upper_bound: bool
    slow_cost_per_batch_s: float | None
    hops: list[LinkPart]
    ranks: list[RankWires]
    alike: Alike | None
    """What all hops do, where none is slow and nothing else says what they should do."""
    logs: list[str] = msgspec.field(default_factory=list)
    commands: list[str]
    findings: list[str]
    """One sentence for each slow hop that the verdict does not name; then what costs more."""
    verdict: str
    warnings: list[AnswerWarning]


def answer_links(analysis: Analysis) -> LinksAnswer:
    """Say which hop is slow and what it costs, then every hop."""
    links = analysis.links
    verdict, elsewhere = say_links(links), []
    unsaid = links.slow if _costs_little(links) else links.slow[1:]
    mixed = [gap for gap in analysis.warnings if gap.code is Code.MIXED_RUNS]
    if mixed and not links.hops:
        verdict = f"No hop was measured: {mixed[0].message}."
    if _costs_little(links) and analysis.ledger is not None:
        others = [named for named in analysis.causes if not named.slow_hops]
        elsewhere = [f"Larger cause: {say_cause(analysis.ledger, named)}." for named in others[:1]]
    if len(analysis.pipelines) > 1:
        verdict = f"{verdict[:1].lower()}{verdict[1:]}"
        verdict = f"Pipeline {analysis.pipeline.pipeline} of {len(analysis.pipelines)}: {verdict}"
    return LinksAnswer(
        basis=analysis.basis.traced,
        batch_latency_s=seconds(links.batch_latency_ns),
        cost_is_upper_bound=links.shared,
        slow_cost_per_batch_s=seconds(links.slow_cost_ns),
        hops=[
            LinkPart.of(health, **msgspec.structs.asdict(_hop_part(health.times.figures, health)))
            for health in links.hops
        ],
        ranks=judge_ranks(links),
        alike=links.alike,
        commands=list(links.commands),
        findings=[
            *(f"H{_say_hop(health, links)[1:]}" for health in unsaid),
            *elsewhere,
        ],
        verdict=verdict,
        warnings=list_warnings(analysis.warnings),
    )


def hop_parts(analysis: Analysis) -> list[HopPart]:
    """Return the hops as `find` lists them."""
    return [
        _hop_part(hop, analysis.links.of((hop.source, hop.destination)))
        for hop in analysis.pipeline.hops
    ]


def _hop_part(hop: HopFigures, health: HopHealth | None) -> HopPart:
    """Return what was measured of a hop, and how it was judged."""
    from_stage, to_stage = hop.stages[0] if len(hop.stages) == 1 else (None, None)
    return HopPart.of(
        hop,
        from_stage=from_stage,
        to_stage=to_stage,
        bytes=hop.message_bytes if hop.message_bytes >= 0 else None,
        wire_s=SpreadPart(median=seconds(hop.wire_ns), p95=seconds(hop.wire_p95_ns), n=hop.wires),
        expected_bytes_per_s=health.expected_bytes_per_s if health else None,
        times_expected=health.judgement.times if health else None,
        verdict=str(health.judgement.verdict) if health else None,
        times=health.judgement.times if health else None,
        cost_per_batch_s=seconds(health.cost_ns) if health else None,
    )


def say_links(links: LinkHealth) -> str:
    """Say whether it is the wire, in a sentence."""
    if not links.hops:
        return "No hop was measured: no message between ranks."
    if links.slow:
        return _say_slow(links)
    healthy = sum(health.judgement.verdict == Verdict.HEALTHY for health in links.hops)
    if not healthy:
        return f"Unknown: {links.hops[0].judgement.why}."
    rest = sum(health.judgement.verdict == Verdict.UNKNOWN for health in links.hops)
    unknown = f"; {counted(rest, 'hop')} unknown" if rest else ""
    if links.alike is None:
        return f"It is not the wire: {counted(healthy, 'hop')} healthy{unknown}."
    if links.alike.bytes_per_s is None:
        return (
            f"No hop is slow beside its peers ({counted(healthy, 'hop')}{unknown}); their "
            "bandwidth is not measured: state the expected one with --class NAME."
        )
    shares = ", ".join(
        f"{'more than all' if share > 1 else f'about {show_percent(max(share, 0.01))}'} of {wire}"
        for wire, share in links.alike.share_of.items()
    )
    rate = show_rate(links.alike.bytes_per_s)
    if not shares:
        size = show_bytes(links.alike.message_bytes)
        rate += f" with messages of {size}"
        shares = "too small to measure bandwidth: state the expected one with --class NAME."
    else:
        shares += "; --class NAME judges it against your link."
    median = f"{counted(healthy, 'hop')}, median {rate}"
    return f"No hop is slow beside its peers: {median}{unknown}; {shares}"


def _say_slow(links: LinkHealth) -> str:
    """Name the hop that costs most or, where all cost little, what they cost."""
    first, more = links.slow[0], len(links.slow) - 1
    if _costs_little(links):
        return (
            f"Slow hops are not why ranks wait: {counted(more + 1, 'slow hop')} "
            f"{'cost' if more else 'costs'} {_most(links)}{show_duration(_slow_cost_ns(links))} of "
            f"{show_duration(links.batch_latency_ns or 0)} a batch."
        )
    together = ""
    if links.slow_cost_ns is not None:
        cost = f"{_most(links)}{show_duration(max(links.slow_cost_ns, 0))}"
        together = f"; all slow hops together cost {cost} a batch"
    others = f" {counted(more, 'more hop')} slow{together}." if more else ""
    batch, opening = links.batch_latency_ns, "A hop is slow"
    if first.cost_ns is not None and batch:
        hidden = _slow_cost_ns(links) < LITTLE * batch
        opening = "A hop is slow, but slack hides most of it" if hidden else "It is the wire"
    return f"{opening}: {_say_hop(first, links)}{others}"


def _most(links: LinkHealth) -> str:
    return "up to " if links.shared else ""


def _slow_cost_ns(links: LinkHealth) -> int:
    """Return what all slow hops cost a batch: of one alone it is that one's."""
    return max(0, links.slow_cost_ns or 0, *(health.cost_ns or 0 for health in links.slow))


def _costs_little(links: LinkHealth) -> bool:
    """Tell whether hops are slow and a batch hardly longer for it: nothing to lead with."""
    if not links.slow or links.slow[0].cost_ns is None or not links.batch_latency_ns:
        return False
    return _slow_cost_ns(links) < MATTERS * links.batch_latency_ns


def _say_hop(health: HopHealth, links: LinkHealth) -> str:
    rate = health.times.bytes_per_s
    does = f", {show_rate(rate)}" if rate else ""
    text = f"hop {health.hop[0]} → {health.hop[1]} {health.judgement.why}{does}"
    if health.cost_ns is None:
        return f"{text}; its cost is unknown."
    batch = links.batch_latency_ns
    of = f" of {show_duration(batch)}" if batch else ""
    return f"{text}; it costs {_most(links)}{show_duration(max(health.cost_ns, 0))}{of} a batch."


def verdicts_of(hops: Sequence[LinkPart | TestedHopPart]) -> list[Verdict]:
    """Return the verdict of every hop."""
    return [Verdict(hop.verdict or Verdict.UNKNOWN) for hop in hops]
