"""Judged hops in → what `debubble links` prints out, as text or JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from debubble.errors import Gap
from debubble.ledger.hop_health import HopHealth, LinkHealth
from debubble.ledger.verdict import LITTLE, MATTERS
from debubble.links.history import SCHEMA
from debubble.links.hop_times import Spread
from debubble.links.judge import Verdict
from debubble.report.fold import FEW, farthest, show_range
from debubble.report.inspect import gap_json
from debubble.report.text import Page, Table
from debubble.units import NS_PER_S, counted, show_bytes, show_duration, show_rate, show_share

# Of a long pipeline nobody pastes them all.
_COMMANDS_SHOWN = 16
_SHARED = (
    "ranks share a device: that they slow each other is counted, that their wires do is not;"
    " costs are the most it can be"
)


def links_page(found: LinkHealth, gaps: Sequence[Gap], next_command: str) -> Page:
    """Lay out the answer: which hop is slow and what it costs, then every hop."""
    page = Page(answer=links_answer(found))
    page.findings = [_sentence(one, found) for one in found.slow[1:]]
    page.tables = [_table(found)]
    page.notes = [f"check: {command}" for command in found.commands[:_COMMANDS_SHOWN]]
    if len(found.commands) > _COMMANDS_SHOWN:
        page.notes.append(f"{len(found.commands) - _COMMANDS_SHOWN} more to check are in --json")
    if found.shared and found.slow:
        page.notes.insert(0, _SHARED)
    page.gaps = list(gaps)
    page.next_command = next_command
    return page


def links_answer(found: LinkHealth) -> str:
    """Say it in a sentence."""
    if not found.hops:
        return "No hop was seen: no message went from rank to rank."
    if found.slow:
        first, more = found.slow[0], len(found.slow) - 1
        others = f" {counted(more, 'more hop')} slow{_together(found)}." if more else ""
        return f"{_opening(first, found)}: {_sentence(first, found)}{others}"
    counts = _counts(found.hops)
    if not counts[Verdict.HEALTHY]:
        return f"Unknown: {found.hops[0].judgement.why}."
    rest = counts[Verdict.UNKNOWN]
    unknown = f"; {counted(rest, 'hop')} unknown" if rest else ""
    return f"It is not the wire: {counted(counts[Verdict.HEALTHY], 'hop')} healthy{unknown}."


def _opening(first: HopHealth, found: LinkHealth) -> str:
    """Say whether slow hops are why ranks wait: slack may hide most of it, or all."""
    batch = found.batch_latency_ns
    if first.cost_ns is None or not batch:
        return "A hop is slow"
    cost = max(first.cost_ns, found.slow_cost_ns or 0)
    if cost >= LITTLE * batch:
        return "It is the wire"
    hidden = "most of it" if cost >= MATTERS * batch else "it"
    return f"A hop is slow, and slack hides {hidden}"


def _together(found: LinkHealth) -> str:
    """Say what all slow hops cost: less or more than the sum of each."""
    if found.slow_cost_ns is None:
        return ""
    most = "up to " if found.shared else ""
    cost = show_duration(max(found.slow_cost_ns, 0))
    return f"; all slow hops together cost {most}{cost} a batch"


def _sentence(one: HopHealth, found: LinkHealth) -> str:
    rate = one.times.bytes_per_s
    does = f", {show_rate(rate)}" if rate else ""
    text = f"hop {_arrow(one)} {one.judgement.why}{does}"
    if one.cost_ns is None:
        return f"{text}; what it costs cannot be told."
    batch = found.batch_latency_ns
    of = f" of {show_duration(batch)}" if batch else ""
    most = "up to " if found.shared else ""
    return f"{text}; it costs {most}{show_duration(max(one.cost_ns, 0))}{of} a batch."


def _counts(hops: Sequence[HopHealth]) -> dict[Verdict, int]:
    return {kind: sum(one.judgement.verdict == kind for one in hops) for kind in Verdict}


def _arrow(one: HopHealth) -> str:
    return f"{one.hop[0]} → {one.hop[1]}"


def _table(found: LinkHealth) -> Table:
    table = Table(
        columns=(
            "hop",
            "size",
            "one message",
            "rate",
            "both ways",
            "wait",
            "buffered",
            "class",
            "verdict",
            "costs",
        )
    )
    shown = _standing_out(found.hops)
    for one in (found.hops[place] for place in sorted(shown)):
        figures, times = one.times.figures, one.times
        table.rows.append(
            (
                _arrow(one),
                "unknown" if figures.message_bytes < 0 else show_bytes(figures.message_bytes),
                "hidden" if times.alone_ns is None else show_duration(times.alone_ns),
                "–" if times.bytes_per_s is None else show_rate(times.bytes_per_s),
                "–" if times.both_ways is None else show_duration(times.both_ways.median_ns),
                show_duration(figures.wait_ns),
                show_share(figures.buffered_fraction),
                "–" if one.wire is None else one.wire.name + ("" if one.wire_stated else "?"),
                str(one.judgement.verdict),
                "–" if one.cost_ns is None else show_duration(max(one.cost_ns, 0)),
            )
        )
    rest = [one for place, one in enumerate(found.hops) if place not in shown]
    if rest:
        table.rows.append(_other_hops(rest))
    return table


def _standing_out(hops: Sequence[HopHealth]) -> set[int]:
    """Return the places of all hops, or of many those that are slow or unlike the others."""
    if len(hops) <= 2 * FEW:
        return set(range(len(hops)))
    slow = {place for place, one in enumerate(hops) if one.judgement.slow}
    return slow | farthest([one.times.bytes_per_s for one in hops])


def _other_hops(rest: Sequence[HopHealth]) -> tuple[str, ...]:
    sizes = [one.times.figures.message_bytes for one in rest]
    alone = [one.times.alone_ns for one in rest if one.times.alone_ns is not None]
    rates = [one.times.bytes_per_s for one in rest if one.times.bytes_per_s is not None]
    verdicts = sorted({str(one.judgement.verdict) for one in rest})
    return (
        f"{len(rest)} others",
        "unknown" if min(sizes) < 0 else show_range(sizes, show_bytes),
        show_range(alone, show_duration) if alone else "hidden",
        show_range(rates, show_rate) if rates else "–",
        "",
        show_range([one.times.figures.wait_ns for one in rest], show_duration),
        "",
        "",
        " or ".join(verdicts),
        "",
    )


def links_json(found: LinkHealth, gaps: Sequence[Gap]) -> dict[str, Any]:
    """Return the answer as data."""
    return {
        "schema": SCHEMA,
        "source": "traces",
        "batch_latency_s": _seconds(found.batch_latency_ns),
        "cost_is_upper_bound": found.shared,
        "slow_cost_per_batch_s": _seconds(found.slow_cost_ns),
        "hops": [_hop_json(one) for one in found.hops],
        "logs": [],
        "commands": list(found.commands),
        "verdict": links_answer(found),
        "warnings": [gap_json(gap) for gap in gaps],
    }


def verdict_json(one: HopHealth | None) -> dict[str, Any]:
    """Return how slow a hop is, the verdict and its price: the same fields in every answer."""
    if one is None:
        return dict.fromkeys(("times_expected", "verdict", "times", "cost_per_batch_s"))
    return {
        "times_expected": one.times_expected,
        "verdict": str(one.judgement.verdict),
        "times": one.judgement.times,
        "cost_per_batch_s": _seconds(one.cost_ns),
    }


def _hop_json(one: HopHealth) -> dict[str, Any]:
    figures, times = one.times.figures, one.times
    alone = len(figures.stages) == 1
    return {
        "from_rank": one.hop[0],
        "to_rank": one.hop[1],
        "from_stage": figures.stages[0][0] if alone else None,
        "to_stage": figures.stages[0][1] if alone else None,
        "stages": [list(pair) for pair in figures.stages],
        "bytes": figures.message_bytes if figures.message_bytes >= 0 else None,
        "one_message_s": _seconds(times.alone_ns),
        "one_message_bytes_per_s": times.bytes_per_s,
        "waited_n": times.waited,
        "wire_s": {
            "median": _seconds(figures.wire_ns),
            "p95": _seconds(figures.wire_p95_ns),
            "n": figures.wires,
        },
        "one_way_s": _spread_json(times.one_way),
        "both_ways_s": _spread_json(times.both_ways),
        "wait_s": {"median": _seconds(figures.wait_ns), "p95": _seconds(figures.wait_p95_ns)},
        "n": figures.count,
        "buffered_fraction": figures.buffered_fraction,
        "bytes_per_s": figures.bytes_per_s,
        "expected_bytes_per_s": one.expected_bytes_per_s,
        **verdict_json(one),
        "alpha_s": times.fit.latency_ns / NS_PER_S if times.fit else None,
        "beta_bytes_per_s": times.fit.bytes_per_s if times.fit else None,
        "fit_error_fraction": times.fit.worst_error if times.fit else None,
        "class": one.wire.name if one.wire else None,
        "class_stated": one.wire_stated,
        "against": one.judgement.against,
        "why": one.judgement.why,
    }


def _spread_json(spread: Spread | None) -> dict[str, Any] | None:
    if spread is None:
        return None
    return {
        "median": _seconds(spread.median_ns),
        "p95": _seconds(spread.p95_ns),
        "n": spread.count,
    }


def _seconds(nanoseconds: int | None) -> float | None:
    return None if nanoseconds is None else nanoseconds / NS_PER_S
