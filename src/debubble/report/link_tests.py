"""Logs of link tests, or a live test, in → the page of `debubble links` for them."""

from __future__ import annotations

from collections.abc import Sequence

from debubble.errors import Gap
from debubble.links.hop_times import TestedHop
from debubble.links.live import HopTestResult, LiveHop
from debubble.links.logs.log import Cell, Log
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
    logs: Sequence[Log], hops: Sequence[TestedHop], gaps: Sequence[Gap], next_command: str
) -> Page:
    """Lay out the answer: what the logs tell of hops, then each of them."""
    page = Page(answer=say_logs(logs, hops))
    if hops:
        page.tables.append(_hop_table(hops))
    for log in logs:
        about = f": {log.about}" if log.about else ""
        page.tables.append(
            Table(
                title=log.file + about,
                columns=tuple(map(_heading, log.columns)),
                rows=[tuple(map(_cell, log.columns, row)) for row in log.rows],
            )
        )
    page.gaps = list(gaps)
    page.next_command = next_command
    return page


def _hop_table(hops: Sequence[TestedHop]) -> Table:
    table = Table(columns=("hop", "largest", "rate", "latency", "bandwidth", "verdict", "file"))
    for hop in hops:
        table.add(
            f"{hop.hop[0]} {'↔' if hop.both_ways else '→'} {hop.hop[1]}",
            show_bytes(hop.size_bytes),
            show_rate(hop.bytes_per_s),
            show_known(hop.fit, lambda fit: show_duration(fit.latency_ns)),
            show_known(hop.fit, lambda fit: show_rate(fit.bytes_per_s)),
            str(hop.judgement.verdict),
            hop.file,
        )
    return table


_UNITS = {"_bytes_per_s": show_rate, "_bytes": show_bytes, "_s": show_seconds}
"""How figures are shown, by the end of their column's name."""


def _heading(column: str) -> str:
    end = next((unit for unit in _UNITS if column.endswith(unit)), "")
    return column.removesuffix(end).replace("_", " ")


def _cell(column: str, cell: Cell) -> str:
    if isinstance(cell, tuple):
        return " ".join("N/A" if figure is None else f"{figure:g}" for figure in cell)
    if cell is None:
        return UNKNOWN
    show = next((show for unit, show in _UNITS.items() if column.endswith(unit)), None)
    return show(cell) if show and not isinstance(cell, str) else str(cell)


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
