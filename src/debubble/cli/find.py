"""`debubble find`: the bubble, measured, against theory."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

import click
from rich.text import Text

from debubble.cli.options import (
    drawing_width,
    exit_strictly,
    html_option,
    limits_from,
    output_options,
    place_for,
    print_answer,
    progress,
    trace_options,
    write_html,
)
from debubble.errors import NoPipeline, UsageError
from debubble.ledger.hop_health import account_for
from debubble.ledger.ledger import Ledger
from debubble.ledger.waits import Wait, list_waits
from debubble.report.chrome import write_chrome
from debubble.report.find import (
    find_json,
    find_page,
    no_pipeline_json,
    no_pipeline_page,
)
from debubble.report.frame import frame_step
from debubble.report.html.find import find_report, no_pipeline_report
from debubble.report.html.views import Shown
from debubble.report.lanes import draw_lanes
from debubble.report.mermaid import draw_mermaid
from debubble.report.svg import draw_svg
from debubble.report.writing import write_file
from debubble.schedules import SCHEDULES, Statement, state_schedule
from debubble.timeline.build import build_run
from debubble.timeline.figures import PipelineFigures, measure_pipeline, worst_of
from debubble.timeline.job import ask_job
from debubble.timeline.model import Timeline
from debubble.trace.run import Run, find_run, read_run
from debubble.units import parse_share

EXIT_FAILED = 1


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
@click.option(
    "--fail-over", metavar="SHARE", help="Exit with 1 when the bubble is larger, such as 20%."
)
@click.option("--timeline", "draws", is_flag=True, help="Draw a step, a lane a rank.")
@click.option("--perfetto", metavar="OUT", help="Write all ranks as one trace for Perfetto.")
@click.option("--svg", metavar="OUT", help="Write a picture of a step, a lane a rank.")
@click.option("--mermaid", is_flag=True, help="Print the pipeline as a Mermaid diagram instead.")
@html_option
@click.option("--force", is_flag=True, help="Let --perfetto, --svg and --html replace a file.")
@trace_options
@output_options
def command(  # noqa: PLR0913 (one argument a flag)
    *,
    traces: tuple[str, ...],
    step: int | None,
    pipeline: int | None,
    schedule: str | None,
    chunks: int | None,
    fail_over: str | None,
    draws: bool,
    perfetto: str | None,
    svg: str | None,
    mermaid: bool,
    html: str | None,
    force: bool,
    capture: str | None,
    rank: int | None,
    max_inflated: str,
    max_ratio: float,
    as_json: bool,
    strict: bool,
    color: str,
    quiet: bool,
) -> None:
    """Measure the bubble of a pipeline from TRACES of all its ranks, against theory."""
    limits = limits_from(max_inflated, max_ratio)
    allowed = None if fail_over is None else parse_share(fail_over)
    if draws and as_json:
        raise UsageError("--timeline draws for people, --json is for programs", hint="leave one")
    if mermaid and (draws or as_json):
        raise UsageError("--mermaid prints a diagram and nothing else", hint="leave one")
    picture = place_for(html, force=force)
    statement = _statement(schedule, chunks)
    found = find_run(traces, capture=capture, limits=limits)
    with progress("reading", quiet=quiet) as show:
        run = read_run(found, limits=limits, rank=rank, on_progress=show)
    words = " ".join(shlex.quote(word) for word in traces)
    following = f"debubble plan {words}" if draws else f"debubble find {words} --timeline"
    try:
        timeline = build_run(run)
    except NoPipeline as why:
        if not run.ranks or perfetto or svg or mermaid:
            raise
        page = no_pipeline_page(run, why, "" if quiet else f"debubble inspect {words}")
        if picture is not None:
            write_html(no_pipeline_report(page, words), picture, quiet=quiet)
        print_answer(page, no_pipeline_json(run, why), as_json=as_json, color=color)
        exit_strictly(tuple(page.gaps), strict=strict)
        return
    figures = [
        _measure(run, timeline, one, step, statement) for one in _choose(timeline, pipeline, step)
    ]
    worst = worst_of(figures)
    job = ask_job(run.sidecars, worst)
    gaps = (*run.gaps, *timeline.gaps, *(gap for one in figures for gap in one.gaps), *job.gaps)
    ledger = account_for(timeline, worst)
    gaps = tuple(dict.fromkeys((*gaps, *(ledger.gaps if ledger else ()))))
    page = find_page(figures, ledger, job, gaps, "" if quiet else following)
    waits = list_waits(ledger) if ledger and (draws or perfetto or svg or mermaid) else ()
    if draws:
        page.drawing = _draw(timeline, worst, step, waits)
    if perfetto is not None:
        _write_perfetto(timeline, Path(perfetto), waits, force=force, quiet=quiet)
    if svg is not None:
        drawn = _picture(timeline, worst, step, waits, page.answer)
        write_file(Path(svg), drawn.encode(), force=force)
        _say(f"{svg} written", quiet=quiet)
    if picture is not None:
        shown = _show(run, timeline, figures, ledger)
        write_html(find_report(shown, page, words), picture, quiet=quiet)
    if mermaid:
        click.echo(draw_mermaid(worst, ledger, page.answer))
    else:
        data = find_json(run, timeline, figures, ledger, gaps, job=job)
        print_answer(page, data, as_json=as_json, color=color)
    exit_strictly(gaps, strict=strict)
    if allowed is not None and any((one.bubble_fraction or 0.0) > allowed for one in figures):
        raise click.exceptions.Exit(EXIT_FAILED)


def _measure(
    run: Run, timeline: Timeline, pipeline: int, step: int | None, statement: Statement | None
) -> PipelineFigures:
    """Measure a pipeline; an order that no known schedule has is held against the job's word."""
    figures = measure_pipeline(timeline, pipeline, step, statement)
    if statement is not None:
        return figures
    said = ask_job(run.sidecars, figures).schedule_for(figures)
    if said is None or said not in SCHEDULES or figures.kind == "stream":
        return figures
    return measure_pipeline(timeline, pipeline, step, state_schedule(said))


