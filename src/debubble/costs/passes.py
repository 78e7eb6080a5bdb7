"""A `Timeline` in → what a pass of each stage and kind takes, and what it would on equal stages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from debubble.timeline.model import (
    I64,
    Intervals,
    Passes,
    PassKind,
    RankTimeline,
    no_intervals,
    without,
)

Key = tuple[int, int]
"""Stage and kind of a pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PassCosts:
    """Nanoseconds of a pass by stage and kind, collectives inside it left out."""

    median: dict[Key, int]
    equal: dict[Key, int]
    """The same if every stage took as long as any other."""
    first: dict[Key, int]
    """Of a step's first microbatch: it has no gradients to add its own to."""

    def typical(self, key: Key, microbatch: int) -> int:
        """Return what such a pass takes."""
        return self.first.get(key, self.median[key]) if microbatch == 0 else self.median[key]


def measure_passes(passes: Passes, ranks: tuple[RankTimeline, ...]) -> PassCosts:
    """Take medians over all steps of a pipeline."""
    passes = passes.where(np.isin(passes.rank, [rank.rank for rank in ranks]))
    lengths = passes.end_ns - passes.start_ns - inside_passes(passes, ranks, collectives_of)
    lengths -= inside_passes(passes, ranks, data_parallel_of)
    several_steps = len(np.unique(passes.step)) > 1
    median, first = {}, {}
    for stage, kind in sorted(set(zip(passes.stage.tolist(), passes.kind.tolist(), strict=True))):
        mine = (passes.stage == stage) & (passes.kind == kind)
        later = mine & (passes.microbatch > 0)
        median[stage, kind] = int(np.median(lengths[later if later.any() else mine]))
        if several_steps and kind in {PassKind.B, PassKind.W} and (mine & ~later).any():
            first[stage, kind] = int(np.median(lengths[mine & ~later]))
    return PassCosts(median=median, equal=equal_stages(median), first=first)


def equal_stages(median: dict[Key, int]) -> dict[Key, int]:
    """Return each kind's mean over the stages.

    The first stage needs no input gradient: its weight gradient may be its whole backward pass, and
    is held against both.
    """
    splits = any(kind == PassKind.I for _, kind in median)
    whole = {
        stage
        for stage, kind in median
        if splits and kind == PassKind.W and (stage, PassKind.I) not in median
    }
    lengths: dict[int, list[int]] = {}
    for (stage, kind), length in median.items():
        if kind != PassKind.W or stage not in whole:
            lengths.setdefault(kind, []).append(length)
    mean = {kind: round(sum(all_of) / len(all_of)) for kind, all_of in lengths.items()}
    both = mean.get(PassKind.I, 0) + mean.get(PassKind.W, 0)
    return {
        (stage, kind): both if kind == PassKind.W and stage in whole else mean[kind]
        for stage, kind in median
    }


def inside_passes(
    passes: Passes, ranks: tuple[RankTimeline, ...], of: Callable[[RankTimeline], Intervals]
) -> I64:
    """Return how long each pass was in some intervals of its rank."""
    inside = np.zeros(len(passes), dtype=np.int64)
    for rank in ranks:
        found = of(rank)
        if len(found.start_ns):
            for row in np.flatnonzero(passes.rank == rank.rank).tolist():
                inside[row] = found.inside(int(passes.start_ns[row]), int(passes.end_ns[row]))
    return inside


def collectives_of(rank: RankTimeline) -> Intervals:
    """Return when a rank was in a collective of its passes that no compute covered."""
    occupied, busy = rank.occupied, rank.busy
    if np.array_equal(occupied.start_ns, busy.start_ns) and np.array_equal(
        occupied.end_ns, busy.end_ns
    ):
        return no_intervals()
    return without(without(occupied, busy), rank.data_parallel)


def data_parallel_of(rank: RankTimeline) -> Intervals:
    """Return when a rank was in a gather or reduction beside its passes that nothing covered."""
    return rank.data_parallel
