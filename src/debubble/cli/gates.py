"""What was measured, and what it may be, in → an exit code; a gate never passes unjudged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import click

from debubble.errors import GateError
from debubble.links.judge import Verdict
from debubble.timeline.figures import PipelineFigures
from debubble.units import counted, show_members

EXIT_FAILED = 1


def close_gate() -> NoReturn:
    """End with the code that means: answered, and you asked to fail on it."""
    raise click.exceptions.Exit(EXIT_FAILED)


def refuse_to_judge(flag: str, why: str, hint: str) -> NoReturn:
    """Say, after the answer, that it does not tell what the gate asks for."""
    raise GateError(f"{flag} cannot be judged: {why}", hint=hint)


def judge_bubbles(figures: Sequence[PipelineFigures], allowed: float) -> None:
    """Close where a pipeline that is known in full waits more than is allowed.

    Where none does, every one has to be known: a pipeline that is seen in part, or whose bubble
    cannot be told, might.
    """
    doubts = {pipeline.pipeline: _doubt(pipeline) for pipeline in figures}
    known = [pipeline.bubble_fraction for pipeline in figures if not doubts[pipeline.pipeline]]
    if any(bubble is not None and bubble > allowed for bubble in known):
        close_gate()
    for pipeline, doubt in doubts.items():
        if doubt:
            of = f" of pipeline {pipeline}" if len(figures) > 1 else ""
            refuse_to_judge(
                "--fail-over",
                f"the bubble{of} {doubt}",
                "capture the same steps on all ranks of the pipeline",
            )


def _doubt(pipeline: PipelineFigures) -> str:
    """Say why a bubble does not tell; nothing where it does."""
    if pipeline.bubble_fraction is None or not pipeline.one_run:
        return "cannot be told"
    if pipeline.absent:
        ranks = "rank" if len(pipeline.absent) == 1 else "ranks"
        return f"is of a part, with no trace of {ranks} {show_members(pipeline.absent)}"
    return "is of parts of steps" if pipeline.cut else ""


def judge_slow(verdicts: Sequence[Verdict]) -> None:
    """Close where a hop is slow; where no hop could be judged, say so."""
    if Verdict.SLOW in verdicts:
        close_gate()
    if Verdict.HEALTHY not in verdicts:
        seen = f"the verdict of {counted(len(verdicts), 'hop')} is unknown"
        refuse_to_judge(
            "--fail-on slow",
            seen if verdicts else "no hop was seen",
            "give something to hold hops against: --history FILE or --class NAME",
        )
