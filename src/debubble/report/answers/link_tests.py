"""Logs of link tests, or a live test, in → what `debubble links` answers of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import msgspec

from debubble.errors import Gap
from debubble.links.judge import Verdict
from debubble.links.live import HopTestResult, LiveHop
from debubble.links.logs.model import (
    CopyLog,
    CounterLog,
    Log,
    MatrixLog,
    MessageLog,
    NcclLog,
    NvlinkErrors,
    NvlinkStatus,
    Topology,
)
from debubble.links.logs.pairs import PairResult
from debubble.links.wiring import SCHEMA
from debubble.report.answers.base import Answer, AnswerWarning, Part, list_warnings
from debubble.units import counted, show_rate

GB = 1e9


class HalfPart(Part, frozen=True, kw_only=True):
    """One measurement of nccl-tests: out of place, or in place."""

    paths: ClassVar = {
        "time_s": "time_us",
        "algbw_bytes_per_s": "algbw_gb_s",
        "busbw_bytes_per_s": "busbw_gb_s",
    }

    time_s: float
    algbw_bytes_per_s: float
    busbw_bytes_per_s: float
    wrong: float | None
    host_time: bool
    iterations: dict[str, float]


class SizePart(Part, frozen=True, kw_only=True):
    """One size of messages of nccl-tests."""

    paths: ClassVar = {"bytes": "size_bytes"}

    bytes: int
    out_of_place: HalfPart | None
    in_place: HalfPart | None


class NcclPart(Part, frozen=True, kw_only=True, tag_field="program", tag="nccl-tests"):
    """A log of nccl-tests."""

    paths: ClassVar = {"average_bytes_per_s": "average_gb_s"}

    file: str
    test: str | None
    ranks: int
    average_bytes_per_s: float
    rows: list[SizePart]


class MatrixPart(Part, frozen=True, kw_only=True):
    """One test of nvbandwidth."""

    paths: ClassVar = {"sum": "total"}

    name: str
    status: str
    unit: str
    rows: list[int]
    columns: list[int]
    cells: list[list[float | None]]
    sum: float | None


class NvbandwidthPart(Part, frozen=True, kw_only=True, tag_field="program", tag="nvbandwidth"):
    """A log of nvbandwidth."""

    file: str
    tests: list[MatrixPart]


class CopyPart(Part, frozen=True, kw_only=True, tag_field="program", tag="gpu_copy"):
    """A log of SuperBench's gpu_copy."""

    file: str
    bytes_per_s: dict[str, float]


class JoinPart(Part, frozen=True, kw_only=True):
    """How two devices are joined, in the words of nvidia-smi."""

    devices: list[int]
    join: str


class TopologyPart(Part, frozen=True, kw_only=True, tag_field="program", tag="nvidia-smi topo"):
    """What `nvidia-smi topo -m` printed."""

    file: str
    joins: list[JoinPart]


class DevicePart(Part, frozen=True, kw_only=True):
    """The links of a device; null where one is inactive."""

    device: int
    name: str
    links_bytes_per_s: list[float | None]


class NvlinkPart(Part, frozen=True, kw_only=True, tag_field="program", tag="nvidia-smi nvlink"):
    """What `nvidia-smi nvlink -s` printed."""

    file: str
    devices: list[DevicePart]


class LinkErrorsPart(Part, frozen=True, kw_only=True):
    """One counter of one link of a device."""

    device: int
    name: str
    link: int
    kind: str
    errors: int


class NvlinkErrorsPart(
    Part, frozen=True, kw_only=True, tag_field="program", tag="nvidia-smi nvlink -e"
):
    """What `nvidia-smi nvlink -e` printed."""

    file: str
    counters: list[LinkErrorsPart]


class CounterPart(Part, frozen=True, kw_only=True):
    """One counter of a link's errors over some time."""

    paths: ClassVar = {"risen_intervals": "risen"}

    name: str
    host: str | None
    device: str | None
    increase: int
    intervals: int
    risen_intervals: int


class PrometheusPart(Part, frozen=True, kw_only=True, tag_field="program", tag="prometheus"):
    """What Prometheus answered to a range query."""

    file: str
    counters: list[CounterPart]


class MessageHopPart(Part, frozen=True, kw_only=True):
    """The messages of one hop in a log, as one side saw them."""

    paths: ClassVar = {"bytes": "size_bytes", "median_s": "time_ns"}

    from_rank: int
    to_rank: int
    seen_by: str
    """`sender` or `receiver`."""
    messages: int
    bytes: int
    """The largest."""
    median_s: float
    """Of the largest, with what their kernels waited for the other side."""


class MessagesPart(Part, frozen=True, kw_only=True, tag_field="program", tag="messages"):
    """What torch's flight recorder or NCCL Inspector wrote."""

    paths: ClassVar = {"recorder": "program"}

    file: str
    recorder: str
    hops: list[MessageHopPart]


LogPart = (
    NcclPart
    | NvbandwidthPart
    | CopyPart
    | TopologyPart
    | NvlinkPart
    | NvlinkErrorsPart
    | PrometheusPart
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
        verdict=say_live(hops),
        warnings=list_warnings(gaps),
    )


def say_logs(logs: Sequence[Log], pairs: Sequence[PairResult]) -> str:
    """Say what logs tell, in a sentence."""
    first = next((result for result in pairs if result.judgement.slow), pairs[0] if pairs else None)
    if first is None:
        return f"{counted(len(logs), 'log')} read; none of them measures one hop by itself."
    way = "↔" if first.both_ways else "→"
    name, rate = f"Hop {first.pair[0]} {way} {first.pair[1]}", show_rate(first.bytes_per_s)
    judged = first.judgement
    if judged.slow:
        return f"{name} {judged.why}, {rate}."
    if not first.both_ways:
        healthy = sum(result.judgement.verdict == Verdict.HEALTHY for result in pairs)
        return f"{counted(healthy, 'hop')} of {len(pairs)} healthy; none is slow."
    return f"{name}: {rate} a direction with messages both ways, {judged.verdict}: {judged.why}."


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
    ill = {None: "", "link": "; with others both ranks are well: it is the link between them"}
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


def _log_part(log: Log) -> LogPart:  # noqa: PLR0911 (one a program)
    match log:
        case NcclLog():
            return NcclPart.of(log, ranks=len(log.ranks))
        case MatrixLog():
            return NvbandwidthPart.of(log)
        case CopyLog():
            return CopyPart.of(log, bytes_per_s={name: rate * GB for name, rate in log.rates_gb_s})
        case Topology():
            return TopologyPart.of(
                log, joins=[JoinPart(devices=[*pair], join=how) for pair, how in log.joins.items()]
            )
        case MessageLog():
            hops = [
                MessageHopPart.of(
                    row,
                    from_rank=row.hop[0],
                    to_rank=row.hop[1],
                    seen_by="sender" if row.sent else "receiver",
                )
                for row in log.hops
            ]
            return MessagesPart.of(log, hops=hops)
        case CounterLog():
            return PrometheusPart.of(log)
        case NvlinkErrors():
            counters = [
                LinkErrorsPart(device=index, name=name, link=link, kind=kind, errors=errors)
                for index, name, every in log.devices
                for link, kind, errors in every
            ]
            return NvlinkErrorsPart.of(log, counters=counters)
        case NvlinkStatus():
            rates = [
                DevicePart(
                    device=index,
                    name=name,
                    links_bytes_per_s=[None if rate is None else rate * GB for rate in links],
                )
                for index, name, links in log.devices
            ]
            return NvlinkPart.of(log, devices=rates)
