"""Text, Markdown, HTML and JSON of an answer carry the same figures, on every recording."""

from __future__ import annotations

import html
import io
import re

import pytest
from rich.console import Console
from support.traces.read_once import analyse_recording
from support.traces.recordings import DATA, SHARED

import debubble
from debubble.report.answers.find import answer_find
from debubble.report.answers.ledger import SCHEDULE
from debubble.report.answers.links import answer_links
from debubble.report.find import find_page
from debubble.report.html.page import report_markup
from debubble.report.html.reports import timeline_report
from debubble.report.html.views import pipelines_shown
from debubble.report.links import links_page
from debubble.report.text import as_markdown, print_page
from debubble.units import show_change, show_seconds, show_share

pytestmark = pytest.mark.slow

FIGURE = re.compile(r"\d[\d.,]*\s(?:%|ns|us|ms|s|B|KiB|MiB|GiB|MB/s|GB/s)(?!\w)")
FOLDERS = [
    folder
    for place in (DATA, SHARED)
    for kind in ("h200", "paced", "h200_free", "frameworks")
    for folder in sorted((place / kind).glob("*/"))
    if any(folder.glob("rank*"))
]


def as_text(page):
    out = io.StringIO()
    print_page(page, Console(file=out, width=200, no_color=True, highlight=False))
    return out.getvalue()


@pytest.mark.parametrize("folder", [pytest.param(one, id=one.name) for one in FOLDERS])
def test_every_view_of_a_run_has_the_same_figures(folder):
    run = analyse_recording(folder)
    found, links = answer_find(run), answer_links(run)
    page = find_page(found)
    text = as_text(page)
    markup = html.unescape(
        re.sub(
            r"<[^>]+>",
            " ",
            report_markup(timeline_report("find", pipelines_shown(run), page, "run")),
        )
    )
    figures = set(FIGURE.findall(text))
    assert len(figures) > 20
    assert figures <= set(FIGURE.findall(as_markdown(page).replace("\\", "")))
    assert figures <= set(FIGURE.findall(markup.replace("\u00a0", " ")))
    # And the data say what the text says.
    if found.ledger is not None:
        assert f"{100 * found.numbers.bubble_fraction:.0f} %" in page.answer
        assert show_seconds(found.numbers.batch_latency_s) in text
        assert sum(found.ledger.shares.values()) == pytest.approx(1, abs=1e-9)
        for share in found.ledger.shares.values():
            if share >= 0.0005:
                assert show_share(share) in text
        for saving in found.savings:
            whole = saving.batch_latency_s + saving.saved_s
            assert whole == pytest.approx(found.numbers.batch_latency_s, abs=2e-9)
        for option in found.more_microbatches.options:
            assert show_change(option.throughput_gain_fraction) in text
        for named in found.named:
            if named.cause == SCHEDULE:
                continue
            repairs = "; repairing " in named.sentence
            saved = named.culprit_saved_s if repairs else named.saved_s
            assert f" {show_seconds(saved)} (" in named.sentence
    links_text = as_text(links_page(links))
    assert set(FIGURE.findall(links_text)) <= set(
        FIGURE.findall(as_markdown(links_page(links)).replace("\\", ""))
    )
    assert links.warnings == found.warnings


def test_a_stranger_cannot_write_markdown():
    found = answer_find(analyse_recording(DATA / "h200" / "1f1b_p2_m4"))
    page = find_page(found)
    page.answer = "<img src=x> | *bold* `code` [link](x)"
    first = as_markdown(page).splitlines()[0]
    assert first == r"**\<img src=x\> \| \*bold\* \`code\` \[link\](x)**"


def test_an_answer_at_the_prompt_is_its_first_line():
    answer = debubble.find(str(DATA / "h200" / "1f1b_p2_m4"))
    assert repr(answer) == answer.verdict
