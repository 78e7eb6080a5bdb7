"""Pages in → lines for a terminal or a file, or Markdown: the answer first, no colour needed."""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Literal, TypeVar

import numpy as np
from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable
from rich.text import Text

from debubble.units import UNKNOWN, printable, show_bytes, show_range

if TYPE_CHECKING:
    from debubble.errors import Gap
    from debubble.report.answers.base import AnswerWarning


# So many of anything are listed one by one.
FEW = 16
# Of more, those that stand out.
STANDING_OUT = 4
# Bullets of a short answer.
MOST_FINDINGS = 5
# A share that is less reads as nothing.
NOTHING = 0.0005


_Row = TypeVar("_Row")


def fold(
    rows: Sequence[_Row],
    most: int,
    *figures: Callable[[_Row], float | None],
    count: int = STANDING_OUT,
    keep: Callable[[_Row], bool] = lambda _row: False,
) -> Iterator[tuple[str, list[_Row]]]:
    """Part rows into lines of a table: each by itself, and of many the others together.

    Of more than `most`, those are by themselves that are to be kept or stand out by one of their
    figures. The others come last, with a name; the name of a row is its own.
    """
    listed = set(range(len(rows)))
    if len(rows) > most:
        listed = {index for index, row in enumerate(rows) if keep(row)}
        for figure in figures:
            listed |= farthest([figure(row) for row in rows], count)
    for index in sorted(listed):
        yield "", [rows[index]]
    others = [row for index, row in enumerate(rows) if index not in listed]
    if others:
        yield f"{len(others)} others", others


def show_sizes(sizes: Sequence[int | None]) -> str:
    """Write sizes of messages; they are unknown where one of them is."""
    return "unknown" if None in sizes else show_range(sizes, show_bytes)


def farthest(values: Sequence[float | None], count: int = STANDING_OUT) -> set[int]:
    """Return the places of the values farthest from their middle."""
    known = [(index, value) for index, value in enumerate(values) if value is not None]
    if not known:
        return set()
    middle = float(np.median([value for _, value in known]))
    ranked = sorted(known, key=lambda entry: (-abs(entry[1] - middle), entry[0]))
    return {index for index, _ in ranked[:count]}


# What is written as a figure: `± 1.20 ms`, `4.95 to 5.12 ms`, `3 of 8`, `$51.20`.
_NUMBER = r"[^\w\s]{0,2} ?[\d.,]+( [^\d\s]\S*)?"
_FIGURE = re.compile(f"{_NUMBER}(( to|, | of)? ?{_NUMBER})?")
_UNSAID = frozenset({"", UNKNOWN, "unknown"})
# Between two columns of a table, and where that is too wide.
_APART, _CLOSE = 3, 2
# A table is easily read while few of its rows, such a share, take more than so many lines.
_LINES, _TALL_SHARE = 2, 0.1
# A name breaks between words, but `10 → 11` is one.
_BETWEEN_WORDS = re.compile(r"(?<!→)\s+(?!→)")
# In a sentence a figure and its unit stay on one line, and so do `1 → 2` and `rank 2`.
_TOGETHER = re.compile(r"(?<=\d) (?=[a-zA-Z%])|(?<=→) | (?=→)|(?<=rank) (?=\d)|(?<=stage) (?=\d)")
# Warnings with one code that are printed one by one.
_ALIKE_SHOWN = 4


@dataclass(slots=True)
class Table:
    """Rows of cells, all text."""

    columns: tuple[str, ...]
    rows: list[tuple[str, ...]] = field(default_factory=list)
    title: str = ""
    spare: tuple[str, ...] = ()
    """Columns that a narrow terminal does without, the first of them first: words get the room."""

    def add(self, *cells: str) -> None:
        """Put a row below the others."""
        self.rows.append(cells)

    @property
    def figures(self) -> frozenset[int]:
        """Columns whose cells mostly are figures: these stand under each other, right-aligned.

        The first names the row.
        """
        return frozenset(
            index
            for index, (_, *cells) in enumerate(zip(self.columns, *self.rows, strict=True))
            if index
            and 2 * sum(bool(_FIGURE.fullmatch(cell)) for cell in cells)
            >= sum(cell not in _UNSAID for cell in cells)
        )

    def without_unknown(self) -> Table:
        """Return the table without columns in which nothing is known."""
        known = [
            index
            for index in range(len(self.columns))
            if not index or any(row[index] not in _UNSAID for row in self.rows)
        ]
        columns, *rows = (
            tuple(row[index] for index in known) for row in (self.columns, *self.rows)
        )
        return Table(columns=columns, rows=rows, title=self.title, spare=self.spare)


