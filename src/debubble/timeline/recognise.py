"""An order that was seen in → the schedule that has it; held against what was stated."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from debubble.errors import Code, Gap, UsageError
from debubble.schedules import Action, Order, Statement, candidate_orders
from debubble.timeline.model import Passes, PassKind, RankTimeline, Timeline
from debubble.units import show_count

PassName = tuple[int, str, int]
"""Stage, kind and microbatch of a pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deviation:
    """Where a rank first ran another pass than an order has for it."""

    rank: int
    step: int
    place: int
    """Of the pass among those of the rank in the step, from 0."""
    found: str | None
    """None where the rank ran nothing more."""
    expected: str | None
    """None where the order has nothing more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StatedSchedule:
    """What the user states, held against what was measured."""

    name: str
    order: Order | None
    """None where it has none for what was run."""
    deviation: Deviation | None
    gaps: tuple[Gap, ...]

    @property
    def chunks(self) -> int | None:
        """The most stages that a rank has by it."""
        if self.order is None:
            return None
        return max(len({action.stage for action in actions}) for actions in self.order)

    @property
    def agrees(self) -> bool | None:
        """Whether all ranks followed it; None where that was not looked at."""
        if any(gap.code is Code.SCHEDULE_UNCHECKED for gap in self.gaps):
            return None
        return not self.gaps


def count_microbatches(timeline: Timeline, pipeline: int) -> int | None:
    """Return how many microbatches a step has; None where steps or stages disagree."""
    passes = timeline.passes
    names = [rank.rank for rank in timeline.ranks_of(pipeline)]
    forward = passes.where(np.isin(passes.rank, names) & (passes.kind == PassKind.F))
    keys = np.stack((forward.step, forward.stage))
    _, counts = np.unique(keys, axis=1, return_counts=True)
    return int(counts[0]) if len(counts) and (counts == counts[0]).all() else None


def recognise_schedule(timeline: Timeline, pipeline: int, microbatches: int | None) -> str | None:
    """Name the schedule whose order every rank followed in every step that it ran.

    Passes are compared in the order of their starts. Two things are not: the first stage's input
    gradient, and which of two passes made to overlap began first.
    """
    ranks = as_schedules_count(timeline, pipeline)
    passes = _passes_of(timeline, ranks)
    if microbatches is None or not ranks or len(np.unique(passes.rank)) != len(ranks):
        return None
    kinds = frozenset(PassKind(kind).name for kind in np.unique(passes.kind).tolist())
    placement = tuple(rank.stages for rank in ranks)
    seen = list(_orders(passes, ranks))
    for name, order in candidate_orders(placement, kinds, microbatches):
        expected = [_without_first_input_gradient(actions) for actions in order]
        if all(_first_off(found, expected[position]) is None for position, _, found in seen):
            return name
    return None


def find_deviation(timeline: Timeline, pipeline: int, order: Order) -> Deviation | None:
    """Return where a pipeline first left an order, by rank, then by step; None if nowhere."""
    ranks = as_schedules_count(timeline, pipeline)
    for position, step, found in _orders(_passes_of(timeline, ranks), ranks):
        expected = _without_first_input_gradient(order[position])
        off = _first_off(found, expected)
        if off is not None:
            return Deviation(
                rank=ranks[position].rank,
                step=step,
                place=off,
                found="{}{}{}".format(*found[off]) if off < len(found) else None,
                expected=str(expected[off]) if off < len(expected) else None,
            )
    return None


def as_schedules_count(timeline: Timeline, pipeline: int) -> list[RankTimeline]:
    """Return the ranks by first stage: around a loop, messages alone show no first rank."""
    return sorted(timeline.ranks_of(pipeline), key=lambda rank: min(rank.stages))


def _passes_of(timeline: Timeline, ranks: list[RankTimeline]) -> Passes:
    """Return what ran in the steps of these ranks.

    Torch has no input gradient to compute on the first stage: there I is an empty call, and W does
    all. Other frameworks run it. So it is left out, here and in the orders compared with.
    """
    passes = timeline.passes
    empty = (passes.stage == 0) & (passes.kind == PassKind.I)
    mine = np.isin(passes.rank, [rank.rank for rank in ranks])
    return passes.where(mine & np.isin(passes.step, timeline.steps) & ~empty)


def _without_first_input_gradient(actions: list[Action]) -> list[Action]:
    return [action for action in actions if (action.stage, action.kind) != (0, "I")]


def _orders(passes: Passes, ranks: list[RankTimeline]) -> Iterator[tuple[int, int, list[PassName]]]:
    """Yield a rank's position, a step, and what it ran there in the order of starts."""
    positions = {rank.rank: position for position, rank in enumerate(ranks)}
    position = np.array([positions[rank] for rank in passes.rank.tolist()], dtype=np.int32)
    order = np.lexsort((passes.start_ns, passes.step, position))
    changes = (np.diff(position[order]) != 0) | (np.diff(passes.step[order]) != 0)
    for rows in np.split(order, np.flatnonzero(changes) + 1) if len(order) else ():
        columns = (passes.stage[rows], passes.kind[rows], passes.microbatch[rows])
        ran = [
            (stage, PassKind(kind).name, microbatch)
            for stage, kind, microbatch in zip(*(c.tolist() for c in columns), strict=True)
        ]
        yield int(position[rows[0]]), int(passes.step[rows[0]]), ran


