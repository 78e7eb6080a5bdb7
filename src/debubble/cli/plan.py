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
    Manners,
    Reader,
    exit_strictly,
    gathered,
    html_option,
    output_options,
    place_for,
    print_answer,
    progress,
    refuse_same_place,
    tariff_options,
    trace_options,
    typed,
    typed_flags,
    write_html,
)
from debubble.cli.planning import (
    ServerOptions,
    Traces,
    analyse_both,
    communication_option,
    parse_layers,
    refuse_for_steps,
    refuse_for_streams,
    server_options,
    token_options,
)
from debubble.errors import Touch, UsageError, mask_secrets
from debubble.units import (
    NS_PER_S,
    parse_bytes,
    parse_duration,
    parse_memory,
    parse_rate,
    parse_share,
    write_file,
)

if TYPE_CHECKING:
    from debubble.analysis import Analysis
    from debubble.measure.worth import Tariff
    from debubble.plan.change import Hold
    from debubble.plan.kv_cache import Cache
    from debubble.plan.order_search import OrderSearch
    from debubble.plan.request import Tokens
    from debubble.report.answers.base import AnswerWarning
    from debubble.report.answers.plan import EmitPart, PlanAnswer
    from debubble.serving.question import ServerQuestion


# An order of passes by itself, and what its file is called unless it is named.
_CSV, _ORDER = "csv", "order.csv"
# What decides which option is first: asked again without it, another one might be written.
_DECIDING = (
    *("--pipeline", "--schedule", "--communication", "--layers", "--memory-limit", "--latency"),
    *("--max-microbatches", "--hold", "--for"),
    *("--search", "--search-rounds", "--offload-rate"),
)
# What is only for runs with steps.
_OF_STEPS = (
    *("--schedule", "--communication", "--memory-limit", "--latency", "--max-microbatches"),
    *("--hold", "--tokens", "--also", "--kv-bytes-per-token-layer", "--for", "-o", "--save"),
    *("--search", "--search-rounds", "--offload-rate"),
)


def _read_cache(
    *,
    kv_bytes_per_token_layer: str | None,
    kv_utilisation: str | None,
    kv_tokens_measured: int | None,
) -> Cache | None:
    """Return the KV cache that layers are split around; None where none was spoken of."""
    from debubble.plan.kv_cache import USUAL_UTILISATION, Cache

    if kv_bytes_per_token_layer is None:
        details = {"--kv-utilisation": kv_utilisation, "--kv-tokens-measured": kv_tokens_measured}
        for flag, value in details.items():
            if value is not None:
                raise UsageError(
                    f"{flag} says something of a KV cache, and its size is not known",
                    hint="add --kv-bytes-per-token-layer, such as 4KiB",
                )
        return None
    token_layer_bytes = float(parse_bytes(kv_bytes_per_token_layer))
    if token_layer_bytes <= 0:
        raise UsageError(
            "a token takes some bytes in each layer",
            hint="KV heads x (head size + value size) x bytes of a number",
        )
    return Cache(
        token_layer_bytes=token_layer_bytes,
        utilisation=USUAL_UTILISATION if kv_utilisation is None else parse_share(kv_utilisation),
        measured_tokens=kv_tokens_measured or 0,
    )


_cache_options = gathered(
    "cache",
    _read_cache,
    click.option(
        "--kv-bytes-per-token-layer", metavar="SIZE", help="Of a KV cache, such as 4KiB: inference."
    ),
    click.option(
        "--kv-utilisation", metavar="SHARE", help="Of a device, for the engine.  [default: 90%]"
    ),
    click.option(
        "--kv-tokens-measured",
        type=click.IntRange(min=0),
        metavar="N",
        help="Tokens whose cache the run held.  [default: 0]",
    ),
)


def _place_of_order(output: str | None, framework: str | None, *, force: bool) -> Path | None:
    """Return the file for an order of passes: as named, or in the folder that was named."""
    if output is not None and framework is None:
        raise UsageError(
            "-o says where --emit writes an order, and nothing is to be written",
            hint="add --emit FRAMEWORK",
        )
    if output is not None and Path(output).is_dir():
        output = str(Path(output) / _ORDER)
    return place_for(output, force=force)


