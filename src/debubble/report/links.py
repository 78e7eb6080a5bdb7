"""Answers of `debubble links` in, of traces, logs or a test → their pages for people."""

from __future__ import annotations

from collections.abc import Sequence

from debubble.links.hop_times import Verdict
from debubble.links.logs.log import Cell
from debubble.report.answers.link_tests import (
    LiveAnswer,
    LoggedHop,
    LogsAnswer,
    MeasuredHop,
)
from debubble.report.answers.links import LinkPart, LinksAnswer
from debubble.report.text import (
    FEW,
    Page,
    Table,
    fold,
    show_sizes,
)
from debubble.units import (
    UNKNOWN,
    counted,
    show_bytes,
    show_known,
    show_range,
    show_rate,
    show_seconds,
    show_share,
)

_SHARED = (
    "ranks share a device: shared compute is modelled, shared links are not; costs are upper bounds"
)


def links_page(answer: LinksAnswer, next_command: str = "") -> Page:
    """Lay out the answer: which hop is slow and what it costs, then every hop."""
    page = Page(answer=answer.verdict, findings=list(answer.findings), tables=[_table(answer.hops)])
    page.lines = [f"check: {command}" for command in answer.commands[:FEW]]
    if len(answer.commands) > FEW:
        page.lines.append(f"{len(answer.commands) - FEW} more commands in --json")
    page.notes = [f"times: {answer.basis}"]
    if answer.cost_is_upper_bound and any(hop.verdict == Verdict.SLOW for hop in answer.hops):
        page.notes.append(_SHARED)
    page.gaps = list(answer.warnings)
    page.next_command = next_command
    return page


def _table(hops: Sequence[LinkPart]) -> Table:
    columns = "hop|size|one message|rate|both ways|wait|buffered|class|verdict|costs"
    table = Table(columns=tuple(columns.split("|")))
    for name, alike in fold(
        hops,
        2 * FEW,
        lambda hop: hop.one_message_bytes_per_s,
        keep=lambda hop: hop.verdict == Verdict.SLOW,
    ):
        hop = alike[0]
        cost, both_ways = hop.cost_per_batch_s, hop.both_ways_s
        table.add(
            name or f"{hop.from_rank} → {hop.to_rank}",
            show_sizes([hop.bytes for hop in alike]),
            show_range([hop.one_message_s for hop in alike], show_seconds, "hidden"),
            show_range([hop.one_message_bytes_per_s for hop in alike], show_rate),
            "" if name else show_known(both_ways.median if both_ways else None, show_seconds),
            show_range([hop.wait_s.median for hop in alike], show_seconds),
            "" if name else show_share(hop.buffered_fraction),
            "" if name else _show_class(hop),
            " or ".join(sorted({str(hop.verdict) for hop in alike})),
            "" if name else UNKNOWN if cost is None else show_seconds(max(cost, 0)),
        )
    return table.without_unknown()


def _show_class(hop: LinkPart) -> str:
    return UNKNOWN if hop.class_ is None else hop.class_ + ("" if hop.class_stated else "?")


def logs_page(answer: LogsAnswer, next_command: str = "") -> Page:
    """Lay out the answer: what the logs tell of hops, then each of them."""
    page = Page(answer=answer.verdict, gaps=list(answer.warnings), next_command=next_command)
    if answer.hops:
        page.tables.append(_tested_table(answer.hops))
    for log in answer.logs:
        title = f"{log.file}: {log.about}" if log.about else log.file
        table = Table(title=title, columns=tuple(map(_heading, log.columns)))
        table.rows = [tuple(map(_cell, log.columns, row)) for row in log.rows]
        page.tables.append(table)
    return page


def live_page(answer: LiveAnswer, next_command: str = "") -> Page:
    """Lay out the answer: which hop is slow and who is ill, then every hop."""
    page = Page(answer=answer.verdict, gaps=list(answer.warnings), next_command=next_command)
    page.findings = list(answer.findings)
    page.tables = [_tested_table(answer.hops)]
    samples = min((rung.n for hop in answer.hops for rung in hop.ladder), default=0)
    each = f"{counted(samples, 'message')} of each size, the 10th percentile is listed"
    page.notes = [f"{answer.backend}; {each}; one hop at a time"]
    return page


def _tested_table(hops: Sequence[LoggedHop | MeasuredHop]) -> Table:
    columns = "hop|size|one message|rate|both ways|latency|bandwidth|verdict|file"
    table = Table(columns=tuple(columns.split("|")))
    for hop in hops:
        both_ways = hop.both_ways_bytes_per_s if isinstance(hop, MeasuredHop) else None
        table.add(
            f"{hop.from_rank} → {hop.to_rank}",
            show_bytes(hop.bytes),
            show_seconds(hop.one_message_s),
            show_rate(hop.bytes_per_s),
            show_known(both_ways, show_rate),
            show_known(hop.alpha_s, show_seconds),
            show_known(hop.beta_bytes_per_s, show_rate),
            hop.verdict,
            hop.file if isinstance(hop, LoggedHop) else "",
        )
    return table.without_unknown()


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
