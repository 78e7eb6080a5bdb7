"""Pipelines that meet in collectives in → which replica drags the others, why, and how sure.

Two questions, either of which may answer: is it last in more steps than chance lets it (which asks
nothing of the noise, but takes ten steps of two replicas), and is its lead larger than what steps
differ by (Student's test, the noise pooled over all replicas). Each is asked of the worst of all
replicas, so each is held to its share of the error.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import msgspec
import numpy as np

from debubble.errors import Code, Gap
from debubble.timeline.figures import PipelineFigures, worst_of
from debubble.timeline.model import F64, FEWEST_SAMPLES, FEWEST_STEPS, RankCollectives
from debubble.timeline.replicas.cells import (
    Arrivals,
    Cells,
    join_groups,
    make_cells,
    measure_arrivals,
    replay_without,
    spread_of_ends,
)
from debubble.timeline.steps import numbered
from debubble.units import NS_PER_S

DRAGS, NONE, UNDECIDED = "drags", "none", "undecided"
# A difference that explains less of the lead than this is not its reason.
_LEAST_PART = 0.3
# A lead of less than a hundredth of the step is not worth a hunt.
_LEAST_LEAD = 0.01
# Last in so many of the steps, and not surely: worth another capture.
_OFTEN = 0.75
# How often equal replicas may be told apart, over both questions: tests/timeline counts.
ERROR = 0.005
# Of two steps that both had a spike, Student's test of 16 replicas named one in 50 runs of equals.
# Beyond so many degrees of freedom Student's distribution no longer moves.
_MOST_FREEDOM = 400


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """What takes longer in one replica than in the middle of the others."""

    what: str
    """stage, hop, or outside."""
    stage: int | None = None
    from_rank: int | None = None
    to_rank: int | None = None
    outside: str | None = None
    """What of the time between two steps, as `find` names it."""
    here_s: float
    elsewhere_s: float
    step_s: float
    """What it comes to in a step, one after the other."""


class Replica(msgspec.Struct, frozen=True, kw_only=True):
    """One copy of the model, in the middle of all steps."""

    replica: int
    pipelines: tuple[int, ...]
    """Several where ranks share stages."""
    ranks: tuple[int, ...]
    """Those with a trace."""
    late_s: float | None
    """How much later than the middle of the others it comes to the reduction that ends last."""
    last_steps: int
    """In how many steps no other came later."""
    waited_s: float
    """A step, over all its ranks, for others to come to a reduction, with nothing to compute."""


class ReplicaFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What replicas wait for each other."""

    verdict: str
    """drags, none, or undecided: one leads, and the steps are too few or too uneven to tell."""
    slowest: int | None
    """Which replica comes last, by its place in `replicas`; None where none leads."""
    saved_s: float | None
    """How much shorter a step would be if it came with the middle of the others."""
    saved_fraction: float | None
    waited_s: float
    """Device time a step, over all ranks."""
    waited_fraction: float | None
    """Of all devices' time, spent waiting for others at reductions."""
    why: Difference | None
    steps: tuple[int, ...]
    missing_ranks: tuple[int, ...]
    """Members of their groups without a trace: one of them may come later still."""
    end_spread_s: float
    """By how much members differ about when their reductions end."""
    replicas: tuple[Replica, ...]

    @property
    def gaps(self) -> tuple[Gap, ...]:
        """What the judgement had to do without."""
        if not self.missing_ranks:
            return ()
        who = numbered("rank", self.missing_ranks)
        return (
            Gap(
                code=Code.MISSING_REPLICAS,
                message=f"replicas are judged without {who}, which reduce with them: "
                "one of those may come later still",
                hint="capture all replicas to know which one drags",
            ),
        )


def shown_of(
    figures: Sequence[PipelineFigures], replicas: ReplicaFigures | None
) -> PipelineFigures:
    """Return the pipeline to look into first: the one that drags the others, or waits most.

    Of one that lacks ranks less can be said.
    """
    if replicas is not None and replicas.verdict == DRAGS and replicas.slowest is not None:
        dragging = replicas.replicas[replicas.slowest].pipelines
        return worst_of([pipeline for pipeline in figures if pipeline.pipeline in dragging])
    whole = [pipeline for pipeline in figures if not pipeline.absent]
    return worst_of(whole or figures)


def judge_run(figures: Sequence[PipelineFigures]) -> ReplicaFigures | None:
    """Judge the pipelines of a run, where several were measured and reduce something together."""
    measured = [pipeline for pipeline in figures if pipeline.windows and pipeline.one_run]
    collectives = {
        rank.rank: rank.collectives
        for pipeline in measured
        for rank in pipeline.ranks
        if rank.collectives is not None
    }
    members = {
        pipeline.pipeline: pipeline.ranks[0].members or tuple(rank.rank for rank in pipeline.ranks)
        for pipeline in measured
    }
    return judge_replicas(collectives, members, measured)