def _first_off(found: list[PassName], expected: list[Action]) -> int | None:
    """Return where a rank's passes leave those of an order; None if they are the same."""
    found = found.copy()
    for position, action in enumerate(expected):
        if action.overlap and found[position : position + 1] != [action[:3]]:
            found[position : position + 2] = found[position : position + 2][::-1]
        if position >= len(found) or found[position] != action[:3]:
            return position
    return len(expected) if len(found) > len(expected) else None


def hold_against(
    statement: Statement,
    timeline: Timeline,
    pipeline: int,
    microbatches: int | None,
    *,
    streams: bool,
) -> StatedSchedule:
    """Make the stated order for this run and look where the run left it."""
    ranks = as_schedules_count(timeline, pipeline)
    name = statement.text
    if streams:
        return _unchecked(name, "batches overlap, so that no step has an order")
    if set(ranks[0].members) - {rank.rank for rank in ranks}:
        return _unchecked(name, "a rank of the pipeline has no trace")
    if microbatches is None:
        return _unchecked(name, "steps or stages differ in their microbatches")
    chunks = max(len(rank.stages) for rank in ranks)
    try:
        order = statement.order_for(len(ranks), microbatches, chunks)
    except UsageError as why:
        return _without_order(name, Code.SCHEDULE_DIFFERS, f"this cannot be {name}: {why.message}")
    deviation = find_deviation(timeline, pipeline, order)
    if deviation is None:
        return StatedSchedule(name=name, order=order, deviation=None, gaps=())
    ran = f"ran {deviation.found}" if deviation.found else "ran nothing more"
    has = f"has {deviation.expected}" if deviation.expected else "has nothing more"
    left = Gap(
        code=Code.SCHEDULE_DIFFERS,
        message=f"left the stated schedule {name} in step {deviation.step}: "
        f"as pass {show_count(deviation.place + 1)} it {ran}, where {name} {has}",
        hint="theory is that of what was stated, by --schedule or by the sidecars",
        rank=deviation.rank,
    )
    return StatedSchedule(name=name, order=order, deviation=deviation, gaps=(left,))


def _unchecked(name: str, why: str) -> StatedSchedule:
    message = f"not held against the stated schedule {name}: {why}"
    return _without_order(name, Code.SCHEDULE_UNCHECKED, message)


def _without_order(name: str, code: Code, message: str) -> StatedSchedule:
    gap = Gap(code=code, message=message, hint="leave --schedule out to see what is recognised")
    return StatedSchedule(name=name, order=None, deviation=None, gaps=(gap,))
