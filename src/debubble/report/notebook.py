"""Runs and answers in → how they show themselves in a notebook."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable
from typing import Any

from debubble.analysis import Analysis
from debubble.errors import UsageError
from debubble.report.answers.base import Answer
from debubble.report.answers.compare import CompareAnswer
from debubble.report.answers.find import FindAnswer, answer_find, say_bubble
from debubble.report.answers.links import LinksAnswer
from debubble.report.answers.plan import PlanAnswer
from debubble.report.answers.simulate import SimulateAnswer
from debubble.report.compare import compare_page
from debubble.report.find import find_page
from debubble.report.html.page import notebook_markup
from debubble.report.lanes import frame_step
from debubble.report.links import links_page
from debubble.report.plan import plan_page
from debubble.report.simulate import simulate_page
from debubble.report.svg import draw_svg
from debubble.report.text import Page


def draw_step(analysis: Analysis, step: int | None = None) -> str:
    """Draw a step of a run as SVG, or the first one."""
    windows = analysis.pipeline.windows
    shown = step if step is not None else analysis.step
    if shown is None and windows:
        shown = windows[0].step
    if not analysis.pipeline.one_run:
        raise UsageError("there is nothing to draw: these ranks are not of one run")
    waits = analysis.ledger.waits if analysis.ledger else ()
    frame = frame_step(analysis.timeline, analysis.pipeline.pipeline, shown, waits)
    return draw_svg(frame, say_bubble(analysis))


def _draw_run(run: Analysis) -> str:
    """Show what `find` answers of a run, under a picture of a step.

    As an image the picture keeps its names to itself, however many a notebook shows.
    """
    shown = ""
    if run.pipeline.one_run and (run.pipeline.windows or run.pipeline.stream):
        encoded = b64encode(draw_step(run).encode()).decode()
        image = f"data:image/svg+xml;base64,{encoded}"
        shown = f'<img alt="a step, a lane a rank" style="max-width:100%" src="{image}">'
    return shown + notebook_markup(find_page(answer_find(run)))


def _draw_with(page: Callable[[Any], Page]) -> Callable[[Any], str]:
    return lambda answer: notebook_markup(page(answer))


Analysis.drawn = staticmethod(_draw_run)
Answer.drawn |= {
    FindAnswer: _draw_with(find_page),
    LinksAnswer: _draw_with(links_page),
    CompareAnswer: _draw_with(compare_page),
    PlanAnswer: _draw_with(plan_page),
    SimulateAnswer: _draw_with(simulate_page),
}
