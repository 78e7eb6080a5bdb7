"""`debubble find`: the bubble, measured, against theory; and what it draws besides its answer.

`--open` shows the trace by ui.perfetto.dev. That page opens traces from one address of the machine
it is looked at on, and no other: port 9001 of 127.0.0.1. Nothing is uploaded: the page's script
fetches the file from here. It is given once, to that page alone, under a name nobody can guess.
"""

from __future__ import annotations

import secrets
import shlex
import time
import webbrowser
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from shutil import copyfileobj
from urllib.parse import quote

import click

from debubble.analysis import Analysis
from debubble.answers.find import FindAnswer, answer_find
from debubble.answers.inspect import answer_no_pipeline, answer_ranks
from debubble.answers.ledger import Tariff
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
from debubble.fleet.survey import NoPipelineIn, Question
from debubble.ledger.causes import Cause
from debubble.ledger.ledger import list_waits
from debubble.report.chrome import write_chrome
from debubble.report.find import find_page, no_pipeline_page
from debubble.report.html.measured import find_report, no_pipeline_report
from debubble.report.html.views import pipelines_shown
from debubble.report.inspect import rank_table
from debubble.report.lanes import draw_lanes, frame_step
from debubble.report.scalars import scalars, write_events
from debubble.report.svg import draw_mermaid, draw_svg
from debubble.report.text import Page
from debubble.schedules import state_schedule
from debubble.units import parse_share
from debubble.whole_file import write_file


@dataclass(frozen=True, slots=True, kw_only=True)
class Pictures:
    """What was asked for, as it was typed."""

    lanes: bool
    perfetto: str | None
    opened: bool
    svg: str | None
    mermaid: bool
    tensorboard: Path | None
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
        if self.opened and self.perfetto is None:
            raise UsageError("--open shows what --perfetto writes", hint="add --perfetto OUT")
        if self.lanes and as_json:
            raise UsageError(
                "--timeline draws for people, --json is for programs", hint="leave one"
            )
        if self.mermaid and (self.lanes or as_json):
            raise UsageError("--mermaid prints a diagram and nothing else", hint="leave one")

    def draw(
        self, analysis: Analysis, answer: FindAnswer, page: Page, words: str, *, quiet: bool
    ) -> None:
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
        if self.tensorboard is not None:
            values = scalars(answer)
            file = write_events(self.tensorboard, values, step=step or 0, now_s=time.time())
            _say(f"{file} written: {len(values)} scalars of step {step or 0}", quiet=quiet)
        if self.mermaid:
            click.echo(draw_mermaid(pipeline, analysis.ledger, analysis.causes, page.answer))

    def show(self, *, quiet: bool) -> None:
        """Show the trace in a browser, once the answer has been printed."""
        if self.opened and self.perfetto is not None:
            file = Path(self.perfetto)
            if not open_trace(file, lambda words: _say(words, quiet=quiet)):
                _say(f"nobody fetched it; open {file} in {VIEWER} yourself", quiet=quiet)

    def report_no_pipeline(self, page: Page, words: str, *, quiet: bool) -> None:
        """Write the one file that says something without a pipeline."""
        if self.html is not None:
            write_html(no_pipeline_report(page, words), Path(self.html), quiet=quiet)


