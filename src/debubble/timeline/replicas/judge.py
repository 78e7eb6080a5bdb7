"""Pipelines that meet in collectives in → which replica drags, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

import numpy as np

from debubble.errors import Code, Gap
from debubble.timeline.figures import PipelineFigures, worst_of
from debubble.timeline.model import RankCollectives
from debubble.timeline.replicas.cells import Cells, join_groups, make_cells
from debubble.timeline.replicas.waits import (
    Arrivals,
    measure_arrivals,
    replay_without,
    spread_of_ends,
    surely_late,
)
from debubble.trace.run import show_ranks

Key = TypeVar("Key")

# A difference that explains less of the lead than this is not its reason.
_LEAST_PART = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One thing that takes longer in one replica than in the middle of the others."""

    what: str
    """stage, hop, or outside."""
    stage: int | None = None
    hop: tuple[int, int] | None = None
    """By ranks."""
    hop_stages: tuple[int, int] | None = None
    outside: str | None = None
    """What of the time between two steps, as `find` names it."""
    here_ns: int
    elsewhere_ns: int
    step_ns: int
    """What it comes to in a step, one after the other."""


def explain(
    mine: Sequence[PipelineFigures], others: Sequence[PipelineFigures], lead_ns: float
) -> Difference | None:
    """Return the largest difference; None where none is large enough to be the reason."""
    found = [*_stages(mine, others), *_hops(mine, others), *_outside(mine, others)]
    largest = max(found, key=lambda one: one.step_ns, default=None)
    return largest if largest and largest.step_ns >= _LEAST_PART * lead_ns else None


def _stages(mine: Sequence[PipelineFigures], others: Sequence[PipelineFigures]) -> list[Difference]:
    """Compare what a stage takes for a microbatch, all its passes together."""
    elsewhere: dict[int, list[int]] = {}
    for one in others:
        for stage, length in _by_stage(one).items():
            elsewhere.setdefault(stage, []).append(length)
    return [
        Difference(
            what="stage",
            stage=stage,
            here_ns=here,
            elsewhere_ns=there,
            step_ns=(here - there) * (one.microbatches or 1),
        )
        for one in mine
        for stage, here in _by_stage(one).items()
        if (there := _middle(elsewhere, stage)) is not None
    ]


def _by_stage(one: PipelineFigures) -> dict[int, int]:
    lengths: dict[int, int] = {}
    for row in one.stages:
        lengths[row.stage] = lengths.get(row.stage, 0) + row.median_ns
    return lengths


def _hops(mine: Sequence[PipelineFigures], others: Sequence[PipelineFigures]) -> list[Difference]:
    """Compare hops by the places of their ranks: replicas have the same."""
    elsewhere: dict[tuple[int, int], list[int]] = {}
    for one in others:
        for way, wire_ns in _ways(one):
            elsewhere.setdefault(way, []).append(wire_ns)
    found = []
    for one in mine:
        place = {rank.rank: rank.position for rank in one.ranks}
        for hop in one.hops:
            there = _middle(elsewhere, (place[hop.source], place[hop.destination]))
            if hop.wire_ns is not None and there is not None:
                found.append(
                    Difference(
                        what="hop",
                        hop=(hop.source, hop.destination),
                        hop_stages=hop.stages[0] if len(hop.stages) == 1 else None,
                        here_ns=hop.wire_ns,
                        elsewhere_ns=there,
                        step_ns=(hop.wire_ns - there) * (one.microbatches or 1),
                    )
                )
    return found


def _ways(one: PipelineFigures) -> list[tuple[tuple[int, int], int]]:
    place = {rank.rank: rank.position for rank in one.ranks}
    return [
        ((place[hop.source], place[hop.destination]), hop.wire_ns)
        for hop in one.hops
        if hop.wire_ns is not None
    ]


def _outside(
    mine: Sequence[PipelineFigures], others: Sequence[PipelineFigures]
) -> list[Difference]:
    """Compare what lies between two steps, but for reductions: those hold the wait itself."""
    names = {name for one in mine for name in one.outside_ns} - {"reduction"}
    found = []
    for one in mine:
        for name in sorted(names):
            here = one.outside_ns.get(name, 0)
            there = round(median(other.outside_ns.get(name, 0) for other in others))
            found.append(
                Difference(
                    what="outside",
                    outside=name,
                    here_ns=here,
                    elsewhere_ns=there,
                    step_ns=here - there,
                )
            )
    return found


