"""`debubble simulate TRACES`: a measured run, with one thing changed or several."""

from __future__ import annotations

import shlex
from dataclasses import replace

from debubble.analysis import Analysis
from debubble.cli.options import (
    Manners,
    drawing_width,
    exit_strictly,
    print_answer,
    progress,
    typed,
)
from debubble.cli.planning import Traces, analyse_both, start_from, warnings_of
from debubble.cli.what_if import Said, what_to_ask
from debubble.errors import UsageError
from debubble.plan.ask import ask
from debubble.plan.baseline import Baseline
from debubble.report.job import latency_note
from debubble.report.lanes import draw_lanes
from debubble.report.what_if import Reported, what_if_json, what_if_page
from debubble.units import parse_bytes


def simulate_traces(files: Traces, said: Said, manners: Manners, *, draws: bool) -> None:
    """Measure the run, change it, and say what it would take."""
    said.tokens.check(files.also)
    run, also = analyse_both(files, said.schedule_measured, quiet=manners.quiet)
    said = replace(said, tokens=said.tokens.told_by(run.tokens, also.tokens if also else None))
    with progress("simulating", quiet=manners.quiet):
        baseline = _baseline(run, also, said)
        asked = ask(baseline, what_to_ask(baseline, run.timeline, said))
    gaps = warnings_of(run, also, baseline)
    report = Reported(
        asked=asked,
        measured=run,
        tokens=said.tokens.of_run(baseline),
        hops=said.hops,
        gaps=gaps,
    )
    quiet = manners.quiet or draws
    page = what_if_page(report, "" if quiet else _again(files, said))
    if run.job.overhead_fraction is not None:
        page.notes.insert(0, latency_note(run.job))
    if draws:
        page.drawing = draw_lanes(asked.draw(), 0, None, drawing_width())
    print_answer(page, what_if_json(report), manners)
    exit_strictly(gaps, manners)


def _baseline(run: Analysis, also: Analysis | None, said: Said) -> Baseline:
    schedule = said.schedule_measured or run.job.schedule_for(run.pipeline)
    if run.pipeline.windows and run.pipeline.schedule is None and schedule is None:
        raise UsageError(
            "the schedule that ran was not recognised",
            hint="say it with --schedule-measured, such as 1f1b",
        )
    return start_from(
        run,
        also,
        tokens=said.tokens,
        layers=said.layers,
        limit_bytes=None if said.memory_limit is None else float(parse_bytes(said.memory_limit)),
        schedule=said.schedule_measured,
    )


def flags_of(files: Traces, said: Said) -> dict[str, object]:
    """Return by flag what was said of a measured run and of its change."""
    return {
        "--microbatches": said.microbatches,
        "--hold": said.hold,
        "--schedule": said.schedule,
        "--chunks": said.chunks,
        "--split": said.split,
        "--overlap": said.overlap,
        "--hop": said.hops or None,
        "--tokens": said.tokens.asked,
        "--tokens-measured": said.tokens.measured,
        "--also": files.also,
        "--also-tokens": said.tokens.also,
        "--recompute": said.recompute,
        "--layers": said.layers,
        "--schedule-measured": said.schedule_measured,
        "--memory-limit": said.memory_limit,
        "--pipeline": files.pipeline,
        "--capture": files.reader.capture,
        "--rank": files.reader.rank,
    }


def _again(files: Traces, said: Said) -> str:
    flags = typed(flags_of(files, said) | {"--hop": None, "--rank": None})
    hops = "".join(f" --hop {shlex.quote(hop)}" for hop in said.hops)
    words = shlex.join(files.words)
    return f"debubble simulate {words}{' ' if flags else ''}{flags}{hops} --timeline"
