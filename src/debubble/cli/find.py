"""`debubble find`: the bubble, measured, against theory."""

from __future__ import annotations

import shlex

import click

from debubble.cli.gates import judge_bubbles, refuse_to_judge
from debubble.cli.options import Manners, exit_strictly, output_options, print_answer
from debubble.cli.pictures import Found, Pictures, picture_options
from debubble.cli.reading import Reader, trace_options
from debubble.errors import UsageError
from debubble.fleet.question import Question
from debubble.fleet.survey import NoPipelineIn, Survey
from debubble.ledger.hop_health import account_for, judge_links
from debubble.report.find import find_page, no_pipeline_page
from debubble.report.find_json import find_json, no_pipeline_json
from debubble.schedules import Statement, state_schedule
from debubble.timeline.job import ask_job
from debubble.units import parse_share


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
    fail_over: str | None,
    pictures: Pictures,
    reader: Reader,
    manners: Manners,
) -> None:
    """Measure the bubble of a pipeline from TRACES of all its ranks, against theory."""
    allowed = None if fail_over is None else parse_share(fail_over)
    pictures.check(as_json=manners.as_json)
    statement = _statement(schedule, chunks)
    question = Question(pipeline=pipeline, step=step, statement=statement, believes_job=True)
    words = shlex.join(traces)
    try:
        found = reader.survey(traces, question, quiet=manners.quiet)
    except NoPipelineIn as why:
        if not why.run.ranks or pictures.need_a_pipeline:
            raise
        _answer_without_pipeline(why, words, pictures, manners)
        if allowed is not None:
            refuse_to_judge("--fail-over", why.message, why.hint)
        return
    _answer(found, step, words, pictures, manners)
    if allowed is not None:
        judge_bubbles(found.figures, allowed)


def _answer_without_pipeline(
    why: NoPipelineIn, words: str, pictures: Pictures, manners: Manners
) -> None:
    """Say that there is no pipeline, and what holds without one."""
    page = no_pipeline_page(why.run, why, "" if manners.quiet else f"debubble inspect {words}")
    pictures.report_no_pipeline(page, words, quiet=manners.quiet)
    print_answer(page, no_pipeline_json(why.run, why), manners)
    exit_strictly(tuple(page.gaps), manners)


def _answer(
    found: Survey, step: int | None, words: str, pictures: Pictures, manners: Manners
) -> None:
    """Say what the bubble is and where it comes from; draw what was asked for."""
    timeline, figures = found.timeline, found.figures
    job = ask_job(found.run.sidecars, found.shown)
    ledger = account_for(timeline, found.shown)
    gaps = tuple(dict.fromkeys((*found.gaps, *job.gaps, *(ledger.gaps if ledger else ()))))
    following = f"debubble plan {words}" if pictures.lanes else f"debubble find {words} --timeline"
    following = "" if manners.quiet else following
    page = find_page(figures, ledger, job, gaps, following, replicas=found.replicas)
    measured = Found(
        traces=found.traces,
        timeline=timeline,
        figures=figures,
        shown=found.shown,
        ledger=ledger,
        step=step,
    )
    pictures.draw(measured, page, words, quiet=manners.quiet)
    if not pictures.mermaid:
        links = ledger.links if ledger else judge_links(timeline, found.shown)
        data = find_json(
            found.run,
            timeline,
            figures,
            ledger,
            gaps,
            job=job,
            links=links,
            replicas=found.replicas,
        )
        print_answer(page, data, manners)
    exit_strictly(gaps, manners)


def _statement(schedule: str | None, chunks: int | None) -> Statement | None:
    if schedule is not None:
        return state_schedule(schedule, chunks)
    if chunks is not None:
        raise UsageError("--chunks says something of --schedule only", hint="add --schedule NAME")
    return None
