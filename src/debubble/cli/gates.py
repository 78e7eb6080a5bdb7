"""An answer in → the exit code that the user asked for; no gate goes unjudged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

import click

from debubble.errors import (
    Gap,
    GateError,
    Touch,
    place,
)
from debubble.units import counted, show_members, show_percent

if TYPE_CHECKING:
    from debubble.links.hop_times import Verdict
    from debubble.report.answers.base import AnswerWarning
    from debubble.timeline.figures import PipelineFigures


EXIT_FAILED = 1

_SOUND = "give the traces as they were recorded, or record them again"
_ALL_RANKS = "capture the same steps on all ranks of the pipeline"


def close_gate() -> NoReturn:
    """End with the code that means: answered, and you asked to fail on it."""
    raise click.exceptions.Exit(EXIT_FAILED)


def refuse_to_judge(flag: str, why: str, hint: str) -> NoReturn:
    """Say, after the answer, that it does not tell what the gate asks for."""
    raise GateError(f"{flag} cannot be judged: {why}", hint=hint)


def refuse_doubted(
    refusal: str, gaps: Sequence[Gap | AnswerWarning], judged: Touch, slack_ns: float = 0.0
) -> None:
    """Judge nothing by what a doubt touches, unless it moves that by less than would matter."""
    for gap in gaps:
        if judged in gap.touches and (gap.moves_ns is None or gap.moves_ns > slack_ns):
            raise GateError(f"{refusal}: {gap}", hint=_SOUND)


def judge_bubbles(
    figures: Sequence[PipelineFigures], allowed: float, gaps: Sequence[Gap] = ()
) -> None:
    """Close where a pipeline that is known in full waits more than is allowed.

    Where none does, every one has to be known: a pipeline that is seen in part, whose bubble
    cannot be told, or is so near to the limit that what is doubted could decide, might.
    """
    doubts = [_doubt(pipeline, allowed, gaps) for pipeline in figures]
    known = [
        pipeline.bubble_fraction
        for pipeline, doubt in zip(figures, doubts, strict=True)
        if not doubt
    ]
    if any(bubble is not None and bubble > allowed for bubble in known):
        close_gate()
    for pipeline, doubt in zip(figures, doubts, strict=True):
        if doubt:
            of = f" of pipeline {pipeline.pipeline}" if len(figures) > 1 else ""
            hint = _ALL_RANKS if pipeline.absent or pipeline.cut else _SOUND
            refuse_to_judge("--fail-over", f"the bubble{of} {doubt}", hint)


def no_trace_of(ranks: Sequence[int]) -> str:
    """Name ranks of a pipeline that were not captured."""
    return f"no trace of {'rank' if len(ranks) == 1 else 'ranks'} {show_members(tuple(ranks))}"


def _doubt(pipeline: PipelineFigures, allowed: float, gaps: Sequence[Gap]) -> str:
    """Say why a bubble does not tell; nothing where it does."""
    members, bubble = pipeline.ranks[0].members, pipeline.bubble_fraction
    moves_ns = 0
    for gap in gaps:
        if Touch.TIMES in gap.touches and (gap.rank is None or gap.rank in members):
            if gap.moves_ns is None:
                return f"is doubted: {place('', gap.rank)}{gap.message}"
            moves_ns += gap.moves_ns
    if bubble is None or not pipeline.one_run:
        return "is unknown"
    if pipeline.absent:
        return f"is of a part, with {no_trace_of(pipeline.absent)}"
    if pipeline.cut:
        return "is of parts of steps"
    moves = moves_ns / max(pipeline.batch_latency_ns or 0, 1)
    near = moves_ns and abs(bubble - allowed) <= moves
    off = "anything" if moves > 1 else show_percent(moves)
    return f"is {show_percent(bubble)}, and could be off by {off}" if near else ""


def judge_slow(
    verdicts: Sequence[Verdict],
    gaps: Sequence[Gap | AnswerWarning] = (),
    absent: Sequence[int] = (),
) -> None:
    """Close where a hop is slow; where no hop could be judged, or not all were seen, say so."""
    from debubble.links.hop_times import Verdict

    refuse_doubted("--fail-on slow cannot be judged", gaps, Touch.MESSAGES)
    if Verdict.SLOW in verdicts:
        close_gate()
    if absent:
        refuse_to_judge("--fail-on slow", no_trace_of(absent), _ALL_RANKS)
    if Verdict.HEALTHY not in verdicts:
        seen = f"the verdict of {counted(len(verdicts), 'hop')} is unknown"
        refuse_to_judge(
            "--fail-on slow",
            seen if verdicts else "no hop was seen",
            "give something to hold hops against: --history FILE or --class NAME",
        )
