"""`debubble find`: the bubble, measured, against theory."""

from __future__ import annotations

import shlex

import click

from debubble.analysis import Analysis
from debubble.answers.find import FindAnswer, answer_find
from debubble.answers.inspect import answer_ranks
from debubble.answers.no_pipeline import answer_no_pipeline
from debubble.cli.gates import judge_bubbles, refuse_to_judge
from debubble.cli.options import Manners, exit_strictly, output_options, print_answer
from debubble.cli.pictures import Pictures, picture_options
from debubble.cli.reading import Reader, trace_options
from debubble.errors import UsageError
from debubble.fleet.survey import NoPipelineIn, Question
from debubble.report.find import find_page, no_pipeline_page
from debubble.report.inspect import rank_table
from debubble.schedules import state_schedule
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
    if schedule is None and chunks is not None:
        raise UsageError("--chunks says something of --schedule only", hint="add --schedule NAME")
    statement = None if schedule is None else state_schedule(schedule, chunks)
    question = Question(pipeline=pipeline, step=step, statement=statement)
    words = shlex.join(traces)
    try:
        analysis = reader.analyse(traces, question, quiet=manners.quiet)
    except NoPipelineIn as why:
        if not why.run.ranks or pictures.need_a_pipeline:
            raise
        found = answer_no_pipeline(why)
        following = "" if manners.quiet else f"debubble inspect {words}"
        page = no_pipeline_page(found, rank_table(answer_ranks(why.run)), following)
        pictures.report_no_pipeline(page, words, quiet=manners.quiet)
        print_answer(page, found, manners)
        exit_strictly(found.warnings, manners)
        if allowed is not None:
            refuse_to_judge("--fail-over", why.message, why.hint)
        return
    answer = answer_find(analysis)
    page = find_page(answer, "" if manners.quiet else _following(analysis, answer, words))
    pictures.draw(analysis, page, words, quiet=manners.quiet)
    if not pictures.mermaid:
        print_answer(page, answer, manners)
    exit_strictly(answer.warnings, manners)
    if allowed is not None:
        judge_bubbles(analysis.pipelines, allowed)


def _following(analysis: Analysis, answer: FindAnswer, words: str) -> str:
    """Lead on: to the wires where these are slow, else to what could be changed."""
    if any(hop.verdict == "slow" for hop in answer.hops):
        return f"debubble links {words}"
    if analysis.ledger is None:
        return f"debubble find {words} --timeline"
    return f"debubble plan {words}"
