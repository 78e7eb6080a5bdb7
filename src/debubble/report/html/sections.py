"""Parts of the page in → their markup out: a board of lanes, charts under a heading."""

from __future__ import annotations

from collections.abc import Sequence

from debubble.report.html.markup import legend, safe

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
