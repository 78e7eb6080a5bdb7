"""`debubble plan`: every lever ranked by what it buys, ready to paste."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

import click

from debubble.cli.cache_options import CacheSaid, cache_options
from debubble.cli.options import (
    Manners,
    exit_strictly,
    html_option,
    output_options,
    place_for,
    print_answer,
    progress,
    write_html,
)
from debubble.cli.planning import Measured, Traces, gaps_of, read_both, start_from
from debubble.cli.reading import Reader, trace_options
from debubble.cli.tokens import Tokens, token_options
from debubble.errors import UsageError
from debubble.ledger.hop_health import account_for
from debubble.ledger.ledger import Ledger
from debubble.ledger.verdict import find_bottleneck
from debubble.plan.context_length import at_length
from debubble.plan.emit import EMITTERS, can_emit
from debubble.plan.kv_cache import Cache
from debubble.plan.plan import make_plan
from debubble.plan.schedule import runnable_by
from debubble.report.html.plan import plan_report
from debubble.report.html.views import Shown
from debubble.report.job import latency_note
from debubble.report.ledger import say_bottleneck
from debubble.report.plan import Planned, plan_json, plan_page
from debubble.timeline.figures import PipelineFigures
from debubble.units import parse_bytes, parse_duration


@click.command("plan")
@click.argument("traces", nargs=-1, required=True)
@click.option("--pipeline", type=int, metavar="N", help="One pipeline alone, counted from 0.")
@click.option("--schedule", metavar="NAME", help="The schedule that ran, where it is not told.")
@click.option("--layers", metavar="N,N,...", help="Layers of each stage, where they are not told.")
@click.option("--memory-limit", metavar="SIZE", help="Of each rank, such as 80GiB.")
@click.option("--latency", metavar="TIME", help="Of a batch without the profiler, such as 302ms.")
@click.option(
    "--max-microbatches", type=click.IntRange(min=1), metavar="N", help="Try no more than these."
)
@token_options("Also with these tokens a microbatch, or 2x as many.")
@cache_options
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
    tokens: Tokens,
    also: str | None,
    cache_said: CacheSaid,
    framework: str | None,
    html: str | None,
    force: bool,
    reader: Reader,
    manners: Manners,
) -> None:
    """Rank what could be changed in the run of TRACES by what it would buy."""
    _refuse_unknown(framework)
    picture = place_for(html, force=force)
    tokens.check(also)
    wanted = _Wanted(
        cache=cache_said.read(),
        latency_ns=_read_latency(latency),
        limit_bytes=None if memory_limit is None else float(parse_bytes(memory_limit)),
        layers=layers,
        schedule=schedule,
        max_microbatches=max_microbatches,
    )
    files = Traces(words=traces, also=also, pipeline=pipeline, reader=reader)
    run, other = read_both(files, schedule, quiet=manners.quiet)
    with progress("planning", quiet=manners.quiet):
        planned, ledger = _plan(run, other, tokens, wanted)
    words = shlex.join(traces)
    page = plan_page(planned, framework, _following(planned, words, framework, manners))
    if wanted.latency_ns is None and run.job.overhead_fraction is not None:
        page.notes.insert(0, latency_note(run.job))
    if picture is not None:
        shown = Shown(timeline=run.timeline, figures=run.figures, ledger=ledger)
        write_html(plan_report(planned.plan, shown, page, words), picture, quiet=manners.quiet)
    print_answer(page, plan_json(planned), manners)
    exit_strictly(planned.gaps, manners)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wanted:
    """What was said of the run and of the plan; None where nothing was."""

    cache: Cache | None
    latency_ns: float | None
    limit_bytes: float | None
    layers: str | None
    schedule: str | None
    max_microbatches: int | None


def _refuse_unknown(framework: str | None) -> None:
    if framework is not None and framework not in EMITTERS:
        raise UsageError(
            f"no framework is called {framework!r}", hint=f"one of {', '.join(EMITTERS)}"
        )


def _read_latency(text: str | None) -> float | None:
    latency_ns = None if text is None else parse_duration(text)
    if latency_ns == 0:
        raise UsageError("a batch takes some time", hint="leave --latency out, or give it: 302ms")
    return latency_ns


def _plan(
    run: Measured, other: Measured | None, tokens: Tokens, wanted: _Wanted
) -> tuple[Planned, Ledger | None]:
    """Fit the run, account for it, and rank what could be changed."""
    tokens = tokens.told_by(run.tokens, other.tokens if other else None)
    baseline = start_from(
        run,
        other,
        tokens=tokens,
        layers=wanted.layers,
        limit_bytes=wanted.limit_bytes,
        schedule=wanted.schedule,
        latency_ns=wanted.latency_ns,
    )
    ledger = account_for(run.timeline, run.figures)
    plan = make_plan(
        baseline,
        run.timeline,
        most_microbatches=wanted.max_microbatches,
        links=ledger.links if ledger else None,
        cache=wanted.cache,
        allowed=runnable_by(baseline.framework),
    )
    scale = tokens.scale(baseline)
    planned = Planned(
        plan=plan,
        bottleneck=_bottleneck(ledger, run.figures),
        gaps=gaps_of(run, other, baseline),
        length=None if scale is None else at_length(plan, scale),
        tokens=tokens.of_run(baseline),
    )
    return planned, ledger


def _following(planned: Planned, words: str, framework: str | None, manners: Manners) -> str:
    """Name what to type next."""
    if manners.quiet or framework:
        return ""
    if not planned.plan.recommended:
        return f"debubble find {words}"
    best, setting = planned.plan.recommended[0].change, planned.plan.baseline.setting
    whose = planned.plan.baseline.framework or "torch"
    tellable = [one for one in (whose, *EMITTERS) if can_emit(one, best, setting)]
    return f"debubble plan {words} --emit {tellable[0]}" if tellable else ""


def _bottleneck(ledger: Ledger | None, figures: PipelineFigures) -> str:
    found = find_bottleneck(ledger, figures.outside_ns) if ledger else None
    return say_bottleneck(found) if found else ""
