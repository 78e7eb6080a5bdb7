"""The figures of a replica and of the others in → in what it differs most, as a step feels it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

from debubble.timeline.figures import PipelineFigures

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
