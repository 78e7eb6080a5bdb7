"""Text and parts of the page in → their markup, with strangers' names shown and never obeyed."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from debubble.ledger.causes import Cause
from debubble.report.html.palette import CAUSE_LOOKS, KINDS, Look, say_cause
from debubble.report.palette import hatch_path
from debubble.report.text import WORDS, Table
from debubble.units import printable

NO_BREAK_HYPHEN = "\u2011"


def safe(text: object) -> str:
    """Write any text so that a browser shows it as it is."""
    return escape(printable(str(text)), quote=True)


def table_markup(table: Table) -> str:
    """Write a table of the terminal's page."""
    caption = f"<caption>{safe(table.title)}</caption>" if table.title else ""
    # A figure stays on one line with its unit, and under the others of its column.
    styles = ["" if column in WORDS else ' class="n"' for column in table.columns]
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
    unbroken = safe(cell).replace(" → ", "\u00a0→\u00a0")
    return f"<td{style}>{unbroken}</td>"


def hatch_patterns() -> str:
    """Define every hatch once, for all charts of the page."""
    patterns = "".join(
        f'<pattern id="h-{cause}" width="8" height="8" patternUnits="userSpaceOnUse">'
        f'<path class="i-{cause}" d="{hatch_path(look.hatch)}"/></pattern>'
        for cause, look in CAUSE_LOOKS.items()
        if look.hatch
    )
    return f'<svg width="0" height="0" aria-hidden="true"><defs>{patterns}</defs></svg>'


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
        f'<li data-cause="{number}" title="{safe(look.words)}">'
        '<svg class="swatch" width="24" height="14" aria-hidden="true">'
        f"{hatched(cause, (0, 0, 24, 14))}</svg>{safe(say_cause(cause))}</li>"
        for number, (cause, look) in enumerate(CAUSE_LOOKS.items())
    ]
    return f'<ul class="legend">{"".join(entries)}</ul>'


def definitions(causes: Sequence[Cause]) -> str:
    """Say what each cause means and what puts it right, beside its hatch."""
    entries = []
    for cause in causes:
        about = cause.about
        said = about.meaning + (f"; put right: {about.remedied}" if about.remedied else "")
        entries.append(
            '<div><dt><svg class="swatch" width="24" height="14" aria-hidden="true">'
            f"{hatched(cause, (0, 0, 24, 14))}</svg>{safe(say_cause(cause))}</dt>"
            f"<dd>{safe(said)}</dd></div>"
        )
    return f'<dl class="causes">{"".join(entries)}</dl>'


def advice_section(words: str, command: str) -> str:
    """Write what to do first, and what to type for it."""
    typed = f"<p><code>{safe(command)}</code></p>" if command else ""
    return (
        f'<section class="advice"><h2>What to do first</h2><p>{safe(words)}</p>{typed}</section>'
        if words
        else ""
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
        "<p>The same step three times on one axis. The replay must land on the measured step: only "
        "then do savings mean something. What lies between measured and ideal is what could be won "
        "with this schedule and these microbatches.</p>"
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
