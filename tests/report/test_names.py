"""Names of strangers in what is pasted, opened in a spreadsheet or read by a program."""

from __future__ import annotations

import json
import re
from dataclasses import replace

from support.measurements import sampled

from debubble.measure.measurement import Record
from debubble.report.answers.base import json_text
from debubble.report.answers.compare import answer_history
from debubble.report.compare import history_page
from debubble.report.text import Page, Table, as_markdown

EVIL = "\x1b[31mred\x1b[0m\r\n# head\n<img src=x onerror=a()>\u202e\u2066gnp.exe|[a](javascript:x)"
NOT_SHOWN = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def record(text):
    measurement = sampled([0.1], schedule=text)
    samples = tuple(replace(one, capture=text) for one in measurement.samples)
    kept = replace(measurement, samples=samples)
    return Record(number=1, name=text, created_s=1.0, measurement=kept, tags={text: text})


def check_markdown(drawn):
    assert not NOT_SHOWN.search(drawn)
    # Between ticks a name is shown as it is.
    outside = re.sub(r"(`{3,})text\n.*?\n\1", "", drawn, flags=re.DOTALL)
    outside = re.sub(r"(`+).*?\1", "", outside)
    assert "\n# head" not in drawn
    assert not re.search(r"(?<!\\)<img", outside)
    assert not re.search(r"(?<!\\)\[a\](?<!\\)\(", outside)


def test_every_part_of_a_page_as_markdown_obeys_no_name():
    page = Page(
        answer=EVIL,
        findings=[EVIL],
        notes=[EVIL],
        next_command=EVIL,
        tables=[Table(columns=(EVIL, "b"), rows=[(EVIL, EVIL)], title=EVIL)],
    )
    check_markdown(as_markdown(page))
    check_markdown(as_markdown(history_page(answer_history([record(EVIL)]))))


def test_halves_of_characters_do_not_reach_a_program():
    text = json_text({"na\udcffme": ["a\ud800b", "\U0001f600", {"c": "\udc80"}], "n": 1})
    text.encode("ascii")
    assert json.loads(text) == {"na\ufffdme": ["a\ufffdb", "\U0001f600", {"c": "\ufffd"}], "n": 1}
    assert "\\ud83d\\ude00" in text
    whole = answer_history([record("a\udcffb")]).to_json()
    json.loads(whole)["records"][0]["name"].encode()
