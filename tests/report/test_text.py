"""What is drawn is readable without colour, and strangers' names stay names."""

from __future__ import annotations

import io

from rich.console import Console

from debubble.errors import Code, Gap
from debubble.report.text import Page, Table, print_page
from debubble.units import printable


def drawn(page, **options):
    out = io.StringIO()
    print_page(page, Console(file=out, width=80, highlight=False, **options))
    return out.getvalue()


def test_the_answer_comes_first_and_the_next_command_last():
    page = Page(answer="42 %.", notes=["a note"], next_command="debubble inspect x")
    lines = drawn(page).strip().splitlines()
    assert lines[0] == "42 %."
    assert lines[-1] == "next: debubble inspect x"


def test_markup_in_names_is_shown_and_not_obeyed():
    gap = Gap(code=Code.MALFORMED, message="near '[red]boo[/red]'", hint="[bold]", file="[x].json")
    page = Page(
        answer="[link=evil]a", tables=[Table(columns=("rank",), rows=[("[blink]",)])], gaps=[gap]
    )
    text = drawn(page)
    for name in ("[link=evil]a", "[blink]", "[red]boo[/red]", "[x].json", "[bold]"):
        assert name in text


def test_control_characters_in_names_do_not_reach_the_terminal():
    text = drawn(Page(answer="a\x1b[31mb\x07"), force_terminal=True)
    assert "\x07" not in text
    assert "\x1b[31m" not in text
    assert "a\\x1b[31mb\\x07" in text


def test_names_that_are_no_valid_text_can_still_be_printed():
    assert printable("a\udcff\nb") == "a?\\nb"
    assert printable("a\nb", breaks=True) == "a\nb"