def _read_search(time: str | None, rounds: int | None, offload: str | None) -> OrderSearch | None:
    """Return how long to look for an order; None where nobody asked for one."""
    from debubble.plan.order_search import OrderSearch

    if time is None and rounds is None:
        if offload is not None:
            raise UsageError(
                "--offload-rate is about a search for an order, and none was asked for",
                hint="add --search 10s",
            )
        return None
    seconds = None if time is None else parse_duration(time) / NS_PER_S
    if seconds == 0:
        raise UsageError("a search takes some time", hint="write --search 10s")
    rate = None if offload is None else parse_rate(offload)
    return OrderSearch(seconds=seconds, rounds=rounds, offload_bytes_per_s=rate)


def _write_emitted(emitted: EmitPart, order: Path | None, manners: Manners) -> None:
    """Print what is to be pasted, and nothing else; write the order that it needs."""
    is_order = emitted.framework == _CSV
    if not manners.as_json and not (is_order and order is not None):
        click.echo(emitted.text, nl=False)
    if order is None and emitted.order_file is not None and not manners.quiet:
        click.echo(
            f"{emitted.order_file} is needed, too: -o {emitted.order_file} writes it", err=True
        )
    elif order is not None:
        text = emitted.text if is_order else emitted.order
        if text:
            write_file(order, text.encode())
        said = f"{order} written" if text else f"no order is needed: {order} is not written"
        if not manners.quiet:
            click.echo(said, err=True)


def _plan_server(  # noqa: PLR0913, PLR0917 (what the verb was told)
    run: Analysis,
    question: ServerQuestion,
    tariff: Tariff,
    framework: str | None,
    manners: Manners,
    words: str,
    picture: Path | None,
) -> None:
    """Rank what could be changed in a server that was captured."""
    from debubble.plan.emit import SERVERS
    from debubble.report.answers.server_plan import answer_server_plan
    from debubble.report.html.plan import server_plan_report
    from debubble.report.html.views import pipelines_shown
    from debubble.report.plan import server_plan_page

    with progress("planning", quiet=manners.quiet):
        answer = answer_server_plan(run, question, framework, tariff)
    following = f"debubble history add {words} --name NAME"
    if answer.recommended is not None:
        following = f"debubble plan {words} --emit {next(iter(SERVERS))}"
    page = server_plan_page(answer, "" if manners.quiet or framework else following)
    if picture is not None:
        report = server_plan_report(answer, pipelines_shown(run), page, words)
        write_html(report, picture, quiet=manners.quiet)
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
    asked, told = f"debubble plan {words} {flags}".rstrip(), answer.tellable_framework
    if told is not None:
        return f"{asked} --emit {told}"
    if all(option.by_replay for option in answer.options):  # find has what a replay prices
        return f"debubble find {words}"
    if answer.recommended:
        return ""
    if any(option.recommended for option in answer.options):
        return f"{asked} --hold microbatch"
    return f"debubble history add {words} --name NAME"


