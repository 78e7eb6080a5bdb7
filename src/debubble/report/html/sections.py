"""Tables, shares and boards in → the sections of a page.

Strangers' names are shown and never obeyed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from debubble.ledger.causes import Cause
from debubble.report.markup import rect, safe, svg, text
from debubble.report.palette import KINDS, Look
from debubble.report.text import Table
from debubble.units import show_share

# As wide as a page; narrower windows shrink it.
_WIDTH, _ROW, _BAR = 1240, 28, 18


def say_cause(cause: str) -> str:
    """Write a cause as people do."""
    return cause.replace("_", " ")


def ledger_bars(rows: Sequence[tuple[str, dict[Cause, float]]]) -> str:
    """Draw where time went: one bar a row, work first."""
    left = 70
    room = _WIDTH - left
    parts = []
    for row_index, (name, shares) in enumerate(rows):
        y, x = row_index * _ROW + 4, float(left)
        parts.append(text(left - 10, y + 14, name, anchor="end"))
        for cause, share in shares.items():
            if share:
                width = share * room
                words = f"{name}, {say_cause(cause)}: {show_share(share)}"
                parts.append(f"<g><title>{safe(words)}</title>{hatched(cause, x, y, width)}</g>")
                x += width
    return svg(_WIDTH, len(rows) * _ROW + 6, "".join(parts), "Where the time went")


NO_BREAK_HYPHEN = "\u2011"


def table_markup(table: Table) -> str:
    """Write a table of the terminal's page."""
    caption = f"<caption>{safe(table.title)}</caption>" if table.title else ""
    # A figure stays on one line with its unit, and under the others of its column.
    figures = table.figures
    styles = [' class="n"' if index in figures else "" for index in range(len(table.columns))]
    head = "".join(
        f"<th{style}>{safe(column).replace('-', NO_BREAK_HYPHEN)}</th>"
        for column, style in zip(table.columns, styles, strict=True)
    )
    rows = "".join(f"<tr>{''.join(map(_cell_markup, row, styles))}</tr>" for row in table.rows)
    return (
        f'<div class="scroll"><table>{caption}<thead><tr>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


def _cell_markup(cell: str, style: str) -> str:
    unbroken = re.sub(" ([→↔]) ", "\u00a0\\1\u00a0", safe(cell))
    # A path may break behind what divides it, and nowhere else.
    unbroken = unbroken.replace("/", "/<wbr>") if " " not in cell else unbroken
    return f"<td{style}>{unbroken}</td>"


def legend() -> str:
    """Write swatches of passes and causes; the script hides those that a step does not have."""
    entries = [
        f'<li data-kind="{kind.value}">{_pass_swatch(kind.name, look)}'
        f"<b>{kind.name}</b> {safe(look.word)}</li>"
        for kind, look in sorted(KINDS.items())
    ]
    entries += [
        f'<li data-cause="{number}" title="{safe(cause.about.meaning)}">'
        f"{_swatch(hatched(cause))}{safe(say_cause(cause))}</li>"
        for number, cause in enumerate(Cause)
    ]
    return f'<ul class="legend">{"".join(entries)}</ul>'


def definitions(causes: Sequence[Cause]) -> str:
    """Say what each cause means and what puts it right, beside its hatch."""
    entries = []
    for cause in causes:
        about = cause.about
        words = about.meaning + (f"; what if: {about.remedied}" if about.remedied else "")
        entries.append(
            f"<div><dt>{_swatch(hatched(cause))}{safe(say_cause(cause))}</dt>"
            f"<dd>{safe(words)}</dd></div>"
        )
    return f'<dl class="causes">{"".join(entries)}</dl>'


def hatched(cause: str, x: float = 0, y: float = 0, width: float = 24, height: float = _BAR) -> str:
    """Draw a rectangle in the colour and the hatch of a cause."""
    return rect(x, y, width, height, fill=f"url(#h-{cause})")


def _swatch(inside: str) -> str:
    return f'<svg class="swatch" width="24" height="14" aria-hidden="true">{inside}</svg>'


def _pass_swatch(name: str, look: Look) -> str:
    stripes = [(0, {"top", "both"}), (11, {"bottom", "both"})]
    drawn = [
        f'<rect y="{y}" width="24" height="3" opacity=".5"/>'
        for y, striped in stripes
        if look.stripe in striped
    ]
    return _swatch(rect(0, 0, 24, 14, f"c-{name}") + "".join(drawn))


_ACTS = (
    ("back", "←", "earlier"),
    ("on", "→", "later"),
    ("in", "+", "zoom in"),
    ("out", "−", "zoom out"),
    ("all", "all", "the whole step"),
)
_HINT = "drag to pan · Ctrl + wheel to zoom · Shift + drag marks a stretch · double-click: all"


def chart_section(title: str, words: str, body: str, pipeline: int | None = None) -> str:
    """Write a chart under its heading; of one pipeline where several can be chosen."""
    if not body:
        return ""
    of = "" if pipeline is None else f' data-pipeline="{pipeline}"'
    return f"<section{of}><h2>{safe(title)}</h2><p>{safe(words)}</p>{body}</section>"


def board_section(
    number: int, title: str, words: str, *, names: Sequence[str] = ("",), memory: bool
) -> str:
    """Write a board with a choice for each of its names, its legend and, on its axis, memory."""
    choices = "".join(
        f'<span class="choice"><label>{safe(name)} pipeline <select></select></label>'
        f"<label>{safe(name)} step <select></select></label></span>"
        for name in names
    )
    under = (
        '<div class="frame"><h3>memory <span>allocated on each rank; the allocator moves when the '
        "host issues work, which may be ahead of the device</span></h3>"
        '<canvas class="memory" role="img" aria-label="Allocated memory of each rank"></canvas>'
        "</div>"
        if memory
        else ""
    )
    return (
        f'<section data-board="{number}"><h2>{safe(title)}</h2><p>{safe(words)}</p>'
        f'<div class="bar">{choices}{_acts()}<span class="hint">{safe(_HINT)}</span></div>'
        f"{legend()}{_canvas(title)}{under}"
        '<p class="mode"></p></section>'
    )


def replay_section() -> str:
    """Write the place where a step is shown measured, replayed and ideal."""
    return (
        "<section data-replays hidden><h2>Measured, replayed, ideal</h2>"
        "<p>The same step three times on one axis. The replay must match the measured step, else "
        "savings mean nothing. Measured minus ideal is the most that can be saved with this "
        "schedule and number of microbatches.</p>"
        f'<div class="bar">{_acts()}</div>{_canvas("Measured, replayed and ideal step")}</section>'
    )


def _acts() -> str:
    buttons = "".join(
        f'<button type="button" data-act="{act}" title="{words}" aria-label="{words}">'
        f"{sign}</button>"
        for act, sign, words in _ACTS
    )
    return f'<span class="acts">{buttons}</span>'


def _canvas(title: str) -> str:
    return (
        '<div class="frame"><canvas class="lanes" tabindex="0" role="img" '
        f'aria-label="{safe(title)}; arrow keys pan, plus and minus zoom"></canvas></div>'
    )
