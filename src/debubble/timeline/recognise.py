"""Passes in → the name of the schedule that ordered them, or nothing."""

from __future__ import annotations

import numpy as np

from debubble.schedules import orders_of_single_stage_schedules
from debubble.timeline.model import PassKind, RankTimeline, Timeline


def count_microbatches(timeline: Timeline, pipeline: int) -> int | None:
    """Return how many microbatches a step has; None where steps or stages disagree."""
    passes = timeline.passes
    names = [rank.rank for rank in timeline.ranks_of(pipeline)]
    forward = passes.where(np.isin(passes.rank, names) & (passes.kind == PassKind.F))
    keys = np.stack((forward.step, forward.stage))
    _, counts = np.unique(keys, axis=1, return_counts=True)
    return int(counts[0]) if len(counts) and (counts == counts[0]).all() else None


def recognise_schedule(timeline: Timeline, pipeline: int, microbatches: int | None) -> str | None:
    """Name the schedule whose order every rank followed in every step."""
    ranks = timeline.ranks_of(pipeline)
    if microbatches is None or any(len(rank.stages) != 1 for rank in ranks):
        return None
    seen = [_orders(timeline, rank) for rank in ranks]
    for name, order in orders_of_single_stage_schedules(len(ranks), microbatches).items():
        expected = [[(action.kind, action.microbatch) for action in rank] for rank in order]
        if all(
            step == wanted for steps, wanted in zip(seen, expected, strict=True) for step in steps
        ):
            return name
    return None


def _orders(timeline: Timeline, rank: RankTimeline) -> list[list[tuple[str, int]]]:
    """Return what a rank ran in each step, in the order of starts."""
    passes = timeline.passes
    orders = []
    for step in timeline.steps:
        here = passes.where((passes.rank == rank.rank) & (passes.step == step))
        order = np.argsort(here.start_ns, kind="stable")
        orders.append(
            [
                (PassKind(kind).name, number)
                for kind, number in zip(
                    here.kind[order].tolist(), here.microbatch[order].tolist(), strict=True
                )
            ]
        )
    return orders
