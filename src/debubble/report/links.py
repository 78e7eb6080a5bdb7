"""An answer of `debubble links` in → its page for people."""

from __future__ import annotations

from collections.abc import Sequence

from debubble.answers.links import LinkPart, LinksAnswer
from debubble.links.judge import Verdict
from debubble.report.text import FEW, Page, Table, farthest
from debubble.units import show_bytes, show_range, show_rate, show_seconds, show_share

# Of a long pipeline nobody pastes them all.
_COMMANDS_SHOWN = 16
_SHARED = (
    "ranks share a device: that they slow each other is counted, that their wires do is not;"
    " costs are the most it can be"
)


def links_page(found: LinksAnswer, next_command: str = "") -> Page:
    """Lay out the answer: which hop is slow and what it costs, then every hop."""
    page = Page(answer=found.verdict, findings=list(found.findings), tables=[_table(found.hops)])
    page.notes = [f"check: {command}" for command in found.commands[:_COMMANDS_SHOWN]]
    if len(found.commands) > _COMMANDS_SHOWN:
        page.notes.append(f"{len(found.commands) - _COMMANDS_SHOWN} more to check are in --json")
    if found.cost_is_upper_bound and any(hop.verdict == Verdict.SLOW for hop in found.hops):
        page.notes.insert(0, _SHARED)
    page.gaps = list(found.warnings)
    page.next_command = next_command
    return page


def _table(hops: Sequence[LinkPart]) -> Table:
    columns = "hop|size|one message|rate|both ways|wait|buffered|class|verdict|costs"
    table = Table(columns=tuple(columns.split("|")))
    place_of_class = table.columns.index("class")
    shown = set(range(len(hops)))
    if len(hops) > 2 * FEW:
        shown = {place for place, hop in enumerate(hops) if hop.verdict == Verdict.SLOW}
        shown |= farthest([hop.one_message_bytes_per_s for hop in hops])
    for hop in (hops[place] for place in sorted(shown)):
        alone, rate, both = hop.one_message_s, hop.one_message_bytes_per_s, hop.both_ways_s
        table.rows.append(
            (
                f"{hop.from_rank} → {hop.to_rank}",
                "unknown" if hop.bytes is None else show_bytes(hop.bytes),
                "hidden" if alone is None else show_seconds(alone),
                "–" if rate is None else show_rate(rate),
                "–" if both is None or both.median is None else show_seconds(both.median),
                show_seconds(hop.wait_s.median),
                show_share(hop.buffered_fraction),
                "–" if hop.class_ is None else hop.class_ + ("" if hop.class_stated else "?"),
                str(hop.verdict),
                "–" if hop.cost_per_batch_s is None else show_seconds(max(hop.cost_per_batch_s, 0)),
            )
        )
    rest = [hop for place, hop in enumerate(hops) if place not in shown]
    if rest:
        sizes = [hop.bytes for hop in rest if hop.bytes is not None]
        times = [hop.one_message_s for hop in rest if hop.one_message_s is not None]
        rates = [hop.one_message_bytes_per_s for hop in rest if hop.one_message_bytes_per_s]
        table.rows.append(
            (
                f"{len(rest)} others",
                "unknown" if len(sizes) < len(rest) else show_range(sizes, show_bytes),
                show_range(times, show_seconds) if times else "hidden",
                show_range(rates, show_rate) if rates else "–",
                "",
                show_range([hop.wait_s.median for hop in rest], show_seconds),
                "",
                "",
                " or ".join(sorted({str(hop.verdict) for hop in rest})),
                "",
            )
        )
    if all(hop.class_ is None for hop in hops):  # nobody said what they are made of
        table.columns, *table.rows = (
            row[:place_of_class] + row[place_of_class + 1 :] for row in (table.columns, *table.rows)
        )
    return table
