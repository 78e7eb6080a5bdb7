"""An answer of `debubble links` in → its page for people."""

from __future__ import annotations

from collections.abc import Sequence

from debubble.links.hop_times import Verdict
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
