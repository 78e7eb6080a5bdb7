"""What replicas wait for each other in → which one drags, why, and what that costs."""

from __future__ import annotations

from typing import ClassVar

from debubble.report.answers.base import Part
from debubble.timeline.replicas import UNDECIDED, Difference, Replica, ReplicaFigures
from debubble.units import counted, show_duration, show_members, show_percent, show_ranks


class ReplicaPart(Part, frozen=True, kw_only=True):
    """One replica."""

    paths: ClassVar = {"last_steps": "last"}

    replica: int
    pipelines: list[int]
    ranks: list[int]
    late_s: float | None
    last_steps: int
    waited_s: float


class DifferencePart(Part, frozen=True, kw_only=True):
    """What takes longer in one replica than elsewhere."""

    what: str
    stage: int | None
    from_rank: int | None
    to_rank: int | None
    outside: str | None
    here_s: float
    elsewhere_s: float
    step_s: float


class ReplicasPart(Part, frozen=True, kw_only=True):
    """What replicas wait for each other."""

    paths: ClassVar = {"missing_ranks": "absent"}

    verdict: str
    slowest: int | None
    saved_s: float | None
    saved_fraction: float | None
    waited_s: float
    waited_fraction: float | None
    why: DifferencePart | None
    steps: list[int]
    missing_ranks: list[int]
    end_spread_s: float
    replicas: list[ReplicaPart]
    sentence: str


def answer_replicas(found: ReplicaFigures) -> ReplicasPart:
    """Return which replica drags the others, why, and what that costs."""
    why = found.why
    from_rank, to_rank = why.hop if why and why.hop else (None, None)
    return ReplicasPart.of(
        found,
        why=why and DifferencePart.of(why, from_rank=from_rank, to_rank=to_rank),
        replicas=[
            ReplicaPart.of(replica, replica=number) for number, replica in enumerate(found.replicas)
        ],
        sentence=_say_replicas(found),
    )


def _say_replicas(found: ReplicaFigures) -> str:
    if found.slowest is None:
        waits = show_percent(found.waited_fraction)
        return f"No replica drags the others: {waits} of the time waits for one or another."
    late = found.replicas[found.slowest]
    lead = show_duration(late.late_ns or 0)
    if found.verdict == UNDECIDED:
        where = f"in {late.last} of {counted(len(found.steps), 'step')}, by {lead}"
        chance = "too few steps, or too uneven, to call it more than chance"
        return f"{_replica_name(late)} came last to the reductions, {where}: {chance}."
    others = "other" if len(found.replicas) == 2 else f"{len(found.replicas) - 1} others"
    why = f": {_say_difference(found.why)}" if found.why else ""
    shorter = f"{show_duration(found.saved_ns or 0)} ({show_percent(found.saved_fraction)})"
    return (
        f"{_replica_name(late)} drags the {others}{why}. "
        f"It comes {lead} late to the reductions; without that a step would be {shorter} "
        f"shorter. Replicas wait {show_percent(found.waited_fraction)} of the time for each other."
    )


def _replica_name(replica: Replica) -> str:
    noun = "Pipelines" if len(replica.pipelines) > 1 else "Pipeline"
    return f"{noun} {show_ranks(replica.pipelines)} (ranks {show_members(replica.ranks)})"


def _say_difference(why: Difference) -> str:
    here, there = show_duration(why.here_ns), show_duration(why.elsewhere_ns)
    if why.what == "stage":
        return f"its stage {why.stage} takes {here} a microbatch, {there} elsewhere"
    if why.hop is not None:
        source, destination = why.hop
        return f"a message from rank {source} to {destination} takes {here}, {there} elsewhere"
    part = (why.outside or "").replace("_", " ")
    named = "something else" if part == "other" else part
    return f"{named} between its steps takes {here}, {there} elsewhere"
