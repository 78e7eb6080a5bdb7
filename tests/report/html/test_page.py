"""The file is safe and alone: every name escaped, one script, one style, nothing asked for."""

from __future__ import annotations

import base64
import hashlib
import re

import pytest
from support.services.console import type_command

from debubble.errors import Code, Gap
from debubble.ledger.causes import Cause
from debubble.report.html.page import Report, report_markup
from debubble.report.html.reports import timeline_report
from debubble.report.html.sections import table_markup
from debubble.report.text import Page, Table

NASTY = "</script><script>alert(1)</script>\"'&<img src=x onerror=alert(1)>\x1b[31m"


@pytest.fixture(scope="module")
def nasty():
    page = Page(
        answer=NASTY,
        findings=[NASTY],
        tables=[Table(columns=(NASTY,), rows=[(NASTY,)], title=NASTY)],
        notes=[NASTY],
        gaps=[Gap(code=Code.MALFORMED, message=NASTY, hint=NASTY, file=NASTY)],
        next_command=NASTY,
    )
    view = {"name": NASTY}
    return report_markup(Report(verb="find", run=NASTY, page=page, views=[view]))


def test_no_name_becomes_markup(nasty):
    assert "<img" not in nasty
    assert nasty.count("<script") == 2
    assert nasty.count("</script>") == 2
    assert "\x1b" not in nasty


def test_the_policy_allows_the_page_s_own_script_and_style_and_nothing_else(nasty):
    [policy] = re.findall(r'Content-Security-Policy" content="([^"]*)"', nasty)
    assert "unsafe" not in policy
    assert policy.startswith("default-src 'none'")
    for tag in ("script", "style"):
        [inside] = re.findall(rf"<{tag}>(.*?)</{tag}>", nasty, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    assert " style=" not in nasty
    assert not re.search(r"<[^>]* on[a-z]+=", nasty)


def test_the_page_names_no_address(recorded):
    text = report_markup(timeline_report("find", [recorded], Page(answer="x"), "x"))
    assert not re.findall(r"https?://|//[a-z]+\.|@import|url\((?!#)", text)


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("find tests/data/h200/1f1b_p2_m4", "Measured, replayed, ideal"),
        ("plan tests/data/h200/1f1b_p2_m4", "Now and planned"),
        ("compare tests/data/h200/1f1b_p2_m4 tests/data/h200/1f1b_p2_m4", "Before and after"),
    ],
)
def test_each_verb_writes_its_report_and_says_where(command, shown, tmp_path):
    answer = type_command(f"debubble {command} --html out.html", tmp_path)
    assert "out.html written; open it in a browser" in answer.text
    assert shown in (tmp_path / "out.html").read_text("utf-8")


def test_paths_break_behind_a_stroke_and_hops_do_not_break():
    table = Table(columns=("hop", "file"), rows=[("0 ↔ 1", "a/b.json"), ("1 → 2", "0.5 a/b")])
    text = table_markup(table)
    assert "0\u00a0↔\u00a01" in text
    assert "1\u00a0→\u00a02" in text
    assert "a/<wbr>b.json" in text
    assert "0.5 a/b" in text


def page_of(words, folder):
    type_command(f"debubble {words} --html out.html", folder)
    return (folder / "out.html").read_text("utf-8")


def test_find_names_the_first_cause_the_next_command_and_what_each_cause_means(tmp_path):
    text = page_of("find tests/data/h200/1f1b_p3_m7", tmp_path)
    assert "Stage 1 on rank 1 takes 1.2 times the average stage; balanced stages: saves" in text
    assert "<code>debubble plan tests/data/h200/1f1b_p3_m7</code>" in text
    meanings = text.split('<dl class="causes">')[1].split("</dl>")[0]
    assert Cause.IMBALANCE.about.meaning in meanings
    assert Cause.WAY_BACK.about.meaning not in meanings
