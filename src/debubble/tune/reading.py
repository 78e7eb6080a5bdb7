"""One capture in → its measurement, and what plans are made of."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from debubble.errors import Gap
from debubble.fleet.survey import survey_run
from debubble.measure.measurement import Measurement, measure_run
from debubble.timeline.figures import PipelineFigures
from debubble.timeline.model import Timeline
from debubble.trace.run import find_run


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """A run as its traces show it."""

    timeline: Timeline
    figures: PipelineFigures
    measurement: Measurement
    gaps: tuple[Gap, ...]


def read_capture(folder: Path | str) -> Reading:
    """Read the newest capture of a folder or URL; of several pipelines, the one that waits most."""
    found = survey_run(find_run([str(folder)]))
    gaps = (*found.run.gaps, *found.timeline.gaps, *found.shown.gaps)
    return Reading(
        timeline=found.timeline,
        figures=found.shown,
        measurement=measure_run(found.run, found.timeline, found.shown),
        gaps=tuple(dict.fromkeys(gaps)),
    )
