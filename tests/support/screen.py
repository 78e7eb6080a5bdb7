"""What a reader of a terminal sees."""

from __future__ import annotations

import io

from rich.console import Console

from debubble.report.text import Page, print_page


class Terminal(io.StringIO):
    """A terminal: sentences are broken between words."""

    def isatty(self):
        return True


def lines_of(page: Page, width: int) -> list[str]:
    """Return the lines of a page on a terminal."""
    out = Terminal()
    print_page(page, Console(file=out, width=width, highlight=False, color_system=None))
    return out.getvalue().splitlines()
