"""Pages in → Markdown out, to paste into a pull request, an issue or a notebook."""

from __future__ import annotations

import re

from debubble.report.text import WORDS, Page, Table
from debubble.units import printable

_ESCAPED = str.maketrans({sign: f"\\{sign}" for sign in "\\`*_[]<>|#~&$"})


def as_markdown(page: Page) -> str:
    """Write a page with the same sentences, tables and figures as on a terminal."""
    parts = [f"**{_safe(page.answer)}**"]
    if page.findings:
        parts.append("\n".join(f"- {_safe(finding)}" for finding in page.findings))
    if page.drawing:
        lines = (printable(line.plain, breaks=True) for line in page.drawing)
        parts.append(_fenced("\n".join(lines)))
    parts += [_table(table) for table in page.tables]
    if page.notes:
        parts.append(_fenced("\n".join(map(printable, page.notes))))
    for gap in page.gaps:
        hint = f" ({_safe(gap.hint)})" if gap.hint else ""
        parts.append(f"> warning: {_safe(str(gap))}{hint}")
    if page.next_command:
        command = printable(page.next_command)
        ticks = "`" * (_longest_ticks(command) + 1)
        # Beside a tick of its own, a command keeps a space to the ticks around it.
        air = " " if len(ticks) > 1 else ""
        parts.append(f"next: {ticks}{air}{command}{air}{ticks}")
    return "\n\n".join(parts) + "\n"


def _fenced(text: str) -> str:
    fence = "`" * max(3, _longest_ticks(text) + 1)
    return f"{fence}text\n{text}\n{fence}"


def _longest_ticks(text: str) -> int:
    return max(map(len, re.findall("`+", text)), default=0)


def _table(table: Table) -> str:
    lines = [f"{_safe(table.title)}\n"] if table.title else []
    lines.append(_row([_safe(column) for column in table.columns]))
    lines.append(_row([":--" if column in WORDS else "--:" for column in table.columns]))
    return "\n".join([*lines, *(_row([_safe(cell) for cell in row]) for row in table.rows)])


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _safe(text: str) -> str:
    return printable(text).translate(_ESCAPED)