picture_options = gathered(
    "pictures",
    Pictures,
    click.option("--timeline", "lanes", is_flag=True, help="Draw a step, a lane a rank."),
    click.option("--perfetto", metavar="OUT", help="Write all ranks as one trace for Perfetto."),
    click.option("--open", "opened", is_flag=True, help="Show it in the browser, by Perfetto."),
    click.option("--svg", metavar="OUT", help="Write a picture of a step, a lane a rank."),
    click.option(
        "--mermaid", is_flag=True, help="Print the pipeline as a Mermaid diagram instead."
    ),
    click.option(
        "--tensorboard",
        type=click.Path(path_type=Path, file_okay=False),
        metavar="FOLDER",
        help="Write the figures as scalars for TensorBoard.",
    ),
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
        page = no_pipeline_page(found, rank_table(answer_ranks(why.run)), following)
        pictures.report_no_pipeline(page, words, quiet=manners.quiet)
        print_answer(page, found, manners)
        exit_strictly(found.warnings, manners)
        if allowed is not None:
            refuse_to_judge("--fail-over", why.message, why.hint)
        return
    answer = answer_find(analysis, tariff)
    page = find_page(answer, "" if manners.quiet else _following(analysis, answer, words))
    pictures.draw(analysis, answer, page, words, quiet=manners.quiet)
    if not pictures.mermaid:
        print_answer(page, answer, manners)
    pictures.show(quiet=manners.quiet)
    exit_strictly(answer.warnings, manners)
    if allowed is not None:
        judge_bubbles(analysis.pipelines, allowed, analysis.measured_warnings)


def _following(analysis: Analysis, answer: FindAnswer, words: str) -> str:
    """Lead on: to the wires where slow ones cost something, else to what could be changed."""
    slow = any(hop.verdict == "slow" for hop in answer.hops)
    if slow and (not answer.named or Cause.SLOW_LINK in [named.cause for named in answer.named]):
        return f"debubble links {words}"
    if analysis.ledger is None and analysis.stream is None:
        return f"debubble find {words} --timeline"
    return f"debubble plan {words}"


VIEWER = "https://ui.perfetto.dev"
ADDRESS, PORT = "127.0.0.1", 9001
# Who has not looked by then has no browser here; large traces take a while to be fetched, not to be
# asked for.
PATIENCE_S = 60.0
_LOOK_S = 0.5


class _Offer(HTTPServer):
    """A server of one file."""

    allow_reuse_address = True

    def __init__(self, file: Path, port: int) -> None:
        super().__init__((ADDRESS, port), _Answer)
        self.file = file
        self.path = f"/{secrets.token_urlsafe(16)}/{quote(file.name)}"
        self.given = False
        self.timeout = _LOOK_S

    @property
    def url(self) -> str:
        """Where the viewer is to look."""
        here = f"http://{ADDRESS}:{self.server_port}{self.path}"
        return f"{VIEWER}/#!/?url={quote(here, safe='')}"


class _Answer(BaseHTTPRequestHandler):
    """Gives the file to the viewer, and to nobody else."""

    server: _Offer
    timeout = 30

    def do_GET(self) -> None:
        """Send the file."""
        if not self._is_meant():
            return
        self.send_response(200)
        self._allow()
        self.send_header("Content-Type", "application/octet-stream")
        self.send_header("Content-Length", str(self.server.file.stat().st_size))
        self.end_headers()
        with self.server.file.open("rb") as trace:
            copyfileobj(trace, self.wfile)
        self.server.given = True

    def do_OPTIONS(self) -> None:
        """Tell a browser that asks first that the viewer may ask."""
        if self._is_meant():
            self.send_response(204)
            self._allow()
            self.send_header("Access-Control-Allow-Private-Network", "true")
            self.end_headers()

    def _is_meant(self) -> bool:
        """Refuse other names of this machine, other pages, and other files."""
        host = self.headers.get("Host", "")
        origin = self.headers.get("Origin", VIEWER)
        meant = host == f"{ADDRESS}:{self.server.server_port}" and origin == VIEWER
        if not (meant and secrets.compare_digest(self.path, self.server.path)):
            self.send_error(404)
            return False
        return True

    def _allow(self) -> None:
        self.send_header("Access-Control-Allow-Origin", VIEWER)
        self.send_header("Cache-Control", "no-store")
        self.send_header("Vary", "Origin")

    def log_message(self, *_: object) -> None:
        """Print nothing: stderr is for people."""


def open_trace(
    file: Path,
    say: Callable[[str], None],
    *,
    port: int = PORT,
    browse: Callable[[str], bool] = webbrowser.open,
    clock: Callable[[], float] = time.monotonic,
) -> bool:
    """Show a trace in the user's browser; return whether it was fetched before patience ended."""
    try:
        offer = _Offer(file, port)
    except OSError as error:
        raise UsageError(
            f"port {port} of {ADDRESS} cannot be had: {error.strerror}",
            hint=f"the viewer asks at no other; open {file} in {VIEWER} yourself",
        ) from error
    with offer:
        if not browse(offer.url):
            say(f"no browser here; open {offer.url}")
        end = clock() + PATIENCE_S
        while not offer.given and clock() < end:
            offer.handle_request()
        return offer.given