@click.command("plan")
@click.argument("traces", nargs=-1, required=True)
@click.option("--pipeline", type=int, metavar="N", help="One pipeline alone, counted from 0.")
@click.option("--schedule", metavar="NAME", help="The schedule that ran, where it is not told.")
@communication_option("How its messages travel.  [default: the way that fits the run]")
@click.option("--layers", metavar="N,N,...", help="Layers of each stage, where they are not told.")
@click.option("--memory-limit", metavar="SIZE", help="Of each rank, such as 80GiB.")
@click.option("--latency", metavar="TIME", help="Of a batch without the profiler, such as 302ms.")
@click.option(
    "--max-microbatches", type=click.IntRange(min=1), metavar="N", help="Try no more than these."
)
@click.option(
    "--hold",
    type=click.Choice(["microbatch", "batch"]),
    help="What keeps its size when microbatches change.  [default: the batch, in training]",
)
@token_options("Also with these tokens a microbatch, or 2x as many.")
@_cache_options
@server_options
@click.option(
    "--for",
    "planned_for",
    metavar="FRAMEWORK",
    help="Only what it can be told, or any.  [default: the run's own]",
)
@click.option("--emit", "framework", metavar="FRAMEWORK", help="Write the best option for it.")
@click.option(
    "-o", "--output", metavar="PATH", help="Where --emit writes an order, if it needs one."
)
@tariff_options
@click.option(
    "--search",
    metavar="TIME",
    help="Look so long for an order of passes that has no name, such as 10s.",
)
@click.option(
    "--search-rounds",
    type=click.IntRange(min=1),
    metavar="N",
    help="The same by rounds, alike on any machine.",
)
@click.option(
    "--offload-rate",
    metavar="RATE",
    help="Let the search offload activations to the host, at such as 20GB/s.",
)
@click.option("--save", metavar="NAME", help="Keep the run and what is predicted, in the history.")
@click.option("--store", metavar="URL", help="The history: sqlite:///… or postgresql://…")
@html_option
@click.option("--force", is_flag=True, help="Let --html and -o replace a file.")
@trace_options
@output_options
def command(  # noqa: PLR0913, PLR0915 (one argument a flag)
    *,
    traces: tuple[str, ...],
    pipeline: int | None,
    schedule: str | None,
    communication: str | None,
    layers: str | None,
    memory_limit: str | None,
    latency: str | None,
    max_microbatches: int | None,
    hold: Hold | None,
    tokens: Tokens,
    also: str | None,
    cache: Cache | None,
    server: ServerOptions,
    planned_for: str | None,
    framework: str | None,
    output: str | None,
    tariff: Tariff,
    search: str | None,
    search_rounds: int | None,
    offload_rate: str | None,
    save: str | None,
    store: str | None,
    html: str | None,
    force: bool,
    reader: Reader,
    manners: Manners,
) -> None:
    """Rank what could be changed in the run of TRACES by what it would buy."""
    from debubble.plan.emit import EMITTERS
    from debubble.plan.request import PlanRequest, Stated, check_frameworks
    from debubble.report.answers.plan import answer_plan, predictions_of
    from debubble.report.html.plan import plan_report, planned_view
    from debubble.report.html.views import PipelineView
    from debubble.report.plan import plan_page

    check_frameworks(planned_for, framework)
    picture, order = place_for(html, force=force), _place_of_order(output, framework, force=force)
    refuse_same_place({"--html": html, "-o": str(order) if order else None})
    tokens.check(has_also=also is not None)
    if save is not None:
        check_name(save)
    looks = _read_search(search, search_rounds, offload_rate)
    split = parse_layers(layers)
    limit_bytes = None if memory_limit is None else float(parse_memory(memory_limit))
    latency_ns = None if latency is None else parse_duration(latency)
    if latency_ns == 0:
        raise UsageError("a batch takes some time", hint="leave --latency out, or give it: 302ms")
    files = Traces(
        words=traces,
        also=also,
        pipeline=pipeline,
        reader=reader,
        in_flight=server.in_flight_measured,
    )
    run, other = analyse_both(files, schedule, quiet=manners.quiet)
    if run.pipeline.kind == "stream":
        refuse_for_streams(_OF_STEPS)
        asked = server.asks(layers=split)
        _plan_server(run, asked, tariff, framework, manners, shlex.join(traces), picture)
        return
    refuse_for_steps()
    with progress("planning", quiet=manners.quiet) as show:
        request = PlanRequest(
            stated=Stated(
                tokens=tokens,
                layers=split,
                limit_bytes=limit_bytes,
                schedule=schedule,
                communication=communication,
                latency_ns=latency_ns,
            ),
            most_microbatches=max_microbatches,
            hold=hold,
            cache=cache,
            planned_for=planned_for or framework,
            search=None if looks is None else replace(looks, progress=show),
        )
        planned = run.plan(request, other)
        answer = answer_plan(
            run,
            planned,
            other,
            # Only programs read what every framework is to be told.
            frameworks=tuple(EMITTERS) if manners.as_json == "full" else (),
            emit_for=framework,
            order_file=None if order is None else str(order),
            tariff=tariff,
        )
    words = shlex.join(traces)
    following = _following(answer, words, typed(typed_flags(_DECIDING)))
    page = plan_page(answer, "" if manners.quiet else following)
    if save is not None:
        kept = replace(run.measurement, predicted=predictions_of(answer))
        with opened(store) as history:
            history.add(save, kept, now_s=time.time(), tags={})
        typed_store = f" --store {shlex.quote(mask_secrets(store))}" if store else ""
        page.notes.append(
            f"kept as {save}: debubble compare {save} AFTER{typed_store} tells what came of it"
        )
    if picture is not None:
        shown = PipelineView(timeline=run.timeline, figures=run.pipeline, ledger=run.ledger)
        written = answer.emitted.text.splitlines() if answer.emitted else []
        full = replace(page, lines=written)
        report = plan_report(answer, shown, planned_view(planned.plan), full, words)
        write_html(report, picture, quiet=manners.quiet)
    print_answer(page, answer, manners, aside=answer.emitted is not None)
    if answer.emitted is not None:
        number = answer.emitted.option
        gain = 0.0 if number is None else answer.options[number].throughput_gain_fraction
        _refuse_doubted(answer.warnings, gain * (run.pipeline.batch_latency_ns or 0))
        _write_emitted(answer.emitted, order, manners)
    exit_strictly(answer.warnings, manners)
