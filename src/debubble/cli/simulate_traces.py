"""`debubble simulate TRACES`: a measured run, with one thing changed or several."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace

from debubble.cli.options import (
    Manners,
    drawing_width,
    exit_strictly,
    print_answer,
    progress,
    typed,
)
from debubble.cli.plan import choose_figures, parse_layers
from debubble.cli.what_if import Said, token_scale, what_to_ask
from debubble.errors import Gap, UsageError
from debubble.plan.ask import ask
from debubble.plan.baseline import AlsoRun, Baseline, measure_baseline
from debubble.report.job import latency_note
from debubble.report.lanes import draw_lanes
from debubble.report.what_if import Reported, what_if_json, what_if_page
from debubble.timeline.build import build_run
from debubble.timeline.figures import PipelineFigures
from debubble.timeline.job import JobFacts, ask_job
from debubble.timeline.model import Timeline
from debubble.trace.run import find_run, read_run
from debubble.trace.source import Limits
from debubble.units import parse_bytes

__all__ = ["Said", "Traces", "simulate_traces"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Traces:
    """Which files to read."""

    words: tuple[str, ...]
    also: str | None
    pipeline: int | None
    capture: str | None
    rank: int | None
    limits: Limits


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measured:
    timeline: Timeline
    figures: PipelineFigures
    job: JobFacts
    gaps: tuple[Gap, ...]

    @property
    def tokens(self) -> int | None:
        """Of a microbatch, where the job said so."""
        return self.job.tokens_of_microbatch(self.figures.microbatches)


def simulate_traces(files: Traces, said: Said, manners: Manners, *, draws: bool) -> None:
    """Measure the run, change it, and say what it would take."""
    run = _measure(files, files.words, manners)
    also = None if files.also is None else _measure(files, (files.also,), manners)
    said = replace(
        said,
        tokens_measured=said.tokens_measured or run.tokens,
        also_tokens=said.also_tokens or (also.tokens if also else None),
    )
    with progress("simulating", quiet=manners.quiet):
        baseline = _baseline(run, also, said)
        asked = ask(baseline, what_to_ask(baseline, run.timeline, said))
    gaps = (*run.gaps, *(also.gaps if also else ()))
    gaps = tuple(dict.fromkeys((*gaps, *(baseline.pooled.gaps if baseline.pooled else ()))))
    report = Reported(
        asked=asked,
        measured=run.figures,
        tokens=said.measured_tokens(baseline),
        hops=said.hops,
        gaps=gaps,
    )
    quiet = manners.quiet or draws
    page = what_if_page(report, "" if quiet else _again(files, said))
    if run.job.overhead_fraction is not None:
        page.notes.insert(0, latency_note(run.job))
    if draws:
        page.drawing = draw_lanes(asked.draw(), 0, None, drawing_width())
    print_answer(page, what_if_json(report), as_json=manners.as_json, color=manners.color)
    exit_strictly(gaps, strict=manners.strict)


def _measure(files: Traces, words: tuple[str, ...], manners: Manners) -> _Measured:
    found = find_run(words, capture=files.capture, limits=files.limits)
    with progress("reading", quiet=manners.quiet) as show:
        run = read_run(found, limits=files.limits, rank=files.rank, on_progress=show)
    timeline = build_run(run)
    figures = choose_figures(timeline, files.pipeline)
    job = ask_job(run.sidecars, figures)
    return _Measured(
        timeline=timeline,
        figures=figures,
        job=job,
        gaps=(*run.gaps, *timeline.gaps, *figures.gaps, *job.gaps),
    )


def _baseline(run: _Measured, also: _Measured | None, said: Said) -> Baseline:
    schedule = said.schedule_measured or run.job.schedule_for(run.figures)
    if run.figures.windows and run.figures.schedule is None and schedule is None:
        raise UsageError(
            "the schedule that ran was not recognised",
            hint="say it with --schedule-measured, such as 1f1b",
        )
    token_scale(said, None)  # refuses what is no number, before anything long
    layers = None if said.layers is None else parse_layers(said.layers)
    other = None
    if also is not None:
        ratio = None
        if said.also_tokens and said.tokens_measured:
            ratio = said.also_tokens / said.tokens_measured
        told = any(rank.layers for rank in also.figures.ranks)
        other = AlsoRun(
            timeline=also.timeline,
            figures=also.figures,
            layers=None if told else layers or also.job.split_for(also.figures),
            token_ratio=ratio,
        )
    return measure_baseline(
        run.timeline,
        run.figures,
        layers=layers or run.job.split_for(run.figures),
        limit_bytes=None if said.memory_limit is None else float(parse_bytes(said.memory_limit)),
        schedule=schedule,
        latency_ns=run.job.without_profiler_ns(run.figures.batch_latency_ns),
        also=other,
    )


def _again(files: Traces, said: Said) -> str:
    words = " ".join(shlex.quote(word) for word in files.words)
    flags = typed(
        {
            "--microbatches": said.microbatches,
            "--hold": said.hold,
            "--schedule": said.schedule,
            "--chunks": said.chunks,
            "--split": said.split,
            "--overlap": said.overlap,
            "--tokens": said.tokens,
            "--tokens-measured": said.tokens_measured,
            "--also": files.also,
            "--also-tokens": said.also_tokens,
            "--layers": said.layers,
            "--schedule-measured": said.schedule_measured,
            "--memory-limit": said.memory_limit,
            "--pipeline": files.pipeline,
            "--capture": files.capture,
        }
    )
    hops = "".join(f" --hop {shlex.quote(hop)}" for hop in said.hops)
    return f"debubble simulate {words}{' ' if flags else ''}{flags}{hops} --timeline"
