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
    drawing_width,
    exit_strictly,
    gathered,
    html_option,
    in_flight_option,
    output_options,
    place_for,
    print_answer,
    refuse_same_place,
    tariff_options,
    trace_options,
    write_html,
)
from debubble.errors import UsageError
from debubble.units import parse_share, write_file

if TYPE_CHECKING:
    from debubble.analysis import Analysis
    from debubble.measure.worth import Tariff
    from debubble.report.answers.find import FindAnswer
    from debubble.report.text import Page


@dataclass(frozen=True, slots=True, kw_only=True)
class Pictures:
    """What was asked for, as it was typed."""

    lanes: bool
    perfetto: str | None
    opened: bool
    svg: str | None
    html: str | None
    force: bool

    @property
    def need_a_pipeline(self) -> bool:
        """Whether any of it says nothing without one."""
        return bool(self.perfetto or self.svg)

    def check(self, *, as_json: bool) -> None:
        """Refuse what cannot be printed together, or written."""
        outs = {"--html": self.html, "--perfetto": self.perfetto, "--svg": self.svg}
        refuse_same_place(outs)
        for out in outs.values():
            place_for(out, force=self.force)
        if self.opened and self.perfetto is None:
            raise UsageError("--open shows what --perfetto writes", hint="add --perfetto OUT")
        if self.lanes and as_json:
            raise UsageError(
                "--timeline draws for people, --json is for programs", hint="leave one"
            )

    def draw(self, analysis: Analysis, page: Page, words: str, *, quiet: bool) -> None:
        """Write the files, and put lanes below the answer."""
        from debubble.ledger.ledger import list_waits
        from debubble.report.chrome import write_chrome
        from debubble.report.html.measured import find_report
        from debubble.report.html.views import pipelines_shown
        from debubble.report.lanes import draw_lanes, frame_step
        from debubble.report.svg import draw_svg

        asks = self.lanes or self.need_a_pipeline
        waits = list_waits(analysis.ledger) if asks and analysis.ledger else ()
        pipeline, timeline = analysis.pipeline, analysis.timeline
        step = analysis.step
        if step is None and pipeline.windows:
            step = pipeline.windows[0].step
        if self.lanes and pipeline.one_run:
            page.drawing = draw_lanes(timeline, pipeline.pipeline, step, drawing_width(), waits)
        if self.perfetto is not None:
            write_chrome(timeline, Path(self.perfetto), waits=waits, force=self.force)
            from debubble.cli.viewer import VIEWER

            where = "" if self.opened else f"; open it in {VIEWER}"
            _say(f"{self.perfetto} written{where}", quiet=quiet)
        if self.svg is not None:
            if not pipeline.one_run:
                raise UsageError("there is nothing to draw: these ranks are not of one run")
            frame = frame_step(timeline, pipeline.pipeline, step, waits)
            picture = draw_svg(frame, page.answer).encode()
            write_file(Path(self.svg), picture, force=self.force)
            _say(f"{self.svg} written", quiet=quiet)
        if self.html is not None:
            write_html(
                find_report(pipelines_shown(analysis), page, words), Path(self.html), quiet=quiet
            )

    def show(self, *, quiet: bool) -> None:
        """Show the trace in a browser, once the answer has been printed."""
        if self.opened and self.perfetto is not None:
            from debubble.cli.viewer import VIEWER, open_trace

            file = Path(self.perfetto)
            if not open_trace(file, lambda words: _say(words, quiet=quiet)):
                _say(f"nobody fetched it; open {file} in {VIEWER} yourself", quiet=quiet)

    def report_no_pipeline(self, page: Page, words: str, *, quiet: bool) -> None:
        """Write the one file that says something without a pipeline."""
        from debubble.report.html.measured import no_pipeline_report

        if self.html is not None:
            write_html(no_pipeline_report(page, words), Path(self.html), quiet=quiet)


