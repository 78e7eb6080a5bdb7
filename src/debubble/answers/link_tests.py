"""Logs of link tests, or a live test, in → what `debubble links` answers of them."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from debubble.answers.base import Answer, AnswerWarning, Part, list_warnings
from debubble.errors import Gap
from debubble.links.judge import Verdict
from debubble.links.live import HopTestResult, LiveHop, Rung
from debubble.links.logs.model import (
    CopyLog,
    CounterLog,
    Half,
    Log,
    MatrixLog,
    MessageLog,
    NcclLog,
    NvlinkErrors,
    Topology,
)
from debubble.links.logs.pairs import PairResult
from debubble.links.wiring import SCHEMA
from debubble.units import NS_PER_S, counted, show_rate

GB = 1e9


class HalfPart(Part, frozen=True, kw_only=True):
    """One measurement of nccl-tests: out of place, or in place."""

    time_s: float
    algbw_bytes_per_s: float
    busbw_bytes_per_s: float
    wrong: float | None
    host_time: bool
    iterations: dict[str, float]


class SizePart(Part, frozen=True, kw_only=True):
    """One size of messages of nccl-tests."""

    bytes: int
    out_of_place: HalfPart | None
    in_place: HalfPart | None


class NcclPart(Part, frozen=True, kw_only=True, tag_field="program", tag="nccl-tests"):
    """A log of nccl-tests."""

    file: str
    test: str | None
    ranks: int
    average_bytes_per_s: float
    rows: list[SizePart]


class MatrixPart(Part, frozen=True, kw_only=True):
    """One test of nvbandwidth."""

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

    from_rank: int
    to_rank: int
    bytes: int
    one_way_s: float
    one_way_p95_s: float
    both_ways_s: float | None
    n: int


class MeasuredHop(TestedHop, frozen=True, kw_only=True):
    """The same, of a test that ran here."""

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
        second_pass=[_rung_part(rung) for rung in measured.second],
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
    return [
        LoggedHop(
            from_rank=here,
            to_rank=there,
            bytes=result.size_bytes,
            one_message_s=result.time_s,
            one_message_bytes_per_s=result.bytes_per_s,
            bytes_per_s=result.bytes_per_s,
            alpha_s=result.fit.latency_ns / NS_PER_S if result.fit else None,
            beta_bytes_per_s=result.fit.bytes_per_s if result.fit else None,
            fit_error_fraction=result.fit.worst_error if result.fit else None,
            verdict=str(result.judgement.verdict),
            against=result.judgement.against,
            times=result.judgement.times,
            why=result.judgement.why,
            file=result.file,
        )
        for here, there in (result.pair, *([result.pair[::-1]] if result.both_ways else []))
    ]


def _measured_hop(hop: LiveHop, job_bytes: int | None) -> MeasuredHop:
    job = next((rung for rung in hop.rungs if rung.size_bytes == job_bytes), hop.rungs[-1])
    return MeasuredHop(
        from_rank=hop.hop[0],
        to_rank=hop.hop[1],
        bytes=job.size_bytes,
        one_message_s=job.one_way.alone_s,
        one_message_bytes_per_s=job.size_bytes / job.one_way.alone_s,
        bytes_per_s=hop.bytes_per_s,
        both_ways_bytes_per_s=hop.both_ways_bytes_per_s,
        alpha_s=hop.fit.latency_ns / NS_PER_S if hop.fit else None,
        beta_bytes_per_s=hop.fit.bytes_per_s if hop.fit else None,
        fit_error_fraction=hop.fit.worst_error if hop.fit else None,
        ladder=[_rung_part(rung) for rung in hop.rungs],
        verdict=str(hop.judgement.verdict),
        against=hop.judgement.against,
        times=hop.judgement.times,
        why=hop.judgement.why,
        ill=hop.ill,
    )


def _rung_part(rung: Rung) -> RungPart:
    return RungPart(
        from_rank=rung.source,
        to_rank=rung.destination,
        bytes=rung.size_bytes,
        one_way_s=rung.one_way.median_s,
        one_way_p95_s=rung.one_way.p95_s,
        both_ways_s=rung.both_ways.median_s if rung.both_ways else None,
        n=rung.one_way.n,
    )


def _log_part(log: Log) -> LogPart:
    if isinstance(log, NcclLog):
        return NcclPart(
            file=log.file,
            test=log.test or None,
            ranks=len(log.ranks),
            average_bytes_per_s=log.average_gb_s * GB,
            rows=[
                SizePart(
                    bytes=row.size_bytes,
                    out_of_place=_half_part(row.out_of_place),
                    in_place=_half_part(row.in_place),
                )
                for row in log.rows
            ],
        )
    if isinstance(log, MatrixLog):
        tests = [
            MatrixPart(
                name=test.name,
                status=test.status,
                unit=test.unit,
                rows=list(test.rows),
                columns=list(test.columns),
                cells=[list(row) for row in test.cells],
                sum=test.total,
            )
            for test in log.tests
        ]
        return NvbandwidthPart(file=log.file, tests=tests)
    if isinstance(log, CopyLog):
        rates = {name: rate * GB for name, rate in log.rates_gb_s}
        return CopyPart(file=log.file, bytes_per_s=rates)
    if isinstance(log, Topology):
        joins = [JoinPart(devices=list(pair), join=how) for pair, how in log.joins.items()]
        return TopologyPart(file=log.file, joins=joins)
    if isinstance(log, CounterLog | NvlinkErrors | MessageLog):
        return _of_a_job(log)
    devices = [
        DevicePart(
            device=index,
            name=name,
            links_bytes_per_s=[None if rate is None else rate * GB for rate in links],
        )
        for index, name, links in log.devices
    ]
    return NvlinkPart(file=log.file, devices=devices)


def _of_a_job(log: CounterLog | NvlinkErrors | MessageLog) -> LogPart:
    if isinstance(log, MessageLog):
        return MessagesPart(
            file=log.file,
            recorder=log.program,
            hops=[
                MessageHopPart(
                    from_rank=row.hop[0],
                    to_rank=row.hop[1],
                    seen_by="sender" if row.sent else "receiver",
                    messages=row.messages,
                    bytes=row.size_bytes,
                    median_s=row.time_ns / NS_PER_S,
                )
                for row in log.hops
            ],
        )
    if isinstance(log, CounterLog):
        rose = [
            CounterPart(
                name=counter.name,
                host=counter.host or None,
                device=counter.device or None,
                increase=counter.increase,
                intervals=counter.intervals,
                risen_intervals=counter.risen,
            )
            for counter in log.counters
        ]
        return PrometheusPart(file=log.file, counters=rose)
    counters = [
        LinkErrorsPart(device=index, name=name, link=link, kind=kind, errors=errors)
        for index, name, found in log.devices
        for link, kind, errors in found
    ]
    return NvlinkErrorsPart(file=log.file, counters=counters)


def _half_part(half: Half | None) -> HalfPart | None:
    if half is None:
        return None
    return HalfPart(
        time_s=half.time_us / 1e6,
        algbw_bytes_per_s=half.algbw_gb_s * GB,
        busbw_bytes_per_s=half.busbw_gb_s * GB,
        wrong=half.wrong,
        host_time=half.host_time,
        iterations=dict(half.iterations),
    )
