"""`debubble plan`: every lever ranked by what it buys, ready to paste."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from debubble.cli.gates import refuse_doubted
from debubble.cli.history import check_name, opened
from debubble.cli.options import (
    SERVERS,
    STEPS,
    Manners,
    Reader,
    Verb,
    detailed_output_options,
    exit_strictly,
    force_option,
    html_option,
    output_option,
    pipeline_option,
    place_for,
    places_for,
    price_option,
    print_answer,
    progress,
    question_option,
    refuse_others,
    store_option,
    trace_options,
    typed_questions,
    write_html,
)
from debubble.cli.planning import (
    analyse_stated,
    hold_option,
    max_microbatches_option,
    server_options,
    stated_options,
)
from debubble.errors import Touch, UsageError, mask_secrets
from debubble.units import NS_PER_S, parse_duration, write_file

if TYPE_CHECKING:
    from debubble.analysis import Analysis
    from debubble.measure.worth import Tariff
    from debubble.plan.change import Hold
    from debubble.plan.emitted import Emitted
    from debubble.plan.lever import OrderSearch
    from debubble.plan.request import Stated
    from debubble.plan.server import ServerQuestion
    from debubble.report.answers.base import AnswerWarning
    from debubble.report.answers.plan import PlanAnswer


# An order of passes by itself, and what its file is called unless it is named.
_CSV, _ORDER = "csv", "order.csv"


def _read_search(text: str) -> OrderSearch:
    """Return how long to look for an order."""
    from debubble.plan.lever import OrderSearch

    rounds = int(text) if text.isdigit() else None
    seconds = parse_duration(text) / NS_PER_S if rounds is None else None
    if not (rounds or seconds):
        raise UsageError("--search needs more than no time", hint="such as --search 10s")
    return OrderSearch(seconds=seconds, rounds=rounds)


def _place_files(
    *, html: str | None, out: str | None, framework: str | None, force: bool
) -> tuple[Path | None, ...]:
    """Return the files for the report and for an order of passes, which may go into a folder."""
    if out is not None and framework is None:
        raise UsageError(
            "-o needs --emit",
            hint="add --emit FRAMEWORK",
        )
    if out is not None and Path(out).is_dir():
        out = str(Path(out) / _ORDER)
    return places_for({"--html": html, "-o": out}, force=force)


def _write_emitted(
    emitted: Emitted, order: Path | None, manners: Manners, *, force: bool = False
) -> None:
    """Print what is to be pasted, and nothing else; write the order that it names."""
    is_order = emitted.framework == _CSV
    if order is None and emitted.order_file is not None and not manners.as_json:
        order = place_for(emitted.order_file, force=force)
    if not manners.as_json and not (is_order and order is not None):
        click.echo(emitted.text, nl=False)
    if order is not None:
        text = emitted.text if is_order else emitted.order
        if text:
            write_file(order, text.encode())
        manners.say(f"{order} written" if text else f"no order is needed: {order} is not written")


def _plan_server(  # noqa: PLR0913, PLR0917 (what the verb was told)
    run: Analysis,
    question: ServerQuestion,
    tariff: Tariff | None,
    framework: str | None,
    manners: Manners,
    words: str,
    report_path: Path | None,
) -> None:
    """Rank what could be changed in a server that was captured."""
    from debubble.plan.emit import SERVERS
    from debubble.report.answers.server_plan import answer_server_plan
    from debubble.report.plan import server_plan_page

    with progress("planning", manners):
        answer = answer_server_plan(run, run.plan_server(question), framework, tariff)
    following = f"debubble history add {words} --name NAME"
    if answer.recommended is not None:
        following = f"debubble plan {words} --emit {next(iter(SERVERS))}"
    hint = "" if framework else manners.hint(following)
    page = server_plan_page(answer, hint, details=manners.details)
    if report_path is not None:
        from debubble.report.html.reports import timeline_report
        from debubble.report.html.views import pipelines_shown

        whole = server_plan_page(answer, hint)
        report = timeline_report("plan", pipelines_shown(run), whole, words)
        write_html(report, report_path, manners)
    print_answer(page, answer, manners, aside=answer.emitted is not None)
    if answer.emitted is not None:
        _refuse_doubted(answer.warnings)
        _write_emitted(answer.emitted, None, manners)
    exit_strictly(answer.warnings, manners)


def _refuse_doubted(warnings: Sequence[AnswerWarning], saved_ns: float = 0.0) -> None:
    """Write no change that rests on what is doubted by more than it saves."""
    for judged in (Touch.TIMES, Touch.MESSAGES, Touch.LAYERS):
        refuse_doubted("--emit writes nothing", warnings, judged, saved_ns)


def _following(answer: PlanAnswer, words: str, flags: str) -> str:
    """Lead on: to the change as text, to larger batches, to the run after it, or to the record."""
    if answer.emitted is not None and answer.emitted.option is not None:
        return f"debubble compare {words} AFTER"
    asked, framework_name = f"debubble plan {words} {flags}".rstrip(), answer.tellable_framework
    if framework_name is not None:
        return f"{asked} --emit {framework_name}"
    if all(option.by_replay for option in answer.options):  # find has what a replay prices
        return f"debubble find {words}"
    if answer.recommended:
        return ""
    if any(option.recommended for option in answer.options):
        return f"{asked} --hold microbatch"
    return f"debubble history add {words} --name NAME"


@click.command(
    "plan",
    cls=Verb,
    examples=(
        "debubble plan traces/ --max-microbatches 32",
        "debubble plan traces/ --emit torchtitan",
        "debubble plan traces/ --search 10s --emit csv -o order.csv",
    ),
)
@click.argument("traces", nargs=-1, required=True)
@pipeline_option
@stated_options("--schedule")
@max_microbatches_option
@hold_option("batch, in training")
@server_options
@question_option(
    "--for",
    "planned_for",
    of=(STEPS,),
    metavar="FRAMEWORK",
    help="Framework that must be able to run the options, or any.  [default: the run's]",
)
@output_option(
    "--emit", "framework", metavar="FRAMEWORK", help="Framework to write the best option for."
)
@output_option(
    "-o",
    "--out",
    of=(STEPS,),
    metavar="PATH",
    help="File for the order of passes that --emit needs.",
)
@price_option
@question_option(
    "--search",
    of=(STEPS,),
    type=_read_search,
    metavar="TIME|ROUNDS",
    help="Search for an order of passes beyond the named schedules: 10s, or 40 rounds.",
)
@output_option(
    "--save",
    of=(STEPS,),
    metavar="NAME",
    help="Name in the history for the run and its predictions.",
)
@store_option
@html_option
@force_option
@trace_options
@detailed_output_options
def command(  # noqa: PLR0913 (one argument a flag)
    *,
    traces: tuple[str, ...],
    pipeline: int | None,
    stated: Stated,
    most_microbatches: int | None,
    hold: Hold | None,
    server: ServerQuestion,
    planned_for: str | None,
    framework: str | None,
    out: str | None,
    tariff: Tariff | None,
    search: OrderSearch | None,
    save: str | None,
    store: str | None,
    html: str | None,
    force: bool,
    reader: Reader,
    manners: Manners,
) -> None:
    """Rank changes of the run of TRACES by their predicted gain."""
    from debubble.plan.emit import EMITTERS
    from debubble.plan.request import check_frameworks
    from debubble.report.answers.plan import answer_plan, predictions_of
    from debubble.report.plan import plan_page

    check_frameworks(planned_for, framework)
    report_path, order = _place_files(html=html, out=out, framework=framework, force=force)
    if save is not None:
        check_name(save)
    run = analyse_stated(
        reader,
        traces,
        manners,
        pipeline=pipeline,
        schedule=stated.schedule,
    )
    words = shlex.join(traces)
    if run.pipeline.kind == "stream":
        refuse_others(SERVERS)
        question = replace(server, layers=stated.layers)
        _plan_server(run, question, tariff, framework, manners, words, report_path)
        return
    refuse_others(STEPS)
    with progress("planning", manners) as show:
        planned = run.plan(
            stated,
            planned_for=planned_for or framework,
            hold=hold,
            most_microbatches=most_microbatches,
            search=None if search is None else replace(search, progress=show),
        )
        answer = answer_plan(
            run,
            planned,
            # Only programs read what every framework is to be told.
            frameworks=tuple(EMITTERS) if manners.as_json == "full" else (),
            emit_for=framework,
            order_file=None if order is None else str(order),
            tariff=tariff,
        )
    following = _following(answer, words, typed_questions())
    hint = manners.hint(following)
    page, whole = plan_page(answer, hint, details=manners.details), plan_page(answer, hint)
    if save is not None:
        kept = replace(run.measurement, predicted=predictions_of(answer))
        with opened(store) as history:
            history.add(save, kept, now_s=time.time(), tags={})
        typed_store = f" --store {shlex.quote(mask_secrets(store))}" if store else ""
        kept_as = f"kept as {save}: after the change, debubble compare {save} AFTER{typed_store}"
        page.notes.append(kept_as)
        whole.notes.append(kept_as)
    if report_path is not None:
        from debubble.report.html.reports import plan_report

        written = answer.emitted.text.splitlines() if answer.emitted else []
        report = plan_report(run, planned, replace(whole, lines=written), words)
        write_html(report, report_path, manners)
    print_answer(page, answer, manners, aside=answer.emitted is not None)
    if answer.emitted is not None:
        number = answer.emitted.option
        gain = 0.0 if number is None else answer.options[number].throughput_gain_fraction
        _refuse_doubted(answer.warnings, gain * (run.pipeline.batch_latency_ns or 0))
        _write_emitted(answer.emitted, order, manners, force=force)
    exit_strictly(answer.warnings, manners)
