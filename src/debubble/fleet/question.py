"""What is asked of a run in → the figures of the pipelines it is asked about."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from debubble.errors import UsageError
from debubble.schedules import SCHEDULES, Statement, state_schedule
from debubble.timeline.figures import PipelineFigures, measure_pipeline
from debubble.timeline.job import ask_job
from debubble.timeline.model import Timeline
from debubble.trace.sidecar import Sidecar

# As many numbers as anyone would read.
_NUMBERS_SHOWN = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Which pipeline, which step, and what the user knows of the schedule."""

    pipeline: int | None = None
    step: int | None = None
    statement: Statement | None = None


def measure_asked(
    timeline: Timeline, pipelines: Sequence[int], sidecars: Sequence[Sidecar], question: Question
) -> tuple[PipelineFigures, ...]:
    """Measure pipelines one by one; the job's word tells an order that no known schedule has."""
    measured = []
    for pipeline in pipelines:
        figures = measure_pipeline(timeline, pipeline, question.step, question.statement)
        unknown = figures.schedule is None and figures.kind != "stream"
        if unknown and question.statement is None:
            said = ask_job(sidecars, figures).schedule
            if said is not None and said in SCHEDULES:
                stated = state_schedule(said)
                figures = measure_pipeline(timeline, pipeline, question.step, stated)
        measured.append(figures)
    return tuple(measured)


def pipelines_asked(timeline: Timeline, question: Question) -> tuple[int, ...]:
    """Return the pipelines asked for; say what there is where there is no such one, or no step."""
    known = timeline.pipelines
    if question.pipeline is not None and question.pipeline not in known:
        raise UsageError(
            f"there is no pipeline {question.pipeline}",
            hint=f"--pipeline takes one of: {_listed(known)}",
        )
    if question.step is not None and question.step not in timeline.steps:
        raise UsageError(
            f"there is no step {question.step}",
            hint=f"--step takes one of: {_listed(timeline.steps)}",
        )
    return known if question.pipeline is None else (question.pipeline,)


def _listed(numbers: Sequence[int]) -> str:
    shown = ", ".join(str(number) for number in numbers[:_NUMBERS_SHOWN])
    return shown if len(numbers) <= _NUMBERS_SHOWN else f"{shown}, … {numbers[-1]}"
