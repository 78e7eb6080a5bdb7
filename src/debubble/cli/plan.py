"""`debubble plan`: every lever ranked by what it buys, ready to paste."""

from __future__ import annotations

import shlex
from dataclasses import replace

import click

from debubble.cli.options import (
    exit_strictly,
    html_option,
    output_options,
    place_for,
    print_answer,
    progress,
    write_html,
)
from debubble.cli.planning import Tokens, Traces, gaps_of, read_traces, start_from, state_by_name
from debubble.cli.reading import Reader, trace_options
from debubble.errors import UsageError
from debubble.ledger.ledger import Ledger, build_ledger
from debubble.ledger.verdict import find_bottleneck
from debubble.plan.cache_split import Cache
from debubble.plan.context_length import at_length
from debubble.plan.emit import EMITTERS
from debubble.plan.plan import make_plan
from debubble.report.html.plan import plan_report
from debubble.report.html.views import Shown
from debubble.report.job import latency_note
from debubble.report.ledger import say_bottleneck
from debubble.report.plan import Planned, plan_json, plan_page
from debubble.timeline.figures import PipelineFigures
from debubble.units import parse_bytes, parse_duration, parse_share


@click.command("plan")
@click.argument("traces", nargs=-1, required=True)
@click.option("--pipeline", type=int, metavar="N", help="One pipeline alone, counted from 0.")
@click.option("--schedule", metavar="NAME", help="The schedule that ran, where it is not told.")
@click.option("--layers", metavar="N,N,...", help="Layers of each stage, where they are not told.")
@click.option("--memory-limit", metavar="SIZE", help="Of each device, such as 80GiB.")
@click.option("--latency", metavar="TIME", help="Of a batch without the profiler, such as 302ms.")
@click.option(
    "--max-microbatches", type=click.IntRange(min=1), metavar="N", help="Try no more than these."
)
@click.option("--tokens", metavar="N", help="Also with these tokens a microbatch, or 2x as many.")
@click.option(
    "--tokens-measured", type=click.IntRange(min=1), metavar="N", help="Tokens in the run as it is."
)
@click.option("--also", metavar="TRACES", help="Another run of the same model, to learn from.")
@click.option(
    "--also-tokens", type=click.IntRange(min=1), metavar="N", help="Tokens in that other run."
)
@click.option(
    "--kv-bytes-per-token-layer", metavar="SIZE", help="Of a KV cache, such as 4KiB: inference."
)
@click.option(
    "--kv-utilisation", metavar="SHARE", help="Of a device, for the engine.  [default: 90%]"
)
@click.option(
    "--kv-tokens-measured",
    type=click.IntRange(min=0),
    metavar="N",
    help="Tokens whose cache the run held.  [default: 0]",
)
@click.option("--emit", "framework", metavar="FRAMEWORK", help=f"One of {', '.join(EMITTERS)}.")
@html_option
@click.option("--force", is_flag=True, help="Let --html replace a file.")
@trace_options
@output_options
def command(  # noqa: PLR0913 (one argument a flag)
    *,
    traces: tuple[str, ...],
    pipeline: int | None,
    schedule: str | None,
    layers: str | None,
    memory_limit: str | None,
    latency: str | None,
    max_microbatches: int | None,
    tokens: str | None,
    tokens_measured: int | None,
    also: str | None,
    also_tokens: int | None,
    kv_bytes_per_token_layer: str | None,
    kv_utilisation: str | None,
    kv_tokens_measured: int | None,
    framework: str | None,
    html: str | None,
    force: bool,
    reader: Reader,
    as_json: bool,
    strict: bool,
    color: str,
    quiet: bool,
) -> None:
    """Rank what could be changed in the run of TRACES by what it would buy."""
    if framework is not None and framework not in EMITTERS:
        raise UsageError(
            f"no framework is called {framework!r}", hint=f"one of {', '.join(EMITTERS)}"
        )
    picture = place_for(html, force=force)
    said = Tokens(asked=tokens, measured=tokens_measured, also=also_tokens)
    said.check()
    cache = _cache(kv_bytes_per_token_layer, kv_utilisation, kv_tokens_measured)
    latency_ns = None if latency is None else parse_duration(latency)
    if latency_ns == 0:
        raise UsageError("a batch takes some time", hint="leave --latency out, or give it: 302ms")
    limit = None if memory_limit is None else float(parse_bytes(memory_limit))
    files = Traces(
        words=traces,
        also=also,
        pipeline=pipeline,
        reader=reader,
    )
    run = read_traces(files, traces, quiet=quiet, statement=state_by_name(schedule))
    other = None if also is None else read_traces(files, (also,), quiet=quiet)
    said = said.told_by(run, other)
    with progress("planning", quiet=quiet):
        baseline = start_from(
            run,
            other,
            tokens=said,
            layers=layers,
            limit_bytes=limit,
            schedule=schedule,
            latency_ns=latency_ns,
        )
        steps = [window.step for window in run.figures.windows]
        ledger = build_ledger(run.timeline, run.figures.pipeline, steps)
        plan = make_plan(
            baseline,
            run.timeline,
            most_microbatches=max_microbatches,
            ledger=ledger,
            cache=cache,
        )
        scale = said.scale(baseline)
        length = None if scale is None else at_length(plan, scale)
    planned = Planned(
        plan=plan,
        bottleneck=_bottleneck(ledger, run.figures),
        gaps=gaps_of(run, other, baseline),
        length=length,
        tokens=said.of_run(baseline),
    )
    words = " ".join(shlex.quote(word) for word in traces)
    following = f"debubble plan {words} --emit torch" if plan.recommended else ""
    following = "" if quiet or framework else following or f"debubble find {words}"
    page = plan_page(planned, framework, following)
    if latency_ns is None and run.job.overhead_fraction is not None:
        page.notes.insert(0, latency_note(run.job))
    if picture is not None:
        shown = Shown(timeline=run.timeline, figures=run.figures, ledger=ledger)
        write_html(plan_report(plan, shown, page, words), picture, quiet=quiet)
    print_answer(page, plan_json(planned), as_json=as_json, color=color)
    exit_strictly(planned.gaps, strict=strict)


def _cache(size: str | None, utilisation: str | None, tokens: int | None) -> Cache | None:
    """Read what was said of the KV cache."""
    if size is None:
        for flag, value in {
            "--kv-utilisation": utilisation,
            "--kv-tokens-measured": tokens,
        }.items():
            if value is not None:
                raise UsageError(
                    f"{flag} says something of a KV cache, and its size is not known",
                    hint="add --kv-bytes-per-token-layer, such as 4KiB",
                )
        return None
    cache = Cache(token_layer_bytes=float(parse_bytes(size)))
    if cache.token_layer_bytes <= 0:
        raise UsageError(
            "a token takes some bytes in each layer",
            hint="KV heads x (head size + value size) x bytes of a number",
        )
    return replace(
        cache,
        utilisation=cache.utilisation if utilisation is None else parse_share(utilisation),
        measured_tokens=tokens or 0,
    )


def _bottleneck(ledger: Ledger | None, figures: PipelineFigures) -> str:
    found = find_bottleneck(ledger, figures.outside_ns) if ledger else None
    return say_bottleneck(found) if found else ""
