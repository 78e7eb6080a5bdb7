"""`debubble find`: the bubble, measured, against theory."""

from __future__ import annotations

import shlex

import click

from debubble.cli.options import (
    exit_strictly,
    html_option,
    output_options,
    place_for,
    print_answer,
    write_html,
)
from debubble.cli.pictures import Found, Pictures
from debubble.cli.reading import Reader, trace_options
from debubble.errors import UsageError
from debubble.fleet.question import Question
from debubble.fleet.survey import NoPipelineIn
from debubble.ledger.hop_health import account_for
from debubble.report.find import (
    find_json,
    find_page,
    no_pipeline_json,
    no_pipeline_page,
)
from debubble.report.html.find import no_pipeline_report
from debubble.schedules import Statement, state_schedule
from debubble.timeline.job import ask_job
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
    reader: Reader,
    as_json: bool,
    strict: bool,
    color: str,
    quiet: bool,
) -> None:
    """Measure the bubble of a pipeline from TRACES of all its ranks, against theory."""
    allowed = None if fail_over is None else parse_share(fail_over)
    pictures = Pictures(
        lanes=draws,
        perfetto=perfetto,
        svg=svg,
        mermaid=mermaid,
        html=place_for(html, force=force),
        force=force,
        quiet=quiet,
    )
    pictures.check(as_json=as_json)
    statement = _statement(schedule, chunks)
    words = " ".join(shlex.quote(word) for word in traces)
    following = f"debubble plan {words}" if draws else f"debubble find {words} --timeline"
    question = Question(pipeline=pipeline, step=step, statement=statement, believes_job=True)
    try:
        found = reader.survey(traces, question, quiet=quiet)
    except NoPipelineIn as why:
        if not why.run.ranks or pictures.need_a_pipeline:
            raise
        page = no_pipeline_page(why.run, why, "" if quiet else f"debubble inspect {words}")
        if pictures.html is not None:
            write_html(no_pipeline_report(page, words), pictures.html, quiet=quiet)
        print_answer(page, no_pipeline_json(why.run, why), as_json=as_json, color=color)
        exit_strictly(tuple(page.gaps), strict=strict)
        return
    timeline, figures = found.timeline, found.figures
    job = ask_job(found.run.sidecars, found.shown)
    ledger = account_for(timeline, found.shown)
    gaps = tuple(dict.fromkeys((*found.gaps, *job.gaps, *(ledger.gaps if ledger else ()))))
    following = "" if quiet else following
    page = find_page(figures, ledger, job, gaps, following, replicas=found.replicas)
    measured = Found(
        traces=found.traces,
        timeline=timeline,
        figures=figures,
        shown=found.shown,
        ledger=ledger,
        step=step,
    )
    pictures.draw(measured, page, words)
    if not mermaid:
        data = find_json(
            found.run, timeline, figures, ledger, gaps, job=job, replicas=found.replicas
        )
        print_answer(page, data, as_json=as_json, color=color)
    exit_strictly(gaps, strict=strict)
    if allowed is not None and any((one.bubble_fraction or 0.0) > allowed for one in figures):
        raise click.exceptions.Exit(EXIT_FAILED)


def _statement(schedule: str | None, chunks: int | None) -> Statement | None:
    if schedule is not None:
        return state_schedule(schedule, chunks)
    if chunks is not None:
        raise UsageError("--chunks says something of --schedule only", hint="add --schedule NAME")
    return None