def _middle(elsewhere: Mapping[Key, Sequence[int]], key: Key) -> int | None:
    return round(median(elsewhere[key])) if key in elsewhere else None


DRAGS, NONE, UNDECIDED = "drags", "none", "undecided"
# A lead of less than a hundredth of the step is not worth a hunt.
_LEAST_LEAD = 0.01
# Last in so many of the steps, and not surely: worth another capture.
_OFTEN = 0.75


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """One copy of the model, in the middle of all steps."""

    pipelines: tuple[int, ...]
    """Several where ranks share stages."""
    ranks: tuple[int, ...]
    """Those with a trace."""
    late_ns: int | None
    """How much later than the middle of the others it comes to the reduction that ends last."""
    last: int
    """In how many steps no other came later."""
    waited_ns: int
    """A step, over all its ranks, for others to come to a reduction, with nothing to compute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaFigures:
    """What replicas wait for each other."""

    replicas: tuple[Replica, ...]
    steps: tuple[int, ...]
    verdict: str
    """drags, none, or undecided: one leads, and the steps are too few or too uneven to tell."""
    slowest: int | None
    """Which replica comes last, by its place in `replicas`; None where none leads."""
    saved_ns: int | None
    """How much shorter a step would be if it came with the middle of the others."""
    saved_fraction: float | None
    waited_fraction: float | None
    """Of all devices' time, spent waiting for others at reductions."""
    why: Difference | None
    absent: tuple[int, ...]
    """Members of their groups without a trace: one of them may come later still."""
    end_spread_ns: int
    """By how much members differ about when their reductions end."""

    @property
    def gaps(self) -> tuple[Gap, ...]:
        """What the judgement had to do without."""
        if not self.absent:
            return ()
        who = f"{'rank' if len(self.absent) == 1 else 'ranks'} {show_ranks(self.absent)}"
        return (
            Gap(
                code=Code.MISSING_REPLICAS,
                message=f"replicas are judged without {who}, which reduce with them: "
                "one of those may come later still",
                hint="capture all replicas to know which one drags",
            ),
        )

    @property
    def waited_ns(self) -> int:
        """Device time a step, over all ranks."""
        return sum(one.waited_ns for one in self.replicas)


def shown_of(
    figures: Sequence[PipelineFigures], replicas: ReplicaFigures | None
) -> PipelineFigures:
    """Return the pipeline to look into first: the one that drags the others, or waits most.

    Of one that lacks ranks less can be said.
    """
    if replicas is not None and replicas.verdict == DRAGS and replicas.slowest is not None:
        dragging = replicas.replicas[replicas.slowest].pipelines
        return worst_of([one for one in figures if one.pipeline in dragging])
    whole = [one for one in figures if not one.absent]
    return worst_of(whole or figures)


def judge_run(figures: Sequence[PipelineFigures]) -> ReplicaFigures | None:
    """Judge the pipelines of a run, where several were measured and reduce something together."""
    measured = [one for one in figures if one.windows and one.one_run]
    collectives = {
        rank.rank: rank.collectives
        for one in measured
        for rank in one.ranks
        if rank.collectives is not None
    }
    pipelines = {
        one.pipeline: one.ranks[0].members or tuple(rank.rank for rank in one.ranks)
        for one in measured
    }
    return judge_replicas(collectives, pipelines, measured)


