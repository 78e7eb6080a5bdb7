"""A run as it was read in → what `inspect` answers, and `find` where there is no pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec

from debubble.errors import Code, as_gap
from debubble.report.answers.base import Answer, AnswerWarning, Part, list_warnings
from debubble.timeline.fleet.survey import NoPipelineIn
from debubble.trace.columns import RankSummary
from debubble.trace.optable.summary import OpTableSummary, summarise_table
from debubble.trace.run import Run
from debubble.units import counted, show_ranks, show_share

SCHEMA = "debubble.inspect/1"


class CapturePart(Part, frozen=True, kw_only=True):
    """One capture that lies there."""

    name: str
    files: Annotated[list[str], "files.file"]


class LackPart(Part, frozen=True, kw_only=True):
    """What verbs will not have, and how it is recorded."""

    verbs: list[str]
    lack: str
    record: str
    blocks: bool
    """Without it these verbs have no answer."""


class InspectAnswer(Answer, frozen=True, kw_only=True):
    """What was found, and what is missing or broken."""

    schema: str = SCHEMA
    capture: str
    captures: list[CapturePart]
    world_size: int | None
    missing_ranks: list[int]
    ranks: tuple[RankSummary, ...]
    op_tables: list[OpTableSummary]
    left_alone: list[str]
    lacks: list[LackPart]
    verdict: str
    warnings: list[AnswerWarning]

    @property
    def holds_pipeline(self) -> bool:
        """Whether `find` will see one."""
        return not any(lack.blocks and "find" in lack.verbs for lack in self.lacks)


def answer_inspect(run: Run) -> InspectAnswer:
    """Say what a run holds."""
    ranks = run.summarised()
    lacks = _lacks(run, ranks)
    return InspectAnswer(
        capture=run.found.capture.name,
        captures=[CapturePart.of(capture) for capture in run.found.captures],
        world_size=run.world_size,
        missing_ranks=list(run.missing_ranks),
        ranks=ranks,
        op_tables=[summarise_table(table) for table in run.tables],
        left_alone=list(run.found.left_alone),
        lacks=lacks,
        verdict=_say_run(run, ranks, lacks),
        warnings=list_warnings(run.gaps),
    )


_SHAPES = "record_shapes=True"
_OF_PIPELINES = ("find", "links", "plan", "simulate", "compare")


def _lacks(run: Run, ranks: tuple[RankSummary, ...]) -> list[LackPart]:
    """Say what traces of ranks lack, verb by verb; op tables say it by their columns."""
    if not ranks or run.tables:
        return []
    lacks: list[LackPart] = []

    def lack(verbs: Sequence[str], what: str, record: str) -> None:
        blocks = verbs is _OF_PIPELINES
        lacks.append(LackPart(verbs=list(verbs), lack=what, record=record, blocks=blocks))

    messages = sum(rank.sends + rank.receives for rank in ranks)
    if not messages:
        what = "a pipeline: no message from rank to rank is in them"
        lack(_OF_PIPELINES, what, "all ranks of at least one pipeline")
    elif not any(rank.peers for rank in ranks):
        lack(
            _OF_PIPELINES, f"the peers of all {counted(messages, 'message')}", "record_shapes=True"
        )
    elif any(rank.sent_bytes is None for rank in ranks):
        lack(["links"], "the sizes of messages, and so the rates of hops", _SHAPES)
    if run.missing_ranks:
        what = (
            f"{'rank' if len(run.missing_ranks) == 1 else 'ranks'} {show_ranks(run.missing_ranks)}"
        )
        lack(["plan", "simulate"], what, "all ranks of at least one pipeline")
    on_device = [rank for rank in ranks if rank.kernels]
    if on_device and all(rank.peak_memory_bytes is None for rank in on_device):
        lack(["plan", "compare"], "memory, and so whether a change fits", "profile_memory=True")
    if on_device and all(rank.unjoined_kernels == rank.kernels for rank in on_device):
        what = "what hosts did, and so which wait is theirs"
        lack(["find"], what, "the host, too: ProfilerActivity.CPU")
    return lacks


def _say_run(run: Run, ranks: tuple[RankSummary, ...], lacks: list[LackPart]) -> str:
    parts = []
    if ranks:
        world = f" of {run.world_size}" if run.world_size else ""
        fewest, most = min(len(r.steps) for r in ranks), max(len(r.steps) for r in ranks)
        steps = f"{counted(most, 'step')} each" if fewest == most else f"{fewest} to {most} steps"
        events = counted(sum(rank.events for rank in ranks), "event")
        held = steps if most else "no profiler steps"
        parts.append(f"{counted(len(ranks), 'rank')}{world}, {held}, {events}")
    parts += [f"an op table of {counted(len(table), 'row')}" for table in run.tables]
    if run.missing_ranks:
        ranks_word = "rank" if len(run.missing_ranks) == 1 else "ranks"
        parts.append(f"missing: {ranks_word} {show_ranks(run.missing_ranks)}")
    problems = [gap for gap in run.gaps if gap.code != Code.MISSING_RANKS]
    if problems:
        parts.append(counted(len(problems), "warning"))
    elif not run.missing_ranks:
        parts.append("nothing broken" if lacks else "nothing missing or broken")
    if lacks and (lacks[0].blocks or not (problems or run.missing_ranks)):
        verbs = "all other verbs" if lacks[0].blocks else " and ".join(lacks[0].verbs)
        parts.append(f"{verbs} will lack {lacks[0].lack}")
    summary = "; ".join(parts)
    return f"{summary[:1].upper()}{summary[1:]}."


FIND_SCHEMA = "debubble.find/1"
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

    schema: str = FIND_SCHEMA
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
        utilisation=BusyRanks(ranks=[BusyPart.of(rank) for rank in run.summarised()]),
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