def _show(
    run: Run, timeline: Timeline, figures: Sequence[PipelineFigures], ledger: Ledger | None
) -> list[Shown]:
    """Account for every pipeline, the worst first: its ledger is there already."""
    worst = worst_of(figures)
    others = [one for one in figures if one is not worst]
    return [
        Shown(timeline=timeline, figures=worst, ledger=ledger, traces=run.ranks),
        *(
            Shown(
                timeline=timeline,
                figures=one,
                ledger=account_for(timeline, one),
                traces=run.ranks,
            )
            for one in others
        ),
    ]


def _statement(schedule: str | None, chunks: int | None) -> Statement | None:
    if schedule is not None:
        return state_schedule(schedule, chunks)
    if chunks is not None:
        raise UsageError("--chunks says something of --schedule only", hint="add --schedule NAME")
    return None


def _choose(timeline: Timeline, pipeline: int | None, step: int | None) -> list[int]:
    """Return the pipelines asked for; say what there is where there is no such pipeline or step."""
    chosen = [one for one in timeline.pipelines if pipeline is None or one == pipeline]
    if not chosen:
        known = ", ".join(str(one) for one in timeline.pipelines)
        raise UsageError(
            f"there is no pipeline {pipeline}", hint=f"--pipeline takes one of: {known}"
        )
    if step is not None and step not in timeline.steps:
        known = ", ".join(str(one) for one in timeline.steps)
        raise UsageError(f"there is no step {step}", hint=f"--step takes one of: {known}")
    return chosen


def _first_step(one: PipelineFigures, step: int | None) -> int | None:
    """Return the step asked for, else the first one measured."""
    return step if step is not None or not one.windows else one.windows[0].step


def _draw(
    timeline: Timeline, one: PipelineFigures, step: int | None, waits: Sequence[Wait]
) -> list[Text]:
    """Draw a step; ranks of different runs share none."""
    if not one.one_run:
        return []
    chosen = _first_step(one, step)
    return draw_lanes(timeline, one.pipeline, chosen, drawing_width(), waits)


def _picture(
    timeline: Timeline,
    one: PipelineFigures,
    step: int | None,
    waits: Sequence[Wait],
    answer: str,
) -> str:
    if not one.one_run:
        raise UsageError("there is nothing to draw: these ranks are not of one run")
    return draw_svg(frame_step(timeline, one.pipeline, _first_step(one, step), waits), answer)


def _write_perfetto(
    timeline: Timeline, path: Path, waits: Sequence[Wait], *, force: bool, quiet: bool
) -> None:
    write_chrome(timeline, path, waits=waits, force=force)
    _say(f"{path} written; open it in https://ui.perfetto.dev", quiet=quiet)


def _say(words: str, *, quiet: bool) -> None:
    if not quiet:
        click.echo(words, err=True)
