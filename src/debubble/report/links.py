"""An answer of `debubble links` in → its page for people, and a matrix of the hops as SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from debubble.answers.links import LinkPart, LinksAnswer
from debubble.links.hop_times import Hop
from debubble.links.judge import Verdict
from debubble.report.text import (
    FEW,
    Page,
    Table,
    fold,
)
from debubble.units import (
    UNKNOWN,
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
    "ranks share a device: that they slow each other is counted, that their wires do is not;"
    " costs are the most it can be"
)


def links_page(found: LinksAnswer, next_command: str = "") -> Page:
    """Lay out the answer: which hop is slow and what it costs, then every hop."""
    page = Page(answer=found.verdict, findings=list(found.findings), tables=[_table(found.hops)])
    page.lines = [f"check: {command}" for command in found.commands[:_COMMANDS_SHOWN]]
    if len(found.commands) > _COMMANDS_SHOWN:
        page.lines.append(f"{len(found.commands) - _COMMANDS_SHOWN} more to check are in --json")
    page.notes = [f"times: {found.basis}"]
    if found.cost_is_upper_bound and any(hop.verdict == Verdict.SLOW for hop in found.hops):
        page.notes.append(_SHARED)
    page.gaps = list(found.warnings)
    page.next_command = next_command
    return page


def _table(hops: Sequence[LinkPart]) -> Table:
    columns = "hop|size|one message|rate|both ways|wait|buffered|class|verdict|costs"
    table = Table(columns=tuple(columns.split("|")))
    place_of_class = table.columns.index("class")
    shown, rest = fold(
        hops,
        2 * FEW,
        lambda hop: hop.one_message_bytes_per_s,
        keep=lambda hop: hop.verdict == Verdict.SLOW,
    )
    for hop in shown:
        cost = hop.cost_per_batch_s
        table.add(
            f"{hop.from_rank} → {hop.to_rank}",
            show_known(hop.bytes, show_bytes, "unknown"),
            show_known(hop.one_message_s, show_seconds, "hidden"),
            show_known(hop.one_message_bytes_per_s, show_rate),
            show_known(hop.both_ways_s.median if hop.both_ways_s else None, show_seconds),
            show_seconds(hop.wait_s.median),
            show_share(hop.buffered_fraction),
            UNKNOWN if hop.class_ is None else hop.class_ + ("" if hop.class_stated else "?"),
            str(hop.verdict),
            UNKNOWN if cost is None else show_seconds(max(cost, 0)),
        )
    if rest:
        sizes = [hop.bytes for hop in rest if hop.bytes is not None]
        rates = [hop.one_message_bytes_per_s for hop in rest]
        table.add(
            f"{len(rest)} others",
            "unknown" if len(sizes) < len(rest) else show_range(sizes, show_bytes),
            show_range([hop.one_message_s for hop in rest], show_seconds, "hidden"),
            show_range(rates, show_rate),
            "",
            show_range([hop.wait_s.median for hop in rest], show_seconds),
            "",
            "",
            " or ".join(sorted({str(hop.verdict) for hop in rest})),
            "",
        )
    if all(hop.class_ is None for hop in hops):  # nobody said what they are made of
        table.columns, *table.rows = (
            row[:place_of_class] + row[place_of_class + 1 :] for row in (table.columns, *table.rows)
        )
    return table


_CELL, _MARGIN = 84, 72
_FAST, _SLOW = (222, 235, 247), (33, 113, 181)
_WARNING = "#c0392b"


def draw_matrix(ranks: Sequence[int], rates: Mapping[Hop, float], slow: Sequence[Hop]) -> str:
    """Draw a row for each rank that sends, a column for each that receives; slow hops framed.

    The darker a cell, the slower. Every cell has its figure, so that colour is not needed.
    """
    side = _MARGIN + _CELL * len(ranks) + 12
    most = max(rates.values(), default=1.0)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{side}" height="{side + 24}">',
        '<g font-family="sans-serif" font-size="13" text-anchor="middle">',
        f"<title>{escape('Bytes per second from rank (row) to rank (column)')}</title>",
        f'<text x="{side / 2:.0f}" y="20">to rank</text>',
        f'<text x="24" y="{_MARGIN - 32}">from</text>',
    ]
    for place, rank in enumerate(ranks):
        middle = _MARGIN + _CELL * place + _CELL / 2
        parts.append(f'<text x="{middle:.0f}" y="{_MARGIN - 12}">{rank}</text>')
        parts.append(f'<text x="{_MARGIN - 20}" y="{middle + 5:.0f}">{rank}</text>')
    # One rectangle for all pairs that have no rate: of hundreds of ranks they are nearly all.
    inside = f'width="{_CELL}" height="{_CELL}" fill="#f7f7f7" stroke="#dddddd"'
    across = _CELL * len(ranks)
    parts.append(
        f'<defs><pattern id="none" x="{_MARGIN}" y="{_MARGIN}" width="{_CELL}" height="{_CELL}"'
        f' patternUnits="userSpaceOnUse"><rect {inside}/></pattern></defs>'
        f'<rect x="{_MARGIN}" y="{_MARGIN}" width="{across}" height="{across}" fill="url(#none)"/>'
    )
    position = {rank: number for number, rank in enumerate(ranks)}
    for (here, there), rate in sorted(rates.items()):
        x, y = _MARGIN + _CELL * position[there], _MARGIN + _CELL * position[here]
        parts.append(_cell(x, y, rate, most, is_slow=(here, there) in slow))
    legend = f"darker is slower; framed: slow; fastest {show_rate(most)}" if rates else "no rates"
    parts.append(f'<text x="{side / 2:.0f}" y="{side + 12}">{escape(legend)}</text>')
    return "\n".join([*parts, "</g></svg>", ""])


def _cell(x: int, y: int, rate: float, most: float, *, is_slow: bool) -> str:
    way = 1 - rate / most
    colour = [round(light + way * (dark - light)) for light, dark in zip(_FAST, _SLOW, strict=True)]
    ink = "white" if way > 0.5 else "black"
    frame = f'stroke="{_WARNING}" stroke-width="4"' if is_slow else 'stroke="#dddddd"'
    inset = 2 if is_slow else 0
    return (
        f'<rect x="{x + inset}" y="{y + inset}" width="{_CELL - 2 * inset}"'
        f' height="{_CELL - 2 * inset}" fill="rgb({colour[0]},{colour[1]},{colour[2]})" {frame}/>'
        f'<text x="{x + _CELL // 2}" y="{y + _CELL // 2 + 5}" fill="{ink}">'
        f"{escape(show_rate(rate))}</text>"
    )
