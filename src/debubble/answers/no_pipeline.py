"""A run without a pipeline in → what `debubble find` answers all the same."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from debubble.answers.base import Answer, AnswerWarning, Part, list_warnings
from debubble.errors import Code, as_gap
from debubble.fleet.survey import NoPipelineIn
from debubble.units import show_share

SCHEMA = "debubble.find/1"
# So many ranks are named one by one.
_FEW = 16


class NoPipelineRun(Part, frozen=True, kw_only=True):
    """What was read."""

    capture: str
    captures: list[str]
    kind: None = None
    pipelines: list[list[int]] = msgspec.field(default_factory=list)
    missing_ranks: list[int]


class BusyPart(Part, frozen=True, kw_only=True):
    """A rank's own share."""

    rank: int
    busy_fraction: float | None


class BusyRanks(Part, frozen=True, kw_only=True):
    """The same of all ranks."""

    ranks: list[BusyPart]


class NoPipelineAnswer(Answer, frozen=True, kw_only=True):
    """What holds without a pipeline."""

    schema: str = SCHEMA
    run: NoPipelineRun
    numbers: None = None
    utilisation: BusyRanks
    verdict: str
    warnings: list[AnswerWarning]


def answer_no_pipeline(why: NoPipelineIn) -> NoPipelineAnswer:
    """Say that there is no pipeline, and each rank's own share."""
    run = why.run
    shares = say_busy([(rank.rank, rank.busy_fraction) for rank in run.summarised()])
    return NoPipelineAnswer(
        run=NoPipelineRun(
            capture=run.found.capture.name,
            captures=[capture.name for capture in run.found.captures],
            missing_ranks=list(run.missing_ranks),
        ),
        utilisation=BusyRanks(
            ranks=[
                BusyPart(rank=rank.rank, busy_fraction=rank.busy_fraction)
                for rank in run.summarised()
            ]
        ),
        verdict=f"{why.message[:1].upper()}{why.message[1:]}. Busy: {shares}.",
        warnings=list_warnings([*run.gaps, as_gap(why, code=Code.NO_PIPELINE)]),
    )


def say_busy(shares: Sequence[tuple[int, float | None]]) -> str:
    """Say how busy ranks are; of many, from which share to which."""
    if len(shares) <= _FEW:
        return ", ".join(f"rank {rank} {show_share(share)}" for rank, share in shares)
    known = [share for _, share in shares if share is not None]
    if not known:
        return "unknown"
    least, most = show_share(min(known)), show_share(max(known))
    return f"{len(known)} ranks {least if least == most else f'{least} to {most}'}"
