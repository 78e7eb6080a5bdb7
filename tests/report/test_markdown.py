"""Markdown carries the page as it is: no name ends a fence, a cell or a span of code."""

from __future__ import annotations

import re

from rich.text import Text

from debubble.errors import Code, Gap
from debubble.report.text import Page, Table, as_markdown


def test_the_page_is_written_in_the_order_of_the_terminal():
    page = Page(
        answer="Ranks wait.",
        findings=["Stage 1 is slow."],
        drawing=[Text("rank 0 FFF")],
        tables=[Table(columns=("rank", "busy"), rows=[("0", "61.2 %")], title="of each rank")],
        notes=["a note"],
        gaps=[Gap(code=Code.MALFORMED, message="bad line", hint="record it again")],
        next_command="debubble plan run",
    )
    assert (
        as_markdown(page)
        == """**Ranks wait.**

- Stage 1 is slow.

```text
rank 0 FFF
```

of each rank

| rank | busy |
| :-- | --: |
| 0 | 61.2 % |

```text
a note
```

> warning: bad line (record it again)

next: `debubble plan run`
"""
    )


def test_a_cell_with_a_bar_is_one_cell():
    table = Table(columns=("file", "rows"), rows=[("a|b", "1"), ("c\nd", "2")])
    rows = as_markdown(Page(answer="x", tables=[table])).splitlines()[-2:]
    assert [len(re.split(r"(?<!\\)\|", row)) - 2 for row in rows] == [2, 2]


def test_ticks_in_a_note_do_not_end_its_fence():
    text = as_markdown(Page(answer="x", notes=["before", "```", "# not a heading", "````"]))
    fence, *inside, end = text.split("\n\n", 1)[1].rstrip("\n").splitlines()
    assert fence == "`````text"
    assert end == "`````"
    assert inside == ["before", "```", "# not a heading", "````"]


def test_ticks_in_a_path_do_not_end_the_next_command():
    text = as_markdown(Page(answer="x", next_command="debubble find 'a`b``c'"))
    assert text.splitlines()[-1] == "next: ``` debubble find 'a`b``c' ```"