def refused_table(refused: Iterable[tuple[str, str]]) -> Table:
    """Lay out what was refused and why, each reason once."""
    reasons: dict[str, list[str]] = {}
    for option, why in refused:
        reasons.setdefault(why, []).append(option)
    table = Table(columns=("refused", "why"))
    for why, (first, *others) in reasons.items():
        table.rows += [(first, why), *((option, "the same") for option in others)]
    return table


@dataclass(slots=True)
class Page:
    """One verb's answer, in the order every verb keeps."""

    answer: str
    findings: list[str] = field(default_factory=list)
    drawing: list[Text] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    """To be copied: never broken."""
    gaps: list[Gap | AnswerWarning] = field(default_factory=list)
    next_command: str = ""


def print_page(page: Page, console: Console) -> None:
    """Print a page; strangers' names are shown, never obeyed."""
    _say(Text(printable(page.answer), style="bold"), console)
    for finding in page.findings:
        _say(Text(f"- {printable(finding)}"), console, hang=2)
    if page.drawing:
        console.print("", *page.drawing, sep="\n", soft_wrap=True)
    for _, tables in groupby(page.tables, key=lambda table: table.columns):
        _print_tables(list(tables), console)
    _print_notes(page, console)
    _print_gaps(page.gaps, console)
    if page.next_command:
        console.print()
        console.print(f"next: {_safe(page.next_command)}", soft_wrap=True)


def _print_tables(tables: Sequence[Table], console: Console) -> None:
    """Print tables with the same columns, under each other as one."""
    rows = [row for table in tables for row in table.rows]
    alike = Table(columns=tables[0].columns, rows=rows, spare=tables[0].spare)
    parts, figures = _lay_out(alike, console.width), alike.figures
    for table in tables:
        console.print()
        if table.title:
            _say(Text(printable(table.title)), console)
        for number, widths in enumerate(parts):
            if number:
                console.print()
            console.print(_draw(table, widths, figures, console.width))
    shown = {index for part in parts for index in part}
    missing = [name for index, name in enumerate(alike.columns) if index not in shown]
    if missing:
        console.print()
        _say(Text(f"left out at this width: {', '.join(missing)}; --json has all"), console)


def _print_notes(page: Page, console: Console) -> None:
    if page.notes or page.lines:
        console.print()
    for note in page.notes:
        _say(Text(printable(note)), console, hang=2)
    for line in page.lines:
        # As it is: markup would double a backslash at an end.
        console.print(Text(printable(line)), soft_wrap=True)


def _say(text: Text, console: Console, *, hang: int = 0) -> None:
    """Print a sentence, on a terminal broken between words; a file keeps it on one line.

    A path longer than a line is left to the terminal, so that it can be copied whole.
    """
    if console.file.isatty():
        broken = textwrap.fill(
            _TOGETHER.sub("\N{NO-BREAK SPACE}", text.plain),
            console.width,
            subsequent_indent=" " * hang,
            break_long_words=False,
            break_on_hyphens=False,
        )
        broken = broken.replace("\N{NO-BREAK SPACE}", " ")
        text = Text(broken, style=text.style, spans=text.spans)
    console.print(text, soft_wrap=True)


def _print_gaps(gaps: Sequence[Gap | AnswerWarning], console: Console) -> None:
    """Print warnings; of many alike the first few, and how many more there are."""
    if gaps:
        console.print()
    seen = Counter[str]()
    for gap in gaps:
        seen[gap.code] += 1
        if seen[gap.code] > _ALIKE_SHOWN:
            continue
        _say(Text.assemble(("warning:", "yellow"), f" {printable(str(gap))}"), console, hang=9)
        if gap.hint:
            _say(Text.assemble(("   hint:", "cyan"), f" {printable(gap.hint)}"), console, hang=9)
    for code, count in seen.items():
        if count > _ALIKE_SHOWN:
            more = f" {count - _ALIKE_SHOWN} more like it: {code}; --json has them all"
            _say(Text.assemble(("warning:", "yellow"), more), console, hang=9)


def _safe(text: str) -> str:
    return escape(printable(text))


