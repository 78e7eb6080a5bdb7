"""The figures of a replica and of the others in → in what it differs most, as a step feels it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from debubble.timeline.figures import PipelineFigures
from debubble.timeline.model import PassKind

# A difference that explains less of the lead than this is not its reason.
_LEAST_PART = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One thing that takes longer in one replica than in the middle of the others."""

    what: str
    """pass, hop, or outside."""
    stage: int | None = None
    kind: PassKind | None = None
    """Of the pass."""
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
    found = [*_passes(mine, others), *_hops(mine, others), *_outside(mine, others)]
    largest = max(found, key=lambda one: one.step_ns, default=None)
    return largest if largest and largest.step_ns >= _LEAST_PART * lead_ns else None


def _passes(mine: Sequence[PipelineFigures], others: Sequence[PipelineFigures]) -> list[Difference]:
    elsewhere: dict[tuple[int, int], list[int]] = {}
    for one in others:
        for row in one.stages:
            elsewhere.setdefault((row.stage, row.kind), []).append(row.median_ns)
    return [
        Difference(
            what="pass",
            stage=row.stage,
            kind=row.kind,
            here_ns=row.median_ns,
            elsewhere_ns=there,
            step_ns=(row.median_ns - there) * (one.microbatches or 1),
        )
        for one in mine
        for row in one.stages
        if (there := _middle(elsewhere, (row.stage, row.kind))) is not None
    ]


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


def _middle(elsewhere: Mapping[tuple[int, int], Sequence[int]], key: tuple[int, int]) -> int | None:
    return round(median(elsewhere[key])) if key in elsewhere else None
