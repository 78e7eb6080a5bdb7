"""What the user calls a run in → its measurement, for the verbs that hold runs against others."""

from __future__ import annotations

from dataclasses import replace

from debubble.cli.options import progress
from debubble.cli.plan import choose_figures
from debubble.errors import Gap
from debubble.measure.measurement import Measurement, join_measurements, measure_run
from debubble.timeline.build import build_run
from debubble.trace.run import find_run, read_run
from debubble.trace.source import Limits


def measure_traces(  # noqa: PLR0913 (the options that choose a run)
    place: str,
    *,
    limits: Limits,
    capture: str | None = None,
    rank: int | None = None,
    pipeline: int | None = None,
    quiet: bool = False,
) -> tuple[Measurement, tuple[Gap, ...]]:
    """Measure one capture."""
    found = find_run([place], capture=capture, limits=limits)
    with progress("reading", quiet=quiet) as show:
        run = read_run(found, limits=limits, rank=rank, on_progress=show)
    timeline = build_run(run)
    figures = choose_figures(timeline, pipeline)
    gaps = tuple(dict.fromkeys((*run.gaps, *timeline.gaps, *figures.gaps)))
    return measure_run(run, timeline, figures), gaps


def with_tokens(one: Measurement, tokens: int | None) -> Measurement:
    """Add the tokens of a microbatch, where the user knows them."""
    return one if tokens is None else replace(one, tokens=tokens)


def join(parts: list[tuple[Measurement, tuple[Gap, ...]]]) -> tuple[Measurement, tuple[Gap, ...]]:
    """Put captures of one setting together, with what all of them lack."""
    gaps = tuple(dict.fromkeys(gap for _, mine in parts for gap in mine))
    return join_measurements([one for one, _ in parts]), gaps
