"""One capture in → its measurement, and what plans are made of."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from debubble.errors import Gap
from debubble.measure.measurement import Measurement, measure_run
from debubble.timeline.build import build_run
from debubble.timeline.figures import PipelineFigures, measure_pipeline, worst_of
from debubble.timeline.model import Timeline
from debubble.trace.run import find_run, read_run


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """A run as its traces show it."""

    timeline: Timeline
    figures: PipelineFigures
    measurement: Measurement
    gaps: tuple[Gap, ...]


def read_capture(folder: Path | str) -> Reading:
    """Read the newest capture of a folder or URL; of several pipelines, the one that waits most."""
    run = read_run(find_run([str(folder)]))
    timeline = build_run(run)
    figures = worst_of([measure_pipeline(timeline, one) for one in timeline.pipelines])
    return Reading(
        timeline=timeline,
        figures=figures,
        measurement=measure_run(run, timeline, figures),
        gaps=tuple(dict.fromkeys((*run.gaps, *timeline.gaps, *figures.gaps))),
    )
