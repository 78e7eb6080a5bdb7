"""Text in → markup out, with strangers' names shown and never obeyed."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from debubble.report.html.palette import CAUSE_LOOKS, KINDS, Look, say_cause
from debubble.report.names import printable
from debubble.report.text import Table


def safe(text: object) -> str:
    """Write any text so that a browser shows it as it is."""
    return escape(printable(str(text)), quote=True)


def table_markup(table: Table) -> str:
    """Write a table of the terminal's page."""
    caption = f"<caption>{safe(table.title)}</caption>" if table.title else ""
    head = "".join(f"<th>{safe(column)}</th>" for column in table.columns)
    rows = "".join(
        f"<tr>{''.join(f'<td>{safe(cell)}</td>' for cell in row)}</tr>" for row in table.rows
    )
    return (
        f'<div class="scroll"><table>{caption}<thead><tr>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


def hatch_patterns() -> str:
    """Define every hatch once, for all charts of the page."""
    patterns = "".join(
        f'<pattern id="h-{cause}" width="8" height="8" patternUnits="userSpaceOnUse">'
        f'<path class="i-{cause}" d="{_bits(look.hatch)}"/></pattern>'
        for cause, look in CAUSE_LOOKS.items()
        if look.hatch
    )
    return f'<svg width="0" height="0" aria-hidden="true"><defs>{patterns}</defs></svg>'


def _bits(hatch: Sequence[int]) -> str:
    """Write a bitmap as a path: the first bit is the leftmost pixel."""
    return "".join(
        f"M{x} {y}h1v1h-1z" for y, row in enumerate(hatch) for x in range(8) if row >> x & 1
    )


def legend(kinds: bool = True) -> str:
    """Write swatches of passes and causes; the script hides those that a step does not have."""
    entries = []
    if kinds:
        entries = [
            f'<li data-kind="{kind.value}">{_pass_swatch(kind.name, look)}'
            f"<b>{kind.name}</b> {safe(look.words)}</li>"
            for kind, look in sorted(KINDS.items())
        ]
    entries += [
        f'<li data-cause="{number}" title="{safe(look.words)}">{_swatch(cause)}'
        f"{safe(say_cause(cause))}</li>"
        for number, (cause, look) in enumerate(CAUSE_LOOKS.items())
    ]
    return f'<ul class="legend">{"".join(entries)}</ul>'


def _swatch(cause: str) -> str:
    return (
        '<svg class="swatch" width="24" height="14" aria-hidden="true">'
        f"{hatched(cause, (0, 0, 24, 14))}</svg>"
    )


def _pass_swatch(name: str, look: Look) -> str:
    top = '<rect width="24" height="3" opacity=".5"/>' if look.stripe in {"top", "both"} else ""
    bottom = (
        '<rect y="11" width="24" height="3" opacity=".5"/>'
        if look.stripe in {"bottom", "both"}
        else ""
    )
    return (
        f'<svg class="swatch" width="24" height="14" aria-hidden="true">'
        f'<rect class="c-{name}" width="24" height="14"/>{top}{bottom}</svg>'
    )


def hatched(cause: str, place: tuple[float, float, float, float], title: str = "") -> str:
    """Draw a rectangle (x, y, width, height) in the colour and the hatch of a cause."""
    x, y, width, height = place
    box = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
    inside = f"<title>{safe(title)}</title>" if title else ""
    look = CAUSE_LOOKS.get(cause)  # type: ignore[call-overload]
    over = f'<rect {box} fill="url(#h-{cause})"/>' if look and look.hatch else ""
    return f'<g>{inside}<rect class="c-{cause}" {box}/>{over}</g>'
