"""`debubble find`: the bubble, measured, against theory."""

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
from debubble.report.find import find_json, find_page
from debubble.timeline.build import build_timeline
from debubble.timeline.figures import measure_pipeline
from debubble.trace.run import find_run, read_run
from debubble.units import parse_share

EXIT_FAILED = 1


@click.command("find")
@click.argument("traces", nargs=-1, required=True)
@click.option("--step", type=int, metavar="N", help="One step alone, by the profiler's number.")
@click.option("--pipeline", type=int, metavar="N", help="One pipeline alone, counted from 0.")
@click.option(
    "--fail-over", metavar="SHARE", help="Exit with 1 when the bubble is larger, such as 20%."
)
@trace_options
@output_options
def command(  # noqa: PLR0913 (one argument a flag)
    *,
    traces: tuple[str, ...],
    step: int | None,
    pipeline: int | None,
    fail_over: str | None,
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
    found = find_run(traces, capture=capture, limits=limits)
    with progress("reading", quiet=quiet) as show:
        run = read_run(found, limits=limits, rank=rank, on_progress=show)
    timeline = build_timeline(run.ranks)
    chosen = [one for one in timeline.pipelines if pipeline is None or one == pipeline]
    if not chosen:
        known = ", ".join(str(one) for one in timeline.pipelines)
        raise UsageError(
            f"there is no pipeline {pipeline}", hint=f"--pipeline takes one of: {known}"
        )
    if step is not None and step not in timeline.steps:
        known = ", ".join(str(one) for one in timeline.steps)
        raise UsageError(f"there is no step {step}", hint=f"--step takes one of: {known}")
    figures = [measure_pipeline(timeline, one, step) for one in chosen]
    gaps = (*run.gaps, *timeline.gaps, *(gap for one in figures for gap in one.gaps))
    words = " ".join(shlex.quote(word) for word in traces)
    page = find_page(figures, gaps, "" if quiet else f"debubble inspect {words}")
    print_answer(page, find_json(run, timeline, figures, gaps), as_json=as_json, color=color)
    exit_strictly(gaps, strict=strict)
    if allowed is not None and any((one.bubble_fraction or 0.0) > allowed for one in figures):
        raise click.exceptions.Exit(EXIT_FAILED)
