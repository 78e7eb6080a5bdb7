"""A verb's `Page`, its sections and its columns in → one HTML file out.

Nothing in it leaves the page: its policy allows one script and one style, by their digests.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from debubble import __version__
from debubble.ledger.causes import Cause
from debubble.report.html.sections import say_cause, table_markup
from debubble.report.html.views import View
from debubble.report.markup import asset, digest, safe
from debubble.report.palette import DARK, KINDS, LIGHT, hatch_patterns, variables
from debubble.report.text import Page

# In this order: each uses what stands before it.
_SCRIPTS = ("columns.js", "raster.js", "board.js", "pointer.js", "memory.js", "main.js")


# A figure stays on the line of its unit.
_UNIT = re.compile(r"(?<=[0-9]) (?=(%|[num]?s|[KMGT]i?B)\b|%)")
NO_BREAK = "\u00a0"


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """One of the steps that a board shows at a time."""

    title: str
    views: tuple[int, ...]
    """Numbers of those that can be chosen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """A canvas with lanes on one axis."""

    slots: tuple[Slot, ...]
    replays: bool = False
    """Another canvas shows its step measured, replayed and ideal."""


@dataclass(slots=True)
class Report:
    """All that goes into the file; views and boards are named by their numbers."""

    verb: str
    run: str
    """What the user typed for the run."""
    page: Page
    sections: list[str] = field(default_factory=list)
    views: list[View] = field(default_factory=list)
    boards: list[Board] = field(default_factory=list)

    def add_views(self, views: Sequence[View]) -> tuple[int, ...]:
        """Add steps, and return their numbers."""
        first = len(self.views)
        self.views += views
        return tuple(range(first, len(self.views)))

    def add_board(self, board: Board) -> int:
        """Add a board, and return its number."""
        self.boards.append(board)
        return len(self.boards) - 1


def report_markup(report: Report) -> str:
    """Return the whole file."""
    style = _style_variables() + asset("report.css")
    parts = "\n".join(asset(name) for name in _SCRIPTS)
    script = f'"use strict";\n(() => {{\n{parts}\n}})();\n'
    policy = (
        f"default-src 'none'; script-src '{digest(script)}'; style-src '{digest(style)}'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    page = report.page
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>debubble {safe(report.verb)}: {safe(report.run)}</title>
<style>{style}</style>
</head>
<body>
<svg width="0" height="0" aria-hidden="true"><defs>{hatch_patterns(Cause)}</defs></svg>
<header><span class="who"><b>debubble {safe(report.verb)}</b> {safe(report.run)}</span>
<button id="theme" type="button">light / dark</button></header>
<main>
<h1>{_UNIT.sub(NO_BREAK, safe(page.answer))}</h1>
{_findings(page)}
{"".join(report.sections)}
{_warnings(page)}
{_figures(page)}
<section class="notes"><p>debubble {safe(__version__)}; this file loads nothing.</p></section>
</main>
<div id="tip" role="status" hidden></div>
<script type="application/json" id="data">{_data(report)}</script>
<script>{script}</script>
</body>
</html>
"""


def _data(report: Report) -> str:
    content: dict[str, Any] = {
        "palette": {
            "kinds": [
                {"letter": kind.name, "words": look.word, "stripe": look.stripe}
                for kind, look in sorted(KINDS.items())
            ],
            "causes": [
                {
                    "key": cause,
                    "name": say_cause(cause),
                    "words": cause.about.meaning,
                    "hatch": list(cause.about.bits) or [0] * 8,
                }
                for cause in Cause
            ],
        },
        "boards": [
            {
                "slots": [{"title": slot.title, "views": slot.views} for slot in board.slots],
                "replays": board.replays,
            }
            for board in report.boards
        ],
        "views": report.views,
    }
    # A name may hold "</script>": no bracket opens a tag here.
    return json.dumps(content, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _style_variables() -> str:
    """Return the colours as CSS: as the system asks, unless the reader chose."""
    light, dark = variables(LIGHT, in_dark=False), variables(DARK, in_dark=True)
    names = [*(kind.name for kind in KINDS), *Cause]
    fills = "".join(
        f".c-{name}{{fill:var(--fill-{name})}}.i-{name}{{fill:var(--ink-{name})}}" for name in names
    )
    return (
        f":root{{color-scheme:light;{light}}}"
        f"@media (prefers-color-scheme:dark){{:root:not([data-theme=light])"
        f"{{color-scheme:dark;{dark}}}}}"
        f":root[data-theme=dark]{{color-scheme:dark;{dark}}}{fills}\n"
    )


def _findings(page: Page) -> str:
    if not page.findings:
        return ""
    listed = "".join(f"<li>{safe(finding)}</li>" for finding in page.findings)
    return f'<ul class="findings">{listed}</ul>'


def _warnings(page: Page) -> str:
    if not page.gaps:
        return ""
    rows = "".join(
        f"<p><b>warning:</b> {safe(gap)}{f' ({safe(gap.hint)})' if gap.hint else ''}</p>"
        for gap in page.gaps
    )
    return f'<section class="warnings"><h2>What is missing</h2>{rows}</section>'


def _figures(page: Page) -> str:
    """Write all tables and notes of the terminal's answer: nothing is only in a picture."""
    notes = "".join(f"<p>{safe(note)}</p>" for note in page.notes if note)
    pasted = "\n".join(map(safe, page.lines))
    lines = f"<pre>{pasted}</pre>" if pasted else ""
    tables = "".join(map(table_markup, page.tables))
    following = f"<p>next: <code>{safe(page.next_command)}</code></p>" if page.next_command else ""
    return (
        f"<section><details open><summary>All figures</summary>{tables}"
        f'<div class="notes">{notes}{lines}</div>{following}</details></section>'
    )
