"""Reports of a recorded run, and a browser to look at them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.requirements import need_program
from support.services.browser import open_browser
from support.traces.read_once import build_recording, read_recording
from support.traces.recordings import H200

from debubble.ledger.hop_health import account_for
from debubble.report.html.page import report_markup
from debubble.report.html.reports import timeline_report
from debubble.report.html.views import PipelineView
from debubble.report.text import Page
from debubble.timeline.figures import measure_pipeline


@pytest.fixture(scope="session")
def recorded():
    """A recorded run of two ranks, as it is drawn."""
    run = read_recording(H200 / "1f1b_p2_m4")
    timeline = build_recording(H200 / "1f1b_p2_m4")
    figures = measure_pipeline(timeline, 0)
    ledger = account_for(timeline, figures)
    return PipelineView(timeline=timeline, figures=figures, ledger=ledger, traces=run.ranks)


@pytest.fixture(scope="session")
def report_file(recorded, tmp_path_factory):
    """The report of that run, and of a second pipeline just like it."""
    twin = replace(recorded, figures=replace(recorded.figures, pipeline=1))
    report = timeline_report("find", [recorded, twin], Page(answer="Ranks wait."), "a run")
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(report_markup(report), "utf-8")
    return path


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    need_program("chromium", "chromium-browser")
    with open_browser(tmp_path_factory.mktemp("browser")) as page:
        yield page


@pytest.fixture
def page(browser, report_file):
    browser.resize(1400, 900)
    browser.prefer("light")
    browser.open(report_file)
    return browser
