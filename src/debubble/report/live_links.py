"""A hop test in → what `debubble links` prints of it, as text or JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from debubble.errors import Gap
from debubble.links.history import SCHEMA
from debubble.links.judge import Verdict
from debubble.links.live.measured import LiveHop, Measured, Rung, Times
from debubble.report.inspect import gap_json
from debubble.report.text import Page, Table
from debubble.units import NS_PER_S, counted, show_bytes, show_duration, show_rate


def live_page(
    measured: Measured, hops: Sequence[LiveHop], gaps: Sequence[Gap], next_command: str
) -> Page:
    """Lay out the answer: which hop is slow and who is ill, then every hop."""
    page = Page(answer=live_answer(hops))
    slow = [one for one in hops if one.judgement.slow]
    page.findings = [f"{_sentence(one)}." for one in slow[1:]]
    table = Table(
        columns=(
            "hop",
            "largest",
            "one way",
            "rate",
            "both ways",
            "latency",
            "bandwidth",
            "verdict",
        )
    )
    for one in hops:
        last = one.rungs[-1]
        both = one.both_ways_bytes_per_s
        table.rows.append(
            (
                f"{one.hop[0]} → {one.hop[1]}",
                show_bytes(last.size_bytes),
                show_duration(last.one_way.alone_s * NS_PER_S),
                show_rate(one.bytes_per_s),
                "–" if both is None else show_rate(both),
                "–" if one.fit is None else show_duration(one.fit.latency_ns),
                "–" if one.fit is None else show_rate(one.fit.bytes_per_s),
                str(one.judgement.verdict),
            )
        )
    page.tables = [table]
    page.notes = [_about(measured)]
    page.gaps = list(gaps)
    page.next_command = next_command
    return page


def live_answer(hops: Sequence[LiveHop]) -> str:
    """Say it in a sentence."""
    slow = [one for one in hops if one.judgement.slow]
    if slow:
        more = f", and {counted(len(slow) - 1, 'more hop')}" if len(slow) > 1 else ""
        return f"{_sentence(slow[0])[0].upper()}{_sentence(slow[0])[1:]}{more}."
    healthy = sum(one.judgement.verdict == Verdict.HEALTHY for one in hops)
    if not healthy:
        return f"Unknown: {hops[0].judgement.why}." if hops else "No hop was measured."
    rest = len(hops) - healthy
    return f"{counted(healthy, 'hop')} healthy{f'; {rest} unknown' if rest else ''}."


def _sentence(one: LiveHop) -> str:
    ill = {None: "", "link": "; with others both ranks are well: it is the link between them"}
    more = ill.get(one.ill, f"; {one.ill} is slow with others, too")
    rate = show_rate(one.bytes_per_s)
    return f"hop {one.hop[0]} → {one.hop[1]} {one.judgement.why}, {rate}{more}"


def _about(measured: Measured) -> str:
    samples = min((rung.one_way.n for rung in measured.rungs), default=0)
    hosts = len({place.host for place in measured.places})
    return (
        f"{counted(len(measured.places), 'rank')} on {counted(hosts, 'host')}, {measured.backend};"
        f" {samples} messages of each size, of which a tenth was quicker than told;"
        " one hop at a time"
    )


def live_json(measured: Measured, hops: Sequence[LiveHop], gaps: Sequence[Gap]) -> dict[str, Any]:
    """Return the answer as data."""
    return {
        "schema": SCHEMA,
        "source": "measured",
        "backend": measured.backend,
        "batch_latency_s": None,
        "hops": [_hop_json(one, measured.job_bytes) for one in hops],
        "second_pass": [_rung_json(rung) for rung in measured.second],
        "logs": [],
        "commands": [],
        "verdict": live_answer(hops),
        "warnings": [gap_json(gap) for gap in gaps],
    }


def _hop_json(one: LiveHop, job_bytes: int | None) -> dict[str, Any]:
    last = one.rungs[-1]
    job = next((rung for rung in one.rungs if rung.size_bytes == job_bytes), last)
    return {
        "from_rank": one.hop[0],
        "to_rank": one.hop[1],
        "bytes": job.size_bytes,
        "one_message_s": job.one_way.alone_s,
        "one_message_bytes_per_s": job.size_bytes / job.one_way.alone_s,
        "bytes_per_s": one.bytes_per_s,
        "both_ways_bytes_per_s": one.both_ways_bytes_per_s,
        "alpha_s": one.fit.latency_ns / NS_PER_S if one.fit else None,
        "beta_bytes_per_s": one.fit.bytes_per_s if one.fit else None,
        "fit_error_fraction": one.fit.worst_error if one.fit else None,
        "ladder": [_rung_json(rung) for rung in one.rungs],
        "verdict": str(one.judgement.verdict),
        "against": one.judgement.against,
        "times": one.judgement.times,
        "why": one.judgement.why,
        "ill": one.ill,
        "cost_per_batch_s": None,
    }


def _rung_json(rung: Rung) -> dict[str, Any]:
    return {
        "from_rank": rung.source,
        "to_rank": rung.destination,
        "bytes": rung.size_bytes,
        "one_way_s": rung.one_way.median_s,
        "one_way_p95_s": rung.one_way.p95_s,
        "both_ways_s": _median(rung.both_ways),
        "n": rung.one_way.n,
    }


def _median(times: Times | None) -> float | None:
    return times.median_s if times else None
