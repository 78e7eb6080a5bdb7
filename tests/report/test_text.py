"""What is drawn is readable without colour, and strangers' names stay names."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from debubble.cli.options import console_for
from debubble.errors import Code, Gap
from debubble.report.text import Page, Table, print_page, refused_table


def drawn(page, width=80, **options):
    out = io.StringIO()
    print_page(page, Console(file=out, width=width, highlight=False, **options))
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


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_sentences_break_between_words_on_a_terminal_and_never_in_a_file():
    finding = "Equal stages would save 19.1 ms of 186 ms over hop 1 → 0, as everybody knows, 10 %."
    command = f"check: {'CUDA_VISIBLE_DEVICES=0,1 ' * 5}sendrecv_perf"
    gap = Gap(code=Code.MALFORMED, message="word " * 30, hint="word " * 30)
    page = Page(answer="word " * 30, findings=[finding], notes=["a note " * 30])
    page.lines, page.gaps, page.next_command = [command], [gap], f"debubble find {'x' * 90}"
    assert finding in drawn(page)
    for width in range(20, 90):
        out = Terminal()
        print_page(page, Console(file=out, width=width, highlight=False, color_system=None))
        said = out.getvalue()
        lines = [line for line in said.splitlines() if not line.startswith(("check:", "next:"))]
        assert max(map(len, lines)) <= width
        assert command in said
        for together in ("19.1 ms", "186 ms", "1 → 0", "10 %"):
            assert together in said, (width, together)


def test_control_characters_in_names_do_not_reach_the_terminal():
    text = drawn(Page(answer="a\x1b[31mb\x07"), force_terminal=True)
    assert "\x07" not in text
    assert "\x1b[31m" not in text
    assert "a\\x1b[31mb\\x07" in text


WIDE = Table(
    columns=("hop", "size", "one message", "rate", "wait", "buffered", "class", "verdict", "file"),
    rows=[
        (
            f"{rank} → {rank + 1}",
            "8.00 MiB",
            "7.68 ms",
            "1.09 GB/s",
            "10.2 ms",
            "25.0 %",
            "nvlink4",
            "healthy",
            f"a folder/of-a-name-that-does-not-end-for-a-while/rank{rank}.json",
        )
        for rank in range(3)
    ],
)


@pytest.mark.parametrize("width", [30, 40, 80, 120, 200])
def test_nothing_of_a_wide_table_is_cut_and_no_line_is_wider_than_the_terminal(width):
    text = drawn(Page(answer="x", tables=[WIDE]), width=width)
    lines = text.splitlines()
    assert max(map(len, lines)) <= width
    assert "…" not in text
    for cell in {cell for row in WIDE.rows for cell in row[:-1]}:
        assert any(cell in line for line in lines), cell
    for rank in range(3):
        path = f"of-a-name-that-does-not-end-for-a-while/rank{rank}.json"
        assert path in (text if width >= 80 else "".join(text.split()))


def test_columns_that_do_not_fit_go_below_under_the_first_one():
    blocks = drawn(Page(answer="x", tables=[WIDE]), width=60).split("\n\n")[1:]
    assert len(blocks) > 1
    for block in blocks:
        assert block.lstrip().splitlines()[0].strip()
        assert [line[:5] for line in block.splitlines() if "→" in line] == [
            "0 → 1",
            "1 → 2",
            "2 → 3",
        ]


LONG = ("repair all slow hops of rank 2, 3:2 and 1:2", "schedule zb-h2, split 5,4,3,4", "8 of 16")


def options_table(title, rows, spare=()):
    columns = ("option", "batch", "80 % interval", "bubble", "gain", "memory left", "GPU-h/day")
    cells = ("353 ms", "337 to 365 ms", "51.1 %", "+12.3 %", "31.3 GiB", "12.3")
    rows = [(option, *cells) for option in rows]
    return Table(columns=columns, rows=rows, title=title, spare=spare)


def test_a_narrow_terminal_gives_options_the_room_of_spare_columns_and_says_so():
    spare = ("GPU-h/day", "bubble")
    text = drawn(Page(answer="x", tables=[options_table("a", LONG, spare)]), width=74)
    assert "left out at this width: GPU-h/day; --json has all" in text
    assert "51.1 %" in text
    rows = text.split("─\n")[1].split("\n\n")[0].splitlines()
    assert len(rows) == 2 + 2 + 1
    narrower = drawn(Page(answer="x", tables=[options_table("a", LONG, spare)]), width=66)
    assert "left out at this width: bubble, GPU-h/day; --json has all" in narrower
    wide = drawn(Page(answer="x", tables=[options_table("a", LONG, spare)]), width=120)
    assert "left out" not in wide
    assert "12.3" in wide
    assert "left out" not in drawn(Page(answer="x", tables=[options_table("a", LONG)]))


def test_of_many_warnings_alike_the_first_few_are_printed_and_the_rest_counted():
    gaps = [Gap(code=Code.MALFORMED, message=f"bad line {number}") for number in range(9)]
    gaps.append(Gap(code=Code.LOG_CUT, message="a log ends early"))
    text = drawn(Page(answer="x", gaps=gaps), soft_wrap=True)
    assert [f"bad line {number}" in text for number in range(9)] == [True] * 4 + [False] * 5
    assert f"5 more like it: {Code.MALFORMED}" in text
    assert "a log ends early" in text


def test_a_first_column_longer_than_a_line_leaves_room_for_the_others():
    path = "a-folder-with-a-name-that-is-longer-than-any-terminal/" * 3
    table = Table(columns=("trace", "rows", "verdict"), rows=[(path, "1,301,930", "healthy")])
    text = drawn(Page(answer="x", tables=[table]))
    assert max(map(len, text.splitlines())) <= 80
    assert any("1,301,930" in line and "healthy" in line for line in text.splitlines())
    assert path in "".join(text.replace("1,301,930", "").replace("healthy", "").split())


def test_without_colour_nothing_is_bold_or_dim(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("NO_COLOR", "")
    page = Page(answer="42 %.", tables=[Table(columns=("rank",), rows=[("0",)])])
    print_page(page, console_for())
    assert "\x1b[1m" in capsys.readouterr().out
    monkeypatch.setenv("NO_COLOR", "1")
    print_page(page, console_for())
    assert "\x1b" not in capsys.readouterr().out


def test_each_reason_of_what_was_refused_is_said_once():
    table = refused_table([("a", "no layers"), ("b", "too large"), ("c", "no layers")])
    assert table.rows == [("a", "no layers"), ("c", "the same"), ("b", "too large")]


def test_a_column_in_which_nothing_is_known_goes_but_never_the_first():
    table = Table(columns=("–", "a", "b"), rows=[("–", "unknown", "1"), ("", "–", "")])
    short = table.without_unknown()
    assert (short.columns, short.rows) == (("–", "b"), [("–", "1"), ("", "")])
