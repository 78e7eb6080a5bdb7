"""`debubble find`: the bubble, measured, against theory; and what it draws besides its answer."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from debubble.cli.gates import judge_bubbles, refuse_to_judge
from debubble.cli.options import (
    RECORD,
    Manners,
    Reader,
    Verb,
    detailed_output_options,
    drawing_width,
    exit_strictly,
    force_option,
    gathered,
    html_option,
    input_option,
    limit_option,
    output_option,
    pipeline_option,
    places_for,
    price_option,
    print_answer,
    reading_options,
    write_html,
)
from debubble.units import parse_share, write_file

if TYPE_CHECKING:
    from debubble.analysis import Analysis
    from debubble.measure.worth import Tariff
    from debubble.report.answers.find import FindAnswer
    from debubble.report.text import Page
    from debubble.timeline.fleet.survey import NoPipelineIn

_VIEWER = "https://ui.perfetto.dev"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pictures:
    """What to draw besides the answer: lanes of text, and files."""

    lanes: bool
    perfetto: Path | None
    svg: Path | None
    html: Path | None

    def draw(
        self, analysis: Analysis, page: Page, whole: Page, words: str, manners: Manners
    ) -> None:
        """Write the files, the report with the whole page, and put lanes below the answer."""
        if self.lanes or self.perfetto or self.svg:
            self._draw_step(analysis, page, manners)
        if self.html is not None:
            from debubble.report.html.reports import timeline_report
            from debubble.report.html.views import pipelines_shown

            report = timeline_report("find", pipelines_shown(analysis), whole, words)
            write_html(report, self.html, manners)

    def _draw_step(self, analysis: Analysis, page: Page, manners: Manners) -> None:
        from debubble.report.chrome import write_chrome
        from debubble.report.frame import frame_of
        from debubble.report.lanes import draw_lanes
        from debubble.report.svg import draw_svg

        if self.lanes and analysis.pipeline.one_run:
            page.drawing = draw_lanes(frame_of(analysis), drawing_width())
        if self.perfetto is not None:
            write_chrome(analysis.timeline, self.perfetto, analysis.waits)
            manners.say(f"{self.perfetto} written; open it in {_VIEWER}")
        if self.svg is not None:
            write_file(self.svg, draw_svg(frame_of(analysis), page.answer).encode())
            manners.say(f"{self.svg} written")


def _place_pictures(
    *, lanes: bool, perfetto: str | None, svg: str | None, html: str | None, force: bool
) -> Pictures:
    outs = {"--html": html, "--perfetto": perfetto, "--svg": svg}
    report_path, trace_path, picture_path = places_for(outs, force=force)
    return Pictures(lanes=lanes, perfetto=trace_path, svg=picture_path, html=report_path)


@click.command(
    "find",
    cls=Verb,
    examples=("debubble find traces/", "debubble find traces/ --details --html report.html"),
)
@click.argument("traces", nargs=-1, required=True)
@input_option("--step", type=int, metavar="N", help="Step to analyse, by the profiler's number.")
@pipeline_option
@input_option(
    "--schedule", metavar="NAME|FILE", help="Schedule that ran, by name or as an order in CSV."
)
@limit_option(
    "--fail-over",
    type=parse_share,
    metavar="SHARE",
    help="Bubble above which the exit code is 1, such as 20%.",
)
@price_option
@gathered(
    "pictures",
    _place_pictures,
    output_option("--timeline", "lanes", is_flag=True, help="Timeline of a step, as text."),
    output_option("--perfetto", metavar="OUT", help="Perfetto file: one trace of all ranks."),
    output_option("--svg", metavar="OUT", help="SVG file: picture of a step, one lane per rank."),
    html_option,
    force_option,
)
@reading_options
@detailed_output_options
def command(  # noqa: PLR0913 (one argument a flag)
    *,
    traces: tuple[str, ...],
    step: int | None,
    pipeline: int | None,
    schedule: str | None,
    fail_over: float | None,
    tariff: Tariff | None,
    pictures: Pictures,
    reader: Reader,
    manners: Manners,
) -> None:
    """Measure the bubble of a pipeline from TRACES of all its ranks, against theory."""
    from debubble.report.answers.find import answer_find
    from debubble.report.find import find_page
    from debubble.timeline.fleet.survey import NoPipelineIn, Question
    from debubble.timeline.schedules import state_schedule

    if pictures.lanes:
        manners.refuse_drawing()
    question = Question(
        pipeline=pipeline,
        step=step,
        statement=None if schedule is None else state_schedule(schedule),
    )
    words = shlex.join(traces)
    try:
        analysis = reader.analyse(traces, question, manners)
    except NoPipelineIn as why:
        if not why.run.ranks or pictures.perfetto or pictures.svg:
            raise
        _answer_no_pipeline(why, pictures.html, words, manners)
        if fail_over is not None:
            refuse_to_judge("--fail-over", why.message, why.hint)
        return
    answer = answer_find(analysis, tariff)
    following = manners.hint(_following(analysis, answer, words))
    page = find_page(answer, following, details=manners.details)
    pictures.draw(analysis, page, find_page(answer, following), words, manners)
    print_answer(page, answer, manners)
    exit_strictly(answer.warnings, manners)
    if fail_over is not None:
        judge_bubbles(analysis.pipelines, fail_over, analysis.measured_warnings)


def _answer_no_pipeline(
    why: NoPipelineIn, report_path: Path | None, words: str, manners: Manners
) -> None:
    """Say that there is no pipeline, and what the ranks hold."""
    from debubble.report.answers.inspect import answer_no_pipeline
    from debubble.report.html.page import Report
    from debubble.report.inspect import rank_table
    from debubble.report.text import Page

    answer = answer_no_pipeline(why)
    page = Page(
        answer=answer.verdict,
        tables=[rank_table(why.run.summarised())],
        gaps=list(answer.warnings),
        next_command=manners.hint(RECORD),
    )
    if report_path is not None:
        write_html(Report(verb="find", run=words, page=page), report_path, manners)
    print_answer(page, answer, manners)
    exit_strictly(answer.warnings, manners)


def _following(analysis: Analysis, answer: FindAnswer, words: str) -> str:
    """Lead on: to slow wires that cost most, to files where ranks are missing, else to changes."""
    from debubble.ledger.causes import Cause

    slow = any(hop.verdict == "slow" for hop in answer.hops)
    if slow and (not answer.named or answer.named[0].cause == Cause.SLOW_LINK):
        return f"debubble links {words}"
    if analysis.pipeline.absent:  # nothing is predicted of a part
        return f"debubble inspect {words}"
    if analysis.ledger is None and analysis.stream is None:
        return f"debubble find {words} --timeline"
    return f"debubble plan {words}"
