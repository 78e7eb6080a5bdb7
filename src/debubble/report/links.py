"""Answers of `debubble links` in, of traces, logs or a test → their pages for people."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from debubble.links.hop_times import Verdict
from debubble.report.answers.base import flat_row
from debubble.report.answers.link_tests import (
    LiveAnswer,
    LoggedHop,
    LogPart,
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

# Of a long pipeline nobody pastes them all.
_COMMANDS_SHOWN = 16
_SHARED = (
    "ranks share a device: shared compute is modelled, shared links are not; costs are upper bounds"
)


def links_page(answer: LinksAnswer, next_command: str = "") -> Page:
    """Lay out the answer: which hop is slow and what it costs, then every hop."""
    page = Page(answer=answer.verdict, findings=list(answer.findings), tables=[_table(answer.hops)])
    page.lines = [f"check: {command}" for command in answer.commands[:_COMMANDS_SHOWN]]
    if len(answer.commands) > _COMMANDS_SHOWN:
        page.lines.append(f"{len(answer.commands) - _COMMANDS_SHOWN} more commands in --json")
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
    page.tables += [_log_table(log) for log in answer.logs]
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


# How a figure is written, by the end of its name.
_UNITS: dict[str, Callable[[Any], str]] = {
    "bytes_per_s": show_rate,
    "_s": show_seconds,
    "bytes": show_bytes,
}


def _log_table(log: LogPart) -> Table:
    """Lay out the rows of a log, a column a field; counters that never rose are left out."""
    data = msgspec.to_builtins(log)
    program = data.get("recorder") or data.get("test") or data["program"]
    rates = data.get("bytes_per_s", {})
    rows = [{"name": name, "bytes_per_s": rate} for name, rate in rates.items()]
    for listed in data.values():
        if isinstance(listed, list | tuple):
            rows += [flat_row(row) for row in listed if row.get("errors", 1)]
    figures = (item for row in rows for item in row.items() if not isinstance(item[1], bool))
    names = tuple(dict.fromkeys(name for name, _ in figures))
    table = Table(columns=tuple(map(_heading, names)), title=f"{data['file']}: {program}")
    table.rows = [tuple(_cell(name, row.get(name)) for name in names) for row in rows]
    return table.without_unknown()


def _heading(name: str) -> str:
    unit = next((unit for unit in _UNITS if name.endswith(unit)), "")
    return (name.removesuffix(unit).strip("._") or name).replace("_", " ").replace(".", " ")


def _cell(name: str, value: Any) -> str:
    if isinstance(value, list | tuple):
        return " ".join(_cell(name, each) for each in value)
    show = next((show for unit, show in _UNITS.items() if name.endswith(unit)), str)
    if isinstance(value, float) and show is str:
        return f"{value:g}"
    return UNKNOWN if value is None else show(value)