def _lay_out(table: Table, width: int) -> list[dict[int, int]]:
    """Return the columns that stand beside each other, each with its width.

    No cell is cut. Words wrap between words; where that makes many rows tall, spare columns go.
    What does not fit then goes below, with the first column again: a figure, or a path, is only
    broken where it is longer than a line.
    """
    whole: list[int] = []
    least: list[int] = []
    for index, (name, *column) in enumerate(zip(table.columns, *table.rows, strict=True)):
        cells = list(map(printable, column))
        parts = [part for cell in cells for part in _BETWEEN_WORDS.split(cell)]
        whole.append(max(map(cell_len, [name, *cells])))
        longest = max(map(cell_len, [*name.split(), *(cells if index in table.figures else parts)]))
        # The first column stands beside each of the others.
        least.append(min(longest, width - _CLOSE - least[0] if least else (width - _CLOSE) // 2))
    if _across(whole, _APART) <= width:
        return [dict(enumerate(whole))]
    for spared in range(len(table.spare) + 1):
        kept = [i for i, name in enumerate(table.columns) if name not in table.spare[:spared]]
        sides = [[kept[0]]]
        for index in kept[1:]:
            if _across([least[i] for i in (*sides[-1], index)], _CLOSE) > width:
                sides.append([kept[0]])
            sides[-1].append(index)
        fit = [_narrowed(table.figures, side, whole, least, width) for side in sides]
        if len(fit) == 1 and _is_low(table, fit[0]):
            break
    return fit


def _across(widths: Iterable[int], between: int) -> int:
    """Return how wide columns are together."""
    every = list(widths)
    return sum(every) + between * (len(every) - 1)


def _narrowed(
    figures: frozenset[int],
    side: Sequence[int],
    whole: Sequence[int],
    least: Sequence[int],
    width: int,
) -> dict[int, int]:
    """Take from columns until they fit: first headings of figures break, then the longest words."""
    widths = {index: whole[index] for index in side}
    while _across(widths.values(), _CLOSE) > width:
        wide = [index for index in side if widths[index] > least[index]]
        if not wide:
            break
        widths[max(wide, key=lambda index: (index in figures, widths[index]))] -= 1
    return widths


def _is_low(table: Table, widths: Mapping[int, int]) -> bool:
    """Tell whether nearly all rows take a line or two."""
    tall = [
        row
        for row in table.rows
        if any(len(textwrap.wrap(row[index], widths[index])) > _LINES for index in widths)
    ]
    return len(tall) <= _TALL_SHARE * len(table.rows)


def _draw(
    table: Table, widths: Mapping[int, int], figures: frozenset[int], width: int
) -> RichTable:
    between = _APART if _across(widths.values(), _APART) <= width else _CLOSE
    # The box itself puts one between columns.
    padding = (0, 1, 0, between - 2)
    drawn = RichTable(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=padding)
    for index, column_width in widths.items():
        justify: Literal["left", "right"] = "right" if index in figures else "left"
        column = table.columns[index]
        drawn.add_column(column, justify=justify, width=column_width, overflow="fold")
    for row in table.rows:
        drawn.add_row(*(_safe(row[index]) for index in widths))
    return drawn


_ESCAPED = str.maketrans({sign: f"\\{sign}" for sign in "\\`*_[]<>|#~&$"})


def as_markdown(page: Page) -> str:
    """Write a page with the same sentences, tables and figures as on a terminal."""
    parts = [f"**{_escaped(page.answer)}**"]
    if page.findings:
        parts.append("\n".join(f"- {_escaped(finding)}" for finding in page.findings))
    if page.drawing:
        lines = (printable(line.plain, breaks=True) for line in page.drawing)
        parts.append(_fenced("\n".join(lines)))
    parts += [_markdown_table(table) for table in page.tables]
    if page.notes or page.lines:
        parts.append(_fenced("\n".join(map(printable, page.notes + page.lines))))
    for gap in page.gaps:
        hint = f" ({_escaped(gap.hint)})" if gap.hint else ""
        parts.append(f"> warning: {_escaped(str(gap))}{hint}")
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


def _markdown_table(table: Table) -> str:
    lines = [f"{_escaped(table.title)}\n"] if table.title else []
    lines.append(_markdown_row([_escaped(column) for column in table.columns]))
    sides = ["--:" if index in table.figures else ":--" for index in range(len(table.columns))]
    lines.append(_markdown_row(sides))
    return "\n".join(
        [*lines, *(_markdown_row([_escaped(cell) for cell in row]) for row in table.rows)]
    )


def _markdown_row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _escaped(text: str) -> str:
    return printable(text).translate(_ESCAPED)
