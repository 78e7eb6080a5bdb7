"""Rates between ranks in → a picture of them, as SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from debubble.links.expectation import Hop
from debubble.units import show_rate

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
    for row, here in enumerate(ranks):
        for column, there in enumerate(ranks):
            rate = rates.get((here, there))
            x, y = _MARGIN + _CELL * column, _MARGIN + _CELL * row
            parts.append(_cell(x, y, rate, most, is_slow=(here, there) in slow))
    legend = f"darker is slower; framed: slow; fastest {show_rate(most)}" if rates else "no rates"
    parts.append(f'<text x="{side / 2:.0f}" y="{side + 12}">{escape(legend)}</text>')
    return "\n".join([*parts, "</g></svg>", ""])


def _cell(x: int, y: int, rate: float | None, most: float, *, is_slow: bool) -> str:
    if rate is None:
        return (
            f'<rect x="{x}" y="{y}" width="{_CELL}" height="{_CELL}" fill="#f7f7f7"'
            ' stroke="#dddddd"/>'
        )
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
