"""Rates between ranks in → a table out: rows send, columns receive."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from debubble.links.expectation import Hop
from debubble.report.html.markup import safe

_SHADES = 4
# Beyond it a screen shows nothing but empty cells; the list of hops stands below all the same.
MOST_RANKS = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """What a hop does."""

    slowness: float
    """0 for the fastest of all, 1 for the slowest."""
    lines: tuple[str, ...]
    slow: bool = False


def matrix_markup(ranks: Sequence[int], cells: Mapping[Hop, Cell]) -> str:
    """Write the table; a slow hop is framed and says so."""
    head = "".join(f'<th scope="col">to {rank}</th>' for rank in ranks)
    rows = "".join(
        f'<tr><th scope="row">from {here}</th>'
        + "".join(_cell(cells.get((here, there))) for there in ranks)
        + "</tr>"
        for here in ranks
    )
    return (
        f'<div class="scroll"><table class="matrix"><thead><tr><th></th>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


def _cell(cell: Cell | None) -> str:
    if cell is None:
        return "<td></td>"
    shade = min(_SHADES - 1, int(cell.slowness * _SHADES))
    lines = "".join(f"<span>{safe(line)}</span>" for line in cell.lines[1:])
    slow = "<span><b>slow</b></span>" if cell.slow else ""
    return (
        f'<td class="s{shade}{" slow" if cell.slow else ""}"><b>{safe(cell.lines[0])}</b>'
        f"{lines}{slow}</td>"
    )


def slowness_of(taken: Mapping[Hop, float]) -> dict[Hop, float]:
    """Return where each hop stands between the fastest and the slowest; all 0 where alike."""
    low, high = min(taken.values(), default=0.0), max(taken.values(), default=0.0)
    # Within a tenth of each other hops are alike: shades would cry wolf.
    spread = max(high - low, 0.1 * high, 1e-30)
    return {hop: (value - low) / spread * 0.999 for hop, value in taken.items()}