def judge_replicas(
    collectives: Mapping[int, RankCollectives],
    pipelines: Mapping[int, Sequence[int]],
    figures: Sequence[PipelineFigures],
) -> ReplicaFigures | None:
    """Tell which replica drags the others; `pipelines` lists each one's ranks, first to last.

    None where no two replicas reduce anything together.
    """
    steps = _common_steps(figures)
    if len(pipelines) < 2 or not steps:
        return None
    joined = join_groups(collectives, pipelines)
    pipeline_of = {rank: number for number, ranks in pipelines.items() for rank in ranks}
    cells = make_cells(collectives, joined, pipeline_of, steps)
    if not cells:
        return None
    count = max(joined.replica.values()) + 1
    arrivals = measure_arrivals(cells, steps, count)
    step_ns = _step_ns(figures)
    spread = spread_of_ends(cells)
    slowest = _leads(arrivals)
    sure = slowest is not None and surely_late(arrivals.late_ns, arrivals.last, slowest)
    verdict = _verdict(arrivals, slowest, step_ns, spread, sure=sure)
    if verdict == NONE:
        slowest = None
    saved = None if slowest is None else _saved(cells, slowest)
    by_replica: dict[int, list[PipelineFigures]] = {number: [] for number in range(count)}
    for one in figures:
        by_replica[joined.replica[one.pipeline]].append(one)
    return ReplicaFigures(
        replicas=tuple(_replica(mine, arrivals, at) for at, mine in by_replica.items()),
        steps=tuple(steps),
        verdict=verdict,
        slowest=slowest,
        saved_ns=saved,
        saved_fraction=None if saved is None or not step_ns else saved / step_ns,
        waited_fraction=_share(arrivals, figures, step_ns),
        why=_why(by_replica, arrivals, slowest),
        absent=joined.absent,
        end_spread_ns=round(spread),
    )


def _why(
    by_replica: Mapping[int, Sequence[PipelineFigures]], arrivals: Arrivals, slowest: int | None
) -> Difference | None:
    if slowest is None:
        return None
    others = [one for number, mine in by_replica.items() if number != slowest for one in mine]
    return explain(by_replica[slowest], others, float(np.nanmean(arrivals.late_ns[:, slowest])))


def _common_steps(figures: Sequence[PipelineFigures]) -> list[int]:
    kept = [{window.step for window in one.windows} for one in figures]
    return sorted(set.intersection(*kept)) if kept else []


def _step_ns(figures: Sequence[PipelineFigures]) -> float:
    lengths = [one.step_time_ns or one.batch_latency_ns for one in figures]
    known = [length for length in lengths if length]
    return median(known) if known else 0.0


def _leads(arrivals: Arrivals) -> int | None:
    """Return the replica that comes latest, over all steps."""
    known = np.flatnonzero(np.isfinite(arrivals.late_ns).any(axis=0))
    if not len(known):
        return None
    return int(known[np.nanmean(arrivals.late_ns[:, known], axis=0).argmax()])


def _verdict(
    arrivals: Arrivals, slowest: int | None, step_ns: float, spread_ns: float, *, sure: bool
) -> str:
    if slowest is None:
        return NONE
    lead = float(np.nanmean(arrivals.late_ns[:, slowest]))
    if lead < max(_LEAST_LEAD * step_ns, spread_ns):
        return NONE
    if sure:
        return DRAGS
    often = float(np.nanmean(arrivals.last[:, slowest] == 1)) >= _OFTEN
    return UNDECIDED if often else NONE


def _saved(cells: Sequence[Cells], replica: int) -> int:
    """Return what a step would be shorter: reductions of other stages may then end last."""
    ends: dict[tuple[int, int], list[tuple[int, float]]] = {}
    for one in cells:
        which, gained = replay_without(one, replica)
        mine = one.replica[which] == replica
        for lane in range(one.rank.shape[2]):
            keys = one.step[which].tolist(), one.pipeline[which, :, lane][mine].tolist()
            last = one.end_ns[which, :, lane, -1][mine].tolist()
            for step, pipeline, end, gain in zip(*keys, last, gained.tolist(), strict=True):
                ends.setdefault((step, pipeline), []).append((end, gain))
    saved = [
        max(end for end, _ in all_of) - max(end - gain for end, gain in all_of)
        for all_of in ends.values()
    ]
    return max(0, round(median(saved)))


def _share(arrivals: Arrivals, figures: Sequence[PipelineFigures], step_ns: float) -> float | None:
    devices = sum(len(one.ranks) for one in figures)
    waited = float(np.median(arrivals.waited_ns.sum(axis=1)))
    return waited / (devices * step_ns) if step_ns else None


def _replica(mine: Sequence[PipelineFigures], arrivals: Arrivals, number: int) -> Replica:
    late = arrivals.late_ns[:, number]
    return Replica(
        pipelines=tuple(one.pipeline for one in mine),
        ranks=tuple(sorted(rank.rank for one in mine for rank in one.ranks)),
        late_ns=round(float(np.nanmedian(late))) if np.isfinite(late).any() else None,
        last=int(np.nansum(arrivals.last[:, number] == 1)),
        waited_ns=round(float(np.median(arrivals.waited_ns[:, number]))),
    )
