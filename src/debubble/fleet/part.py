"""Digests of ranks that talk to each other in → their pipelines measured, in a few kilobytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from debubble.fleet.question import Question, measure_asked
from debubble.fleet.spool import Place
from debubble.timeline.build import NoChain, build_part
from debubble.timeline.chain import translate_peers
from debubble.timeline.figures import PipelineFigures
from debubble.timeline.job import tell_memory
from debubble.timeline.model import RankTimeline, Timeline, no_intervals
from debubble.trace.columns import Group, RankTrace
from debubble.trace.formats import Recognised
from debubble.trace.sidecar import Sidecar
from debubble.trace.source import Limits

_NOTHING = np.zeros(0, dtype=np.intp)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartOrder(Recognised):
    """A part of a run to be measured, as a worker is handed it."""

    places: tuple[Place, ...]
    members: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """Ranks whose peers are counted inside a group, and who is in it."""
    sidecars: tuple[Sidecar, ...] = ()
    marked: bool = True
    may_infer: bool = True
    question: Question = field(default_factory=Question)

    @property
    def ranks(self) -> frozenset[int]:
        """Whose digests they are."""
        return frozenset(place.rank for place in self.places)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartFigures:
    """What comes back of it."""

    timeline: Timeline | NoChain
    """Without its passes, transfers and intervals."""
    figures: tuple[PipelineFigures, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class WholePart:
    """A part with everything in it."""

    traces: tuple[RankTrace, ...]
    timeline: Timeline | NoChain


def load_part(order: PartOrder, limits: Limits) -> WholePart:
    """Build a part from its digests."""
    members = dict(order.members)
    traces = tuple(
        translate_peers(place.read(limits), members.get(place.rank)) for place in order.places
    )
    built = build_part(traces, marked=order.marked, may_infer=order.may_infer)
    if isinstance(built, Timeline):
        built = tell_memory(built, order.sidecars)
    return WholePart(traces=traces, timeline=built)


def measure_part(order: PartOrder, limits: Limits) -> PartFigures:
    """Measure all pipelines of a part, and send back their figures alone."""
    built = load_part(order, limits).timeline
    if isinstance(built, NoChain):
        return PartFigures(timeline=built)
    figures = measure_asked(built, built.pipelines, order.sidecars, order.question)
    slim = replace(
        built,
        ranks=_without_intervals(built.ranks),
        passes=built.passes.where(_NOTHING),
        transfers=built.transfers.where(_NOTHING),
    )
    return PartFigures(
        timeline=slim,
        figures=tuple(replace(one, ranks=_without_intervals(one.ranks)) for one in figures),
    )


def _without_intervals(ranks: Sequence[RankTimeline]) -> tuple[RankTimeline, ...]:
    nothing = no_intervals()
    return tuple(
        replace(
            rank,
            busy=nothing,
            occupied=nothing,
            apparent=nothing,
            unissued=nothing,
            outside=(),
        )
        for rank in ranks
    )


def settle_figures(
    figures: Sequence[PipelineFigures],
    numbers: Mapping[tuple[int, ...], int],
    groups: Mapping[int, tuple[Group, ...]],
) -> list[PipelineFigures]:
    """Return figures of a part with the whole run's numbers, and groups that its ranks share."""
    found = []
    for one in figures:
        number = numbers[one.ranks[0].members]
        ranks = tuple(
            replace(
                rank,
                pipeline=number,
                collectives=rank.collectives
                and replace(rank.collectives, groups=groups[rank.rank]),
            )
            for rank in one.ranks
        )
        found.append(replace(one, pipeline=number, ranks=ranks))
    return found
