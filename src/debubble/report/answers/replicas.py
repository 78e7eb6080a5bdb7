"""What replicas wait for each other in → which one drags, why, and what that costs."""

from __future__ import annotations

from debubble.report.answers.base import Part
from debubble.timeline.replicas import UNDECIDED, Difference, Replica, ReplicaFigures
from debubble.units import counted, show_members, show_percent, show_ranks, show_seconds


class ReplicasPart(ReplicaFigures, Part, frozen=True, kw_only=True):
    """What replicas wait for each other, and a sentence."""

    sentence: str


def say_replicas(figures: ReplicaFigures) -> str:
    """Say which replica drags the others, why, and what that costs."""
    if figures.slowest is None:
        waits = show_percent(figures.waited_fraction)
        return f"No replica slows the others: replicas wait {waits} of the time for each other."
    late = figures.replicas[figures.slowest]
    lead = show_seconds(late.late_s or 0)
    if figures.verdict == UNDECIDED:
        where = f"in {late.last_steps} of {counted(len(figures.steps), 'step')}, by {lead}"
        chance = "too few or too uneven steps to rule out chance"
        return f"{_replica_name(late)} came last to the reductions, {where}: {chance}."
    others = "other" if len(figures.replicas) == 2 else f"{len(figures.replicas) - 1} others"
    why = f": {_say_difference(figures.why)}" if figures.why else ""
    shorter = f"{show_seconds(figures.saved_s or 0)} ({show_percent(figures.saved_fraction)})"
    return (
        f"{_replica_name(late)} slows the {others}{why}. "
        f"It comes {lead} late to the reductions; without that: saves {shorter} a step. "
        f"Replicas wait {show_percent(figures.waited_fraction)} of the time for each other."
    )


def _replica_name(replica: Replica) -> str:
    noun = "Pipelines" if len(replica.pipelines) > 1 else "Pipeline"
    return f"{noun} {show_ranks(replica.pipelines)} (ranks {show_members(replica.ranks)})"


def _say_difference(why: Difference) -> str:
    here, there = show_seconds(why.here_s), show_seconds(why.elsewhere_s)
    if why.what == "stage":
        return f"its stage {why.stage} takes {here} a microbatch, {there} elsewhere"
    if why.what == "hop":
        hop = f"rank {why.from_rank} to {why.to_rank}"
        return f"a message from {hop} takes {here}, {there} elsewhere"
    part = (why.outside or "").replace("_", " ")
    named = "something else" if part == "other" else part
    return f"{named} between its steps takes {here}, {there} elsewhere"
