"""Logs of link tests, or a live test, in → the page of `debubble links` for them."""

from __future__ import annotations

from collections.abc import Sequence

from debubble.errors import Gap
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
from debubble.report.answers.link_tests import say_live, say_logs, say_slow_hop
from debubble.report.text import Page, Table
from debubble.units import (
    UNKNOWN,
    counted,
    show_bytes,
    show_duration,
    show_known,
    show_rate,
    show_seconds,
)


def logs_page(
    logs: Sequence[Log], pairs: Sequence[PairResult], gaps: Sequence[Gap], next_command: str
) -> Page:
    """Lay out the answer: what the logs tell of hops, then each of them."""
    page = Page(answer=say_logs(logs, pairs))
    if pairs:
        page.tables.append(_pair_table(pairs))
    page.tables += [_log_table(log) for log in logs]
    page.gaps = list(gaps)
    page.next_command = next_command
    return page


def _pair_table(pairs: Sequence[PairResult]) -> Table:
    table = Table(columns=("hop", "largest", "rate", "latency", "bandwidth", "verdict", "file"))
    for result in pairs:
        table.add(
            f"{result.pair[0]} {'↔' if result.both_ways else '→'} {result.pair[1]}",
            show_bytes(result.size_bytes),
            show_rate(result.bytes_per_s),
            show_known(result.fit, lambda fit: show_duration(fit.latency_ns)),
            show_known(result.fit, lambda fit: show_rate(fit.bytes_per_s)),
            str(result.judgement.verdict),
            result.file,
        )
    return table


def _log_table(log: Log) -> Table:
    if isinstance(log, NcclLog):
        return _nccl_table(log)
    if isinstance(log, MatrixLog):
        return _matrix_table(log)
    table = Table(title=log.file, columns=("name", "rate"))
    if isinstance(log, CopyLog):
        table.rows = [(name, show_rate(rate)) for name, rate in log.bytes_per_s.items()]
    elif isinstance(log, Topology):
        table.columns = ("hop", "name")
        table.rows = [(f"{a} → {b}", how) for (a, b), how in log.joins.items()]
    elif isinstance(log, NvlinkStatus):
        table.columns = ("device", "name", "links", "rate")
        for row in log.devices:
            links = row.links_bytes_per_s
            active = [rate for rate in links if rate is not None]
            shown = f"{len(active)} of {len(links)}"
            table.add(str(row.device), row.name, shown, show_rate(sum(active)))
    elif isinstance(log, CounterLog):
        table.columns = ("device", "host", "name", "errors", "intervals")
        table.rows = [
            (
                row.device or "",
                row.host or "",
                row.name,
                str(row.increase),
                f"{row.risen_intervals} of {row.intervals}",
            )
            for row in log.counters
        ]
    elif isinstance(log, MessageLog):
        table.title = f"{log.file}: {log.program}"
        table.columns = ("hop", "seen by", "messages", "largest", "takes")
        table.rows = [
            (
                f"{row.from_rank} → {row.to_rank}",
                row.seen_by,
                str(row.messages),
                show_bytes(row.bytes),
                show_seconds(row.median_s),
            )
            for row in log.hops
        ]
    elif isinstance(log, NvlinkErrors):
        table.columns = ("device", "name", "link", "errors")
        table.rows = [
            (str(row.device), row.name, str(row.link), f"{row.errors} {row.kind}")
            for row in log.counters
            if row.errors
        ]
    return table


def _nccl_table(log: NcclLog) -> Table:
    test = log.test or "nccl-tests"
    table = Table(
        title=f"{log.file}: {test}, {counted(len(log.ranks), 'rank')}",
        columns=("size", "time", "algbw", "busbw", "in place", "busbw in place"),
    )
    for row in log.rows:
        out, into = row.out_of_place, row.in_place
        table.add(
            show_bytes(row.bytes),
            show_known(out, lambda timing: show_seconds(timing.time_s)),
            show_known(out, lambda timing: show_rate(timing.algbw_bytes_per_s)),
            show_known(out, lambda timing: show_rate(timing.busbw_bytes_per_s)),
            show_known(into, lambda timing: show_seconds(timing.time_s)),
            show_known(into, lambda timing: show_rate(timing.busbw_bytes_per_s)),
        )
    return table


def _matrix_table(log: MatrixLog) -> Table:
    table = Table(
        title=f"{log.file}: nvbandwidth {log.version}", columns=("test", "figures", "sum")
    )
    for test in log.tests:
        shown = " ".join(
            "N/A" if cell is None else f"{cell:g}" for row in test.cells for cell in row
        )
        total = UNKNOWN if test.sum is None else f"{test.sum:g} {test.unit}"
        table.add(test.name, shown or test.status, total)
    return table


def live_page(
    measured: HopTestResult, hops: Sequence[LiveHop], gaps: Sequence[Gap], next_command: str
) -> Page:
    """Lay out the answer: which hop is slow and who is ill, then every hop."""
    page = Page(answer=say_live(hops))
    slow = [hop for hop in hops if hop.judgement.slow]
    page.findings = [f"{say_slow_hop(hop)}." for hop in slow[1:]]
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
    for hop in hops:
        last = hop.rungs[-1]
        table.add(
            f"{hop.hop[0]} → {hop.hop[1]}",
            show_bytes(last.size_bytes),
            show_seconds(last.one_way.alone_s),
            show_rate(hop.bytes_per_s),
            show_known(hop.both_ways_bytes_per_s, show_rate),
            show_known(hop.fit, lambda fit: show_duration(fit.latency_ns)),
            show_known(hop.fit, lambda fit: show_rate(fit.bytes_per_s)),
            str(hop.judgement.verdict),
        )
    page.tables = [table]
    page.notes = [_about(measured)]
    page.gaps = list(gaps)
    page.next_command = next_command
    return page


def _about(measured: HopTestResult) -> str:
    samples = min((rung.one_way.n for rung in measured.rungs), default=0)
    hosts = len({place.host for place in measured.places})
    return (
        f"{counted(len(measured.places), 'rank')} on {counted(hosts, 'host')}, {measured.backend};"
        f" {samples} messages of each size, the 10th percentile is listed;"
        " one hop at a time"
    )
