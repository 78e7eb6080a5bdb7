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
from debubble.report.answers.link_tests import GB, say_live, say_logs, say_slow_hop
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
        table.rows = [(name, show_rate(rate * GB)) for name, rate in log.rates_gb_s]
    elif isinstance(log, Topology):
        table.columns = ("hop", "name")
        table.rows = [(f"{a} → {b}", how) for (a, b), how in log.joins.items()]
    elif isinstance(log, NvlinkStatus):
        table.columns = ("device", "name", "links", "rate")
        for index, name, links in log.devices:
            active = [rate for rate in links if rate is not None]
            row = str(index), name, f"{len(active)} of {len(links)}", show_rate(sum(active) * GB)
            table.rows.append(row)
    elif isinstance(log, CounterLog):
        table.columns = ("device", "host", "name", "errors", "intervals")
        table.rows = [
            (one.device, one.host, one.name, str(one.increase), f"{one.risen} of {one.intervals}")
            for one in log.counters
        ]
    elif isinstance(log, MessageLog):
        table.title = f"{log.file}: {log.program}"
        table.columns = ("hop", "seen by", "messages", "largest", "takes")
        table.rows = [
            (
                f"{row.hop[0]} → {row.hop[1]}",
                "sender" if row.sent else "receiver",
                str(row.messages),
                show_bytes(row.size_bytes),
                show_duration(row.time_ns),
            )
            for row in log.hops
        ]
    elif isinstance(log, NvlinkErrors):
        table.columns = ("device", "name", "link", "errors")
        table.rows = [
            (str(index), name, str(link), f"{errors} {kind}")
            for index, name, counters in log.devices
            for link, kind, errors in counters
            if errors
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
            show_bytes(row.size_bytes),
            show_known(out, lambda timing: show_duration(timing.time_us * 1000)),
            show_known(out, lambda timing: show_rate(timing.algbw_gb_s * GB)),
            show_known(out, lambda timing: show_rate(timing.busbw_gb_s * GB)),
            show_known(into, lambda timing: show_duration(timing.time_us * 1000)),
            show_known(into, lambda timing: show_rate(timing.busbw_gb_s * GB)),
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
        total = UNKNOWN if test.total is None else f"{test.total:g} {test.unit}"
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
        f" {samples} messages of each size, of which a tenth was quicker than told;"
        " one hop at a time"
    )
