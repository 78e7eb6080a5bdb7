"""`debubble plan`: every lever ranked by what it buys, ready to paste."""

from __future__ import annotations

import shlex

import click

from debubble.cli.options import (
    exit_strictly,
    limits_from,
    output_options,
    print_answer,
    progress,
    trace_options,
)
from debubble.errors import UsageError
from debubble.ledger.ledger import build_ledger
from debubble.ledger.verdict import find_bottleneck
from debubble.plan.baseline import measure_baseline
from debubble.plan.emit import EMITTERS
from debubble.plan.plan import make_plan
from debubble.report.find import worst_of
from debubble.report.job import latency_note
from debubble.report.ledger import say_bottleneck
from debubble.report.plan import plan_json, plan_page
from debubble.timeline.build import build_run
from debubble.timeline.figures import PipelineFigures, measure_pipeline
from debubble.timeline.job import ask_job
from debubble.timeline.model import Timeline
from debubble.trace.run import find_run, read_run
from debubble.units import parse_bytes, parse_duration


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
@click.option("--emit", "framework", metavar="FRAMEWORK", help=f"One of {', '.join(EMITTERS)}.")
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
    framework: str | None,
    capture: str | None,
    rank: int | None,
    max_inflated: str,
    max_ratio: float,
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
    limit = None if memory_limit is None else float(parse_bytes(memory_limit))
    stated = None if layers is None else parse_layers(layers)
    limits = limits_from(max_inflated, max_ratio)
    found = find_run(traces, capture=capture, limits=limits)
    with progress("reading", quiet=quiet) as show:
        run = read_run(found, limits=limits, rank=rank, on_progress=show)
    timeline = build_run(run)
    figures = choose_figures(timeline, pipeline)
    job = ask_job(run.sidecars, figures)
    known = None if latency is None else round(parse_duration(latency))
    with progress("planning", quiet=quiet):
        baseline = measure_baseline(
            timeline,
            figures,
            layers=stated or job.split_for(figures),
            limit_bytes=limit,
            schedule=schedule or job.schedule_for(figures),
            latency_ns=known or job.without_profiler_ns(figures.batch_latency_ns),
        )
        plan = make_plan(baseline, timeline, most_microbatches=max_microbatches)
    gaps = tuple(dict.fromkeys((*run.gaps, *timeline.gaps, *figures.gaps, *job.gaps)))
    bottleneck = _bottleneck(timeline, figures)
    words = " ".join(shlex.quote(word) for word in traces)
    following = f"debubble plan {words} --emit torch" if plan.recommended else ""
    following = "" if quiet or framework else following or f"debubble find {words}"
    page = plan_page(plan, bottleneck, gaps, framework, following)
    if known is None and job.overhead_fraction is not None:
        page.notes.insert(0, latency_note(job))
    print_answer(page, plan_json(plan, bottleneck, gaps), as_json=as_json, color=color)
    exit_strictly(gaps, strict=strict)


def parse_layers(text: str) -> tuple[int, ...]:
    """Read `4,4,4,4`."""
    try:
        layers = tuple(int(part) for part in text.split(","))
    except ValueError:
        layers = ()
    if not layers or min(layers) < 1:
        raise UsageError(f"{text!r} is no split", hint="write it as 4,4,4,4: layers of each stage")
    return layers


def choose_figures(timeline: Timeline, pipeline: int | None) -> PipelineFigures:
    """Measure the pipeline asked for, or the one that waits most."""
    known = timeline.pipelines
    if pipeline is not None and pipeline not in known:
        raise UsageError(
            f"there is no pipeline {pipeline}",
            hint=f"--pipeline takes one of: {', '.join(map(str, known))}",
        )
    chosen = known if pipeline is None else (pipeline,)
    return worst_of([measure_pipeline(timeline, one) for one in chosen])


def _bottleneck(timeline: Timeline, figures: PipelineFigures) -> str:
    ledger = build_ledger(timeline, figures.pipeline, [window.step for window in figures.windows])
    found = find_bottleneck(ledger, figures.outside_ns) if ledger else None
    return say_bottleneck(found) if found else ""
