"""Logs of link tests, or a live test, in → what `debubble links` answers of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec

from debubble.errors import Gap
from debubble.links.hop_times import TestedHop, Verdict
from debubble.links.live import HopTestResult, LiveHop
from debubble.links.logs.log import Cell, Log
from debubble.links.wiring import SCHEMA
from debubble.report.answers.base import Answer, AnswerWarning, Part, list_warnings
from debubble.units import counted, show_rate


class LogPart(Part, frozen=True, kw_only=True):
    """What a log says, as a table; units stand in the names of its columns."""

    file: str
    program: str
    about: str | None
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]


class TestedHopPart(Part, frozen=True, kw_only=True):
    """One direction between two ranks, as a test measured it."""

    from_rank: int
    to_rank: int
    bytes: Annotated[int, "size_bytes"]
    one_message_s: Annotated[float, "time_s"]
    one_message_bytes_per_s: Annotated[float, "bytes_per_s"]
    bytes_per_s: float
    alpha_s: Annotated[float | None, "fit.latency_ns"]
    beta_bytes_per_s: Annotated[float | None, "fit.bytes_per_s"]
    fit_error_fraction: Annotated[float | None, "fit.worst_error"]
    verdict: Annotated[str, "judgement.verdict"]
    against: Annotated[str | None, "judgement.against"]
    times: Annotated[float | None, "judgement.times"]
    why: Annotated[str, "judgement.why"]
    cost_per_batch_s: float | None = None
    """Null: a test is of no batch."""


class LoggedHop(TestedHopPart, frozen=True, kw_only=True):
    """The same, of a log."""

    file: str


class RungPart(Part, frozen=True, kw_only=True):
    """Messages of one size over one hop."""

    from_rank: Annotated[int, "source"]
    to_rank: Annotated[int, "destination"]
    bytes: Annotated[int, "size_bytes"]
    one_way_s: Annotated[float, "one_way.median_s"]
    one_way_p95_s: Annotated[float, "one_way.p95_s"]
    both_ways_s: Annotated[float | None, "both_ways.median_s"]
    n: Annotated[int, "one_way.n"]


class MeasuredHop(TestedHopPart, frozen=True, kw_only=True):
    """The same, of a test that ran here."""

    both_ways_bytes_per_s: float | None
    ladder: Annotated[list[RungPart], "rungs"]
    ill: str | None


class LogsAnswer(Answer, frozen=True, kw_only=True):
    """What `debubble links` says of logs."""

    schema: str = SCHEMA
    source: str = "logs"
    batch_latency_s: float | None = None
    hops: list[LoggedHop]
    logs: list[LogPart]
    commands: list[str] = msgspec.field(default_factory=list)
    verdict: str
    warnings: list[AnswerWarning]


class LiveAnswer(Answer, frozen=True, kw_only=True):
    """What `debubble links` says of a test of its own."""

    schema: str = SCHEMA
    source: str = "measured"
    backend: str
    batch_latency_s: float | None = None
    hops: list[MeasuredHop]
    second_pass: list[RungPart]
    logs: list[LogPart] = msgspec.field(default_factory=list)
    commands: list[str] = msgspec.field(default_factory=list)
    findings: list[str]
    """Of each slow hop that the verdict does not name, a sentence."""
    verdict: str
    warnings: list[AnswerWarning]


def answer_logs(logs: Sequence[Log], hops: Sequence[TestedHop], gaps: Sequence[Gap]) -> LogsAnswer:
    """Say what logs tell of hops; what the environment held is not in it."""
    return LogsAnswer(
        hops=[
            LoggedHop.of(hop, from_rank=here, to_rank=there)
            for hop in hops
            # A test that sends both ways at once tells its directions not apart.
            for here, there in ([hop.hop, hop.hop[::-1]] if hop.both_ways else [hop.hop])
        ],
        logs=[LogPart.of(log) for log in logs],
        verdict=say_logs(logs, hops),
        warnings=list_warnings(gaps),
    )


def answer_live(
    measured: HopTestResult, hops: Sequence[LiveHop], gaps: Sequence[Gap]
) -> LiveAnswer:
    """Say what a live test tells of hops."""
    return LiveAnswer(
        backend=measured.backend,
        hops=[_measured_hop(hop, measured.job_bytes) for hop in hops],
        second_pass=[RungPart.of(rung) for rung in measured.second],
        findings=[f"{say_slow_hop(hop)}." for hop in hops if hop.judgement.slow][1:],
        verdict=say_live(hops),
        warnings=list_warnings(gaps),
    )


def say_logs(logs: Sequence[Log], hops: Sequence[TestedHop]) -> str:
    """Say what logs tell, in a sentence."""
    first = next((hop for hop in hops if hop.judgement.slow), hops[0] if hops else None)
    if first is None:
        return f"{counted(len(logs), 'log')} read; none measures a single hop."
    way = "↔" if first.both_ways else "→"
    name, rate = f"Hop {first.hop[0]} {way} {first.hop[1]}", show_rate(first.bytes_per_s)
    judged = first.judgement
    if judged.slow:
        return f"{name} {judged.why}, {rate}."
    if not first.both_ways:
        healthy = sum(hop.judgement.verdict == Verdict.HEALTHY for hop in hops)
        return f"{counted(healthy, 'hop')} of {len(hops)} healthy; none is slow."
    return f"{name}: {rate} per direction with messages both ways, {judged.verdict}: {judged.why}."


def say_live(hops: Sequence[LiveHop]) -> str:
    """Say what a live test tells, in a sentence."""
    slow = [hop for hop in hops if hop.judgement.slow]
    if slow:
        more = f", and {counted(len(slow) - 1, 'more hop')}" if len(slow) > 1 else ""
        sentence = say_slow_hop(slow[0])
        return f"{sentence[0].upper()}{sentence[1:]}{more}."
    healthy = sum(hop.judgement.verdict == Verdict.HEALTHY for hop in hops)
    if not healthy:
        return f"Unknown: {hops[0].judgement.why}." if hops else "No hop was measured."
    rest = len(hops) - healthy
    return f"{counted(healthy, 'hop')} healthy{f'; {rest} unknown' if rest else ''}."


def say_slow_hop(hop: LiveHop) -> str:
    """Say how slow a hop is, and who is ill."""
    ill = {None: "", "link": "; both ranks are fast with others: the link between them is slow"}
    more = ill.get(hop.ill, f"; {hop.ill} is slow with others, too")
    rate = show_rate(hop.bytes_per_s)
    return f"hop {hop.hop[0]} → {hop.hop[1]} {hop.judgement.why}, {rate}{more}"


def _measured_hop(hop: LiveHop, job_bytes: int | None) -> MeasuredHop:
    job = next((rung for rung in hop.rungs if rung.size_bytes == job_bytes), hop.rungs[-1])
    return MeasuredHop.of(
        hop,
        from_rank=hop.hop[0],
        to_rank=hop.hop[1],
        bytes=job.size_bytes,
        one_message_s=job.one_way.alone_s,
        one_message_bytes_per_s=job.size_bytes / job.one_way.alone_s,
    )
