"""Passes in → the name of the schedule that ordered them, or nothing."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from debubble.schedules import Action, candidate_orders
from debubble.timeline.model import Passes, PassKind, RankTimeline, Timeline

Key = tuple[int, str, int]
"""Stage, kind and microbatch of a pass."""


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
    # By first stage, as schedules count ranks: around a loop, messages alone show no first rank.
    ranks = sorted(timeline.ranks_of(pipeline), key=lambda rank: min(rank.stages))
    passes = _passes_of(timeline, ranks)
    if microbatches is None or not ranks or len(np.unique(passes.rank)) != len(ranks):
        return None
    kinds = frozenset(PassKind(kind).name for kind in np.unique(passes.kind).tolist())
    placement = tuple(rank.stages for rank in ranks)
    seen = list(_orders(passes, ranks))
    for name, order in candidate_orders(placement, kinds, microbatches):
        expected = [_without_first_input_gradient(actions) for actions in order]
        if all(_follows(found, expected[position]) for position, found in seen):
            return name
    return None


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


def _orders(passes: Passes, ranks: list[RankTimeline]) -> Iterator[tuple[int, list[Key]]]:
    """Yield what each rank ran in each step, in the order of starts, with the rank's position."""
    positions = {rank.rank: position for position, rank in enumerate(ranks)}
    order = np.lexsort((passes.start_ns, passes.step, passes.rank))
    rank, step = passes.rank[order], passes.step[order]
    cuts = np.flatnonzero((np.diff(rank) != 0) | (np.diff(step) != 0)) + 1
    for rows in np.split(order, cuts):
        columns = (passes.stage[rows], passes.kind[rows], passes.microbatch[rows])
        yield (
            positions[int(passes.rank[rows[0]])],
            [
                (stage, PassKind(kind).name, microbatch)
                for stage, kind, microbatch in zip(*(c.tolist() for c in columns), strict=True)
            ],
        )


def _follows(found: list[Key], expected: list[Action]) -> bool:
    """Say whether a rank's passes are those of an order."""
    if len(found) != len(expected):
        return False
    found = found.copy()
    for position, action in enumerate(expected):
        if action.overlap and found[position] != action[:3]:
            found[position : position + 2] = found[position + 1], found[position]
        if found[position] != action[:3]:
            return False
    return True
