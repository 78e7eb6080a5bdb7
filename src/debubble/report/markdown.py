"""Pages in → Markdown out, to paste into a pull request, an issue or a notebook."""

from __future__ import annotations

from debubble.report.text import WORDS, Page, Table
from debubble.units import printable

_ESCAPED = str.maketrans({sign: f"\\{sign}" for sign in "\\`*_[]<>|#"})


def as_markdown(page: Page) -> str:
    """Write a page with the same sentences, tables and figures as on a terminal."""
    parts = [f"**{_safe(page.answer)}**"]
    if page.findings:
        parts.append("\n".join(f"- {_safe(finding)}" for finding in page.findings))
    if page.drawing:
        lanes = "\n".join(line.plain for line in page.drawing)
        parts.append(f"```text\n{lanes}\n```")
    parts += [_table(table) for table in page.tables]
    if page.notes:
        notes = "\n".join(map(printable, page.notes))
        parts.append(f"```text\n{notes}\n```")
    for gap in page.gaps:
        hint = f" ({_safe(gap.hint)})" if gap.hint else ""
        parts.append(f"> warning: {_safe(str(gap))}{hint}")
    if page.next_command:
        parts.append(f"next: `{printable(page.next_command)}`")
    return "\n\n".join(parts) + "\n"


def _table(table: Table) -> str:
    lines = [f"{_safe(table.title)}\n"] if table.title else []
    lines.append(_row(table.columns))
    lines.append(_row([":--" if column in WORDS else "--:" for column in table.columns]))
    return "\n".join([*lines, *(_row([_safe(cell) for cell in row]) for row in table.rows)])


def _row(cells: tuple[str, ...] | list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _safe(text: str) -> str:
    return printable(text).translate(_ESCAPED)