def judge_replicas(
    collectives: Mapping[int, RankCollectives],
    pipelines: Mapping[int, Sequence[int]],
    figures: Sequence[PipelineFigures],
) -> ReplicaFigures | None:
    """Tell which replica drags the others; `pipelines` lists each one's ranks, first to last.

    None where no two replicas reduce anything together.
    """
    kept = [{window.step for window in pipeline.windows} for pipeline in figures]
    steps = sorted(set.intersection(*kept)) if kept else []
    if len(pipelines) < 2 or not steps:
        return None
    joined = join_groups(collectives, pipelines)
    pipeline_of = {rank: number for number, ranks in pipelines.items() for rank in ranks}
    cells = make_cells(collectives, joined, pipeline_of, steps)
    if not cells:
        return None
    by_replica: list[list[PipelineFigures]] = [[] for _ in range(max(joined.replica.values()) + 1)]
    for pipeline in figures:
        by_replica[joined.replica[pipeline.pipeline]].append(pipeline)
    lengths = [pipeline.step_time_ns or pipeline.batch_latency_ns for pipeline in figures]
    step_ns = median([length for length in lengths if length] or [0.0])
    arrivals = measure_arrivals(cells, steps, len(by_replica))
    spread = spread_of_ends(cells)
    slowest, verdict = _find_slowest(arrivals, step_ns, spread)
    saved, why = None, None
    if slowest is not None:
        others = [other for at, mine in enumerate(by_replica) if at != slowest for other in mine]
        lead = float(np.nanmean(arrivals.late_ns[:, slowest]))
        saved, why = _saved(cells, slowest), explain(by_replica[slowest], others, lead)
        if saved < _LEAST_LEAD * step_ns and _another(arrivals, slowest, lead):
            slowest, verdict, saved, why = None, NONE, None, None
    waited = float(np.median(arrivals.waited_ns.sum(axis=1)))
    waits_ns = [round(float(ns)) for ns in np.median(arrivals.waited_ns, axis=0)]
    devices = sum(len(pipeline.ranks) for pipeline in figures)
    return ReplicaFigures(
        verdict=verdict,
        slowest=slowest,
        saved_s=None if saved is None else saved / NS_PER_S,
        saved_fraction=None if saved is None or not step_ns else saved / step_ns,
        waited_s=sum(waits_ns) / NS_PER_S,
        waited_fraction=waited / (devices * step_ns) if step_ns else None,
        why=why,
        steps=tuple(steps),
        missing_ranks=joined.absent,
        end_spread_s=round(spread) / NS_PER_S,
        replicas=tuple(
            Replica(
                replica=at,
                pipelines=tuple(pipeline.pipeline for pipeline in mine),
                ranks=tuple(sorted(rank.rank for pipeline in mine for rank in pipeline.ranks)),
                late_s=round(float(np.nanmedian(late))) / NS_PER_S
                if np.isfinite(late := arrivals.late_ns[:, at]).any()
                else None,
                last_steps=int(np.nansum(arrivals.last[:, at] == 1)),
                waited_s=waits_ns[at] / NS_PER_S,
            )
            for at, mine in enumerate(by_replica)
        ),
    )


def _find_slowest(arrivals: Arrivals, step_ns: float, spread_ns: float) -> tuple[int | None, str]:
    """Return the replica that comes latest over all steps, if any leads, and the verdict on it."""
    known = np.flatnonzero(np.isfinite(arrivals.late_ns).any(axis=0))
    if not len(known):
        return None, NONE
    slowest = int(known[np.nanmean(arrivals.late_ns[:, known], axis=0).argmax()])
    lead = float(np.nanmean(arrivals.late_ns[:, slowest]))
    if lead < max(_LEAST_LEAD * step_ns, spread_ns):
        return None, NONE
    if surely_late(arrivals.late_ns, arrivals.last, slowest):
        return slowest, DRAGS
    often = float(np.nanmean(arrivals.last[:, slowest] == 1)) >= _OFTEN
    return (slowest, UNDECIDED) if often else (None, NONE)


def _another(arrivals: Arrivals, slowest: int, lead_ns: float) -> bool:
    """Tell whether another replica comes nearly as late: then neither drags the others alone."""
    others = np.delete(arrivals.late_ns, slowest, axis=1)
    known = others[:, np.isfinite(others).any(axis=0)]
    return bool((np.nanmean(known, axis=0) > lead_ns / 2).any())


def _saved(cells: Sequence[Cells], replica: int) -> int:
    """Return what a step would be shorter: reductions of other stages may then end last."""
    ends: dict[tuple[int, int], list[tuple[int, float]]] = {}
    for cell in cells:
        which, gained = replay_without(cell, replica)
        mine = cell.replica[which] == replica
        for lane in range(cell.rank.shape[2]):
            keys = cell.step[which].tolist(), cell.pipeline[which, :, lane][mine].tolist()
            last = cell.end_ns[which, :, lane, -1][mine].tolist()
            for step, pipeline, end, gain in zip(*keys, last, gained.tolist(), strict=True):
                ends.setdefault((step, pipeline), []).append((end, gain))
    saved = [
        max(end for end, _ in all_of) - max(end - gain for end, gain in all_of)
        for all_of in ends.values()
    ]
    return max(0, round(median(saved)))


