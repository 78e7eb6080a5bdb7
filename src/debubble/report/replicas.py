"""What replicas wait for each other in → sentences, a table, and data of it out."""

from __future__ import annotations

from typing import Any

from debubble.report.fold import show_members
from debubble.report.text import Table
from debubble.timeline.replicas import UNDECIDED, Difference, Replica, ReplicaFigures
from debubble.trace.run import show_ranks
from debubble.units import NS_PER_S, counted, show_duration, show_share

# Beyond so many only those that come last are listed.
_MOST_ROWS = 8


def replica_findings(found: ReplicaFigures | None) -> list[str]:
    """Say which replica drags the others, why, and what that costs."""
    if found is None:
        return []
    steps = counted(len(found.steps), "step")
    if found.slowest is None:
        waits = show_share(found.waited_fraction)
        return [f"No replica drags the others: {waits} of the time waits for one or another."]
    late = found.replicas[found.slowest]
    if found.verdict == UNDECIDED:
        where = f"in {late.last} of {steps}, by {_lead(late)}"
        chance = "too few steps, or too uneven, to call it more than chance"
        return [f"{_name(late)} came last to the reductions, {where}: {chance}."]
    others = "other" if len(found.replicas) == 2 else f"{len(found.replicas) - 1} others"
    why = f": {_reason(found.why)}" if found.why else ""
    shorter = f"{show_duration(found.saved_ns or 0)} ({show_share(found.saved_fraction)})"
    cost = (
        f"It comes {_lead(late)} late to the reductions; without that a step would be {shorter} "
        f"shorter. Replicas wait {show_share(found.waited_fraction)} of the time for each other."
    )
    return [f"{_name(late)} drags the {others}{why}. {cost}"]


def replica_tables(found: ReplicaFigures | None) -> list[Table]:
    """List the replicas, or those that come last of many."""
    if found is None:
        return []
    table = Table(columns=("replica", "ranks", "late by", "last in", "waits a step"))
    rows = sorted(enumerate(found.replicas), key=lambda row: (-(row[1].late_ns or 0), row[0]))
    for number, one in sorted(rows[:_MOST_ROWS]):
        table.rows.append(
            (
                str(number),
                show_members(one.ranks),
                "–" if one.late_ns is None else _signed(one.late_ns),
                f"{one.last} of {len(found.steps)}",
                show_duration(one.waited_ns / max(1, len(one.ranks))),
            )
        )
    return [table]


def replicas_json(found: ReplicaFigures | None) -> dict[str, Any] | None:
    """Return the same as data."""
    if found is None:
        return None
    return {
        "verdict": found.verdict,
        "slowest": found.slowest,
        "saved_s": None if found.saved_ns is None else found.saved_ns / NS_PER_S,
        "saved_fraction": found.saved_fraction,
        "waited_s": found.waited_ns / NS_PER_S,
        "waited_fraction": found.waited_fraction,
        "why": found.why and _why_json(found.why),
        "steps": list(found.steps),
        "missing_ranks": list(found.absent),
        "end_spread_s": found.end_spread_ns / NS_PER_S,
        "replicas": [_replica_json(number, one) for number, one in enumerate(found.replicas)],
    }


def _replica_json(number: int, one: Replica) -> dict[str, Any]:
    return {
        "replica": number,
        "pipelines": list(one.pipelines),
        "ranks": list(one.ranks),
        "late_s": None if one.late_ns is None else one.late_ns / NS_PER_S,
        "last_steps": one.last,
        "waited_s": one.waited_ns / NS_PER_S,
    }


def _why_json(why: Difference) -> dict[str, Any]:
    return {
        "what": why.what,
        "stage": why.stage,
        "from_rank": why.hop[0] if why.hop else None,
        "to_rank": why.hop[1] if why.hop else None,
        "outside": why.outside,
        "here_s": why.here_ns / NS_PER_S,
        "elsewhere_s": why.elsewhere_ns / NS_PER_S,
        "step_s": why.step_ns / NS_PER_S,
    }


def _name(one: Replica) -> str:
    several = len(one.pipelines) > 1
    numbers = show_ranks(one.pipelines)
    return f"{'Pipelines' if several else 'Pipeline'} {numbers} (ranks {show_members(one.ranks)})"


def _lead(one: Replica) -> str:
    return show_duration(one.late_ns or 0)


def _reason(why: Difference) -> str:
    here, there = show_duration(why.here_ns), show_duration(why.elsewhere_ns)
    if why.what == "stage":
        return f"its stage {why.stage} takes {here} a microbatch, {there} elsewhere"
    if why.hop is not None:
        source, destination = why.hop
        return f"a message from rank {source} to {destination} takes {here}, {there} elsewhere"
    what = (why.outside or "").replace("_", " ")
    named = "something else" if what == "other" else what
    return f"{named} between its steps takes {here}, {there} elsewhere"


def _signed(nanoseconds: int) -> str:
    return f"{'−' if nanoseconds < 0 else ''}{show_duration(abs(nanoseconds))}"
