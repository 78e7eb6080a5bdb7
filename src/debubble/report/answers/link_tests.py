"""Logs of link tests, or a live test, in → what `debubble links` answers of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import msgspec

from debubble.errors import Gap
from debubble.links.hop_times import Verdict
from debubble.links.live import HopTestResult, LiveHop
from debubble.links.logs.model import (
    CopyLog,
    CounterLog,
    Log,
    Matrix,
    MatrixLog,
    MessageLog,
    MessagesOfHop,
    NcclLog,
    NcclRow,
    NvlinkErrors,
    NvlinkStatus,
    Topology,
)
from debubble.links.logs.pairs import PairResult
from debubble.links.wiring import SCHEMA
from debubble.report.answers.base import Answer, AnswerWarning, Part, list_warnings
from debubble.units import counted, show_rate


class NcclPart(Part, frozen=True, kw_only=True, tag_field="program", tag="nccl-tests"):
    """A log of nccl-tests."""

    file: str
    test: str | None
    ranks: int
    average_bytes_per_s: float
    rows: tuple[NcclRow, ...]


class NvbandwidthPart(Part, frozen=True, kw_only=True, tag_field="program", tag="nvbandwidth"):
    """A log of nvbandwidth."""

    file: str
    tests: tuple[Matrix, ...]


class JoinPart(Part, frozen=True, kw_only=True):
    """How two devices are joined, in the words of nvidia-smi."""

    devices: list[int]
    join: str


class TopologyPart(Part, frozen=True, kw_only=True, tag_field="program", tag="nvidia-smi topo"):
    """What `nvidia-smi topo -m` printed."""

    file: str
    joins: list[JoinPart]


class MessagesPart(Part, frozen=True, kw_only=True, tag_field="program", tag="messages"):
    """What torch's flight recorder or NCCL Inspector wrote."""

    paths: ClassVar = {"recorder": "program"}

    file: str
    recorder: str
    hops: list[MessagesOfHop]


LogPart = (
    NcclPart
    | NvbandwidthPart
    | CopyLog
    | TopologyPart
    | NvlinkStatus
    | NvlinkErrors
    | CounterLog
    | MessagesPart
)


class TestedHop(Part, frozen=True, kw_only=True):
    """One direction between two ranks, as a test measured it."""

    paths: ClassVar = {
        "bytes": "size_bytes",
        "one_message_s": "time_s",
        "one_message_bytes_per_s": "bytes_per_s",
        "alpha_s": "fit.latency_ns",
        "beta_bytes_per_s": "fit.bytes_per_s",
        "fit_error_fraction": "fit.worst_error",
        "verdict": "judgement.verdict",
        "against": "judgement.against",
        "times": "judgement.times",
        "why": "judgement.why",
    }

    from_rank: int
    to_rank: int
    bytes: int
    one_message_s: float
    one_message_bytes_per_s: float
    bytes_per_s: float
    alpha_s: float | None
    beta_bytes_per_s: float | None
    fit_error_fraction: float | None
    verdict: str
    against: str | None
    times: float | None
    why: str
    cost_per_batch_s: float | None = None
    """Null: a test is of no batch."""


class LoggedHop(TestedHop, frozen=True, kw_only=True):
    """The same, of a log."""

    file: str


class RungPart(Part, frozen=True, kw_only=True):
    """Messages of one size over one hop."""

    paths: ClassVar = {
        "from_rank": "source",
        "to_rank": "destination",
        "bytes": "size_bytes",
        "one_way_s": "one_way.median_s",
        "one_way_p95_s": "one_way.p95_s",
        "both_ways_s": "both_ways.median_s",
        "n": "one_way.n",
    }

    from_rank: int
    to_rank: int
    bytes: int
    one_way_s: float
    one_way_p95_s: float
    both_ways_s: float | None
    n: int


class MeasuredHop(TestedHop, frozen=True, kw_only=True):
    """The same, of a test that ran here."""

    paths: ClassVar = TestedHop.paths | {"ladder": "rungs"}

    both_ways_bytes_per_s: float | None
    ladder: list[RungPart]
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


def answer_logs(
    logs: Sequence[Log], pairs: Sequence[PairResult], gaps: Sequence[Gap]
) -> LogsAnswer:
    """Say what logs tell of hops; what the environment held is not in it."""
    return LogsAnswer(
        hops=[hop for result in pairs for hop in _logged_hops(result)],
        logs=[_log_part(log) for log in logs],
        verdict=say_logs(logs, pairs),
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


def say_logs(logs: Sequence[Log], pairs: Sequence[PairResult]) -> str:
    """Say what logs tell, in a sentence."""
    first = next((result for result in pairs if result.judgement.slow), pairs[0] if pairs else None)
    if first is None:
        return f"{counted(len(logs), 'log')} read; none measures a single hop."
    way = "↔" if first.both_ways else "→"
    name, rate = f"Hop {first.pair[0]} {way} {first.pair[1]}", show_rate(first.bytes_per_s)
    judged = first.judgement
    if judged.slow:
        return f"{name} {judged.why}, {rate}."
    if not first.both_ways:
        healthy = sum(result.judgement.verdict == Verdict.HEALTHY for result in pairs)
        return f"{counted(healthy, 'hop')} of {len(pairs)} healthy; none is slow."
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


def _logged_hops(result: PairResult) -> list[LoggedHop]:
    """Return both directions of a test, which sends both ways at once and tells them not apart."""
    hops = [result.pair, result.pair[::-1]] if result.both_ways else [result.pair]
    return [LoggedHop.of(result, from_rank=here, to_rank=there) for here, there in hops]


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


def _log_part(log: Log) -> LogPart:
    match log:
        case NcclLog():
            return NcclPart.of(log, ranks=len(log.ranks))
        case MatrixLog():
            return NvbandwidthPart.of(log)
        case Topology():
            return TopologyPart.of(
                log, joins=[JoinPart(devices=[*pair], join=how) for pair, how in log.joins.items()]
            )
        case MessageLog():
            return MessagesPart.of(log)
        case _:
            return log