def explain(
    mine: Sequence[PipelineFigures], others: Sequence[PipelineFigures], lead_ns: float
) -> Difference | None:
    """Return the largest difference; None where none is large enough to be the reason.

    Between two steps reductions are not compared: they hold the wait itself.
    """
    outside = sorted({name for pipeline in mine for name in pipeline.outside_ns} - {"reduction"})
    elsewhere: dict[tuple[str, Any], list[int]] = {}
    for pipeline in others:
        for key, length in _lengths(pipeline, outside).items():
            elsewhere.setdefault(key, []).append(length)
    longest_ns, largest = 0, None
    for pipeline in mine:
        for (what, which), length in _lengths(pipeline, outside).items():
            if (what, which) not in elsewhere:
                continue
            there = round(median(elsewhere[what, which]))
            step_ns = (length - there) * (1 if what == "outside" else pipeline.microbatches or 1)
            if largest is None or step_ns > longest_ns:
                rank_at = {rank.position: rank.rank for rank in pipeline.ranks}
                from_rank, to_rank = map(rank_at.get, which) if what == "hop" else (None, None)
                longest_ns, largest = (
                    step_ns,
                    Difference(
                        what=what,
                        stage=which if what == "stage" else None,
                        from_rank=from_rank,
                        to_rank=to_rank,
                        outside=which if what == "outside" else None,
                        here_s=length / NS_PER_S,
                        elsewhere_s=there / NS_PER_S,
                        step_s=step_ns / NS_PER_S,
                    ),
                )
    return largest if longest_ns >= _LEAST_PART * lead_ns else None


def _lengths(pipeline: PipelineFigures, outside: Sequence[str]) -> dict[tuple[str, Any], int]:
    """Return what a pipeline takes where, to be compared with what the others take there.

    For a microbatch on each stage, all its passes together, and over each hop, by the positions of
    its ranks, which replicas share; and for a step outside of it.
    """
    found = Counter[tuple[str, Any]]()
    for row in pipeline.stages:
        found["stage", row.stage] += row.median_ns
    position = {rank.rank: rank.position for rank in pipeline.ranks}
    for hop in pipeline.hops:
        if hop.wire_ns is not None:
            found["hop", (position[hop.source], position[hop.destination])] = hop.wire_ns
    return found | {("outside", name): pipeline.outside_ns.get(name, 0) for name in outside}


def surely_late(late_ns: F64, last: F64, replica: int) -> bool:
    """Tell whether a replica's lead is no accident; never of a single step."""
    mine = late_ns[:, replica]
    known = np.flatnonzero(np.isfinite(late_ns).any(axis=0))
    replica = int(np.searchsorted(known, replica))
    late_ns, last = late_ns[:, known], last[:, known]
    steps = int(np.isfinite(mine).sum())
    if steps < FEWEST_STEPS or np.nanmean(mine) <= 0:
        return False
    replicas = late_ns.shape[1]
    chance = chance_of_last(int(np.nansum(last[:, replica] == 1)), steps, replicas)
    return bool(min(chance, _chance_of_lead(late_ns, replica)) * replicas <= ERROR / 2)


def chance_of_last(times: int, steps: int, replicas: int) -> float:
    """Return how likely one of equal replicas is last in so many steps, or more."""
    each = 1 / replicas
    return math.fsum(
        math.comb(steps, n) * each**n * (1 - each) ** (steps - n) for n in range(times, steps + 1)
    )


def _chance_of_lead(late_ns: F64, replica: int) -> float:
    steps, replicas = late_ns.shape
    if steps < FEWEST_SAMPLES:
        return 1.0
    off = late_ns - np.nanmean(late_ns, axis=0)
    freedom = (steps - 1) * (replicas - 1)
    pooled = float(np.nansum(off**2)) / (freedom * replicas / (replicas - 1))
    own = float(np.nansum(off[:, replica] ** 2)) / (steps - 1)
    noise = math.sqrt(max(pooled, own) / steps)
    lead = float(np.nanmean(late_ns[:, replica]))
    return student_tail(lead / noise, freedom) if noise else 0.0


def student_tail(t: float, freedom: int) -> float:
    """Return how likely Student's t is larger, by its finite series for whole degrees."""
    freedom = min(freedom, _MOST_FREEDOM)
    angle = math.atan(t / math.sqrt(freedom))
    sine, square = math.sin(angle), math.cos(angle) ** 2
    odd = freedom % 2
    term = math.cos(angle) if odd else 1.0
    total = 0.0
    for number in range(1 + odd, freedom, 2):
        total += term
        term *= square * number / (number + 1)
    within = 2 / math.pi * (angle + sine * total) if odd else sine * total
    return max(0.0, (1 - within) / 2)