picture_options = gathered(
    "pictures",
    Pictures,
    click.option("--timeline", "lanes", is_flag=True, help="Draw a step, a lane a rank."),
    click.option("--perfetto", metavar="OUT", help="Write all ranks as one trace for Perfetto."),
    click.option("--open", "opened", is_flag=True, help="Show it in the browser, by Perfetto."),
    click.option("--svg", metavar="OUT", help="Write a picture of a step, a lane a rank."),
    html_option,
    click.option("--force", is_flag=True, help="Let --perfetto, --svg and --html replace a file."),
)


def _say(words: str, *, quiet: bool) -> None:
    if not quiet:
        click.echo(words, err=True)


@click.command("find")
@click.argument("traces", nargs=-1, required=True)
@click.option("--step", type=int, metavar="N", help="One step alone, by the profiler's number.")
@click.option("--pipeline", type=int, metavar="N", help="One pipeline alone, counted from 0.")
@click.option(
    "--schedule", metavar="NAME|FILE", help="The schedule as you know it, or its order as CSV."
)
@click.option(
    "--chunks", type=click.IntRange(min=1), metavar="N", help="Stages a rank in that schedule."
)
@in_flight_option
@click.option(
    "--fail-over", metavar="SHARE", help="Exit with 1 when the bubble is larger, such as 20%."
)
@tariff_options
@picture_options
@trace_options
@output_options
def command(  # noqa: PLR0913 (one argument a flag)
    *,
    traces: tuple[str, ...],
    step: int | None,
    pipeline: int | None,
    schedule: str | None,
    chunks: int | None,
    in_flight_measured: int | None,
    fail_over: str | None,
    tariff: Tariff,
    pictures: Pictures,
    reader: Reader,
    manners: Manners,
) -> None:
    """Measure the bubble of a pipeline from TRACES of all its ranks, against theory."""
    from debubble.report.answers.find import answer_find
    from debubble.report.answers.inspect import answer_no_pipeline
    from debubble.report.find import find_page, no_pipeline_page
    from debubble.report.inspect import rank_table
    from debubble.timeline.fleet.survey import NoPipelineIn, Question
    from debubble.timeline.schedules import state_schedule

    allowed = None if fail_over is None else parse_share(fail_over)
    pictures.check(as_json=bool(manners.as_json))
    if schedule is None and chunks is not None:
        raise UsageError("--chunks says something of --schedule only", hint="add --schedule NAME")
    statement = None if schedule is None else state_schedule(schedule, chunks)
    question = Question(
        pipeline=pipeline, step=step, statement=statement, in_flight=in_flight_measured
    )
    words = shlex.join(traces)
    try:
        analysis = reader.analyse(traces, question, quiet=manners.quiet)
    except NoPipelineIn as why:
        if not why.run.ranks or pictures.need_a_pipeline:
            raise
        found = answer_no_pipeline(why)
        following = "" if manners.quiet else RECORD
        page = no_pipeline_page(found, rank_table(why.run.summarised()), following)
        pictures.report_no_pipeline(page, words, quiet=manners.quiet)
        print_answer(page, found, manners)
        exit_strictly(found.warnings, manners)
        if allowed is not None:
            refuse_to_judge("--fail-over", why.message, why.hint)
        return
    answer = answer_find(analysis, tariff)
    page = find_page(answer, "" if manners.quiet else _following(analysis, answer, words))
    pictures.draw(analysis, page, words, quiet=manners.quiet)
    print_answer(page, answer, manners)
    pictures.show(quiet=manners.quiet)
    exit_strictly(answer.warnings, manners)
    if allowed is not None:
        judge_bubbles(analysis.pipelines, allowed, analysis.measured_warnings)


def _following(analysis: Analysis, answer: FindAnswer, words: str) -> str:
    """Lead on: to the wires where slow ones cost something, else to what could be changed."""
    from debubble.ledger.causes import Cause

    slow = any(hop.verdict == "slow" for hop in answer.hops)
    if slow and (not answer.named or Cause.SLOW_LINK in [named.cause for named in answer.named]):
        return f"debubble links {words}"
    if analysis.ledger is None and analysis.stream is None:
        return f"debubble find {words} --timeline"
    return f"debubble plan {words}"
