"""What `find` draws and writes besides its answer: lanes, Perfetto, SVG, Mermaid, HTML."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import click

from debubble.analysis import Analysis
from debubble.cli.options import (
    drawing_width,
    gathered,
    html_option,
    place_for,
    refuse_same_place,
    write_html,
)
from debubble.errors import UsageError
from debubble.ledger.waits import list_waits
from debubble.report.chrome import write_chrome, write_file
from debubble.report.html.find import find_report, no_pipeline_report
from debubble.report.html.views import pipelines_shown
from debubble.report.lanes import draw_lanes, frame_step
from debubble.report.mermaid import draw_mermaid
from debubble.report.svg import draw_svg
from debubble.report.text import Page


@dataclass(frozen=True, slots=True, kw_only=True)
class Pictures:
    """What was asked for, as it was typed."""

    lanes: bool
    perfetto: str | None
    svg: str | None
    mermaid: bool
    html: str | None
    force: bool

    @property
    def need_a_pipeline(self) -> bool:
        """Whether any of it says nothing without one."""
        return bool(self.perfetto or self.svg or self.mermaid)

    def check(self, *, as_json: bool) -> None:
        """Refuse what cannot be printed together, or written."""
        outs = {"--html": self.html, "--perfetto": self.perfetto, "--svg": self.svg}
        refuse_same_place(outs)
        for out in outs.values():
            place_for(out, force=self.force)
        if self.lanes and as_json:
            raise UsageError(
                "--timeline draws for people, --json is for programs", hint="leave one"
            )
        if self.mermaid and (self.lanes or as_json):
            raise UsageError("--mermaid prints a diagram and nothing else", hint="leave one")

    def draw(self, analysis: Analysis, page: Page, words: str, *, quiet: bool) -> None:
        """Write the files, and put lanes below the answer."""
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
            _say(f"{self.perfetto} written; open it in https://ui.perfetto.dev", quiet=quiet)
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
        if self.mermaid:
            click.echo(draw_mermaid(pipeline, analysis.ledger, analysis.causes, page.answer))

    def report_no_pipeline(self, page: Page, words: str, *, quiet: bool) -> None:
        """Write the one file that says something without a pipeline."""
        if self.html is not None:
            write_html(no_pipeline_report(page, words), Path(self.html), quiet=quiet)


picture_options = gathered(
    "pictures",
    Pictures,
    click.option("--timeline", "lanes", is_flag=True, help="Draw a step, a lane a rank."),
    click.option("--perfetto", metavar="OUT", help="Write all ranks as one trace for Perfetto."),
    click.option("--svg", metavar="OUT", help="Write a picture of a step, a lane a rank."),
    click.option(
        "--mermaid", is_flag=True, help="Print the pipeline as a Mermaid diagram instead."
    ),
    html_option,
    click.option("--force", is_flag=True, help="Let --perfetto, --svg and --html replace a file."),
)


def _say(words: str, *, quiet: bool) -> None:
    if not quiet:
        click.echo(words, err=True)
