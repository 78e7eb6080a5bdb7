"""What the user calls a run in → its measurement, for the verbs that hold runs against others."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from debubble.cli.reading import Reader
from debubble.errors import Gap, MissingExtra, RunNotFound
from debubble.fleet.question import Question
from debubble.measure.measurement import Measurement, measure_run
from debubble.measure.store import Store, default_url
from debubble.timeline.figures import PipelineFigures
from debubble.timeline.job import ask_job
from debubble.timeline.model import Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredTraces:
    """One capture, measured."""

    measurement: Measurement
    gaps: tuple[Gap, ...]
    timeline: Timeline
    figures: PipelineFigures


def measure_traces(
    places: Sequence[str],
    reader: Reader,
    *,
    pipeline: int | None = None,
    quiet: bool = False,
) -> MeasuredTraces:
    """Measure one capture."""
    found = reader.survey(places, Question(pipeline=pipeline), quiet=quiet)
    job = ask_job(found.run.sidecars, found.shown)
    gaps = (*found.run.gaps, *found.timeline.gaps, *found.shown.gaps, *job.gaps)
    return MeasuredTraces(
        measurement=measure_run(found.run, found.timeline, found.shown),
        gaps=tuple(dict.fromkeys(gaps)),
        timeline=found.timeline,
        figures=found.shown,
    )


def with_tokens(one: Measurement, tokens: int | None) -> Measurement:
    """Add the tokens of a microbatch, where the user knows them."""
    return one if tokens is None else replace(one, tokens=tokens)


def store_url(stated: str | None) -> str:
    """Return the store that was stated, or the user's own, whose folder is made."""
    if stated is not None:
        return stated
    url = default_url(os.environ, Path.home())
    Path(url.removeprefix("sqlite:///")).parent.mkdir(parents=True, exist_ok=True)
    return url


def recall(name: str, stated: str | None) -> list[Measurement]:
    """Return what the history holds under a name; nothing where there is no history at all."""
    if os.path.lexists(name) or "://" in name:
        return []
    own = default_url(os.environ, Path.home()).removeprefix("sqlite:///")
    if stated is None and not Path(own).exists():
        return []
    try:
        store = Store(store_url(stated))
    except MissingExtra:
        if stated is None:
            return []
        raise
    try:
        return [record.measurement for record in store.named(name)]
    except RunNotFound:
        return []
    finally:
        store.close()
