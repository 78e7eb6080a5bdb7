"""A cost for every stage and every run of layers in → the split whose dearest stage is cheapest."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from debubble.plan.split_problem import SplitProblem, bytes_of_blocks, fits_alone
from debubble.timeline.model import F64, I64

Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class MinMax:
    """The best that splits can do for their dearest stage; exact."""

    split: tuple[int, ...]
    cost: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Misfit:
    """Why no split fits."""

    stage: int
    """The stage that lacks least; where no one stage's memory would help, the first to overflow."""
    lacking_bytes: float | None
    """How much more this stage alone would need; None where more than one needs more."""


def min_max(blocks: F64, fits: Flags) -> MinMax | None:
    """Return the split with the least maximum of `blocks[stage, i, j]`; None if none fits."""
    cost = np.where(fits, blocks, np.inf)
    stages, size, _ = cost.shape
    best = np.full(size, np.inf)
    best[0] = -np.inf
    chosen: list[I64] = []
    for stage in range(stages):
        reach = np.maximum(best[:, None], cost[stage])
        first = reach.argmin(axis=0)
        chosen.append(first)
        best = reach[first, np.arange(size)]
    if not np.isfinite(best[-1]):
        return None
    split, end = [], size - 1
    for first in reversed(chosen):
        split.append(end - int(first[end]))
        end = int(first[end])
    return MinMax(split=tuple(reversed(split)), cost=float(best[-1]))


def find_misfit(problem: SplitProblem) -> Misfit | None:
    """Return the stage that keeps every split from fitting; None where stage by stage one fits."""
    if problem.room is None:
        return None
    fits = fits_alone(problem)
    stages, layers = problem.stage_count, problem.layer_count
    ahead = np.zeros((stages + 1, layers + 1), dtype=bool)
    """Whether the stages before one can hold the layers before a place."""
    behind = np.zeros((stages + 1, layers + 1), dtype=bool)
    ahead[0, 0] = behind[stages, layers] = True
    for stage in range(stages):
        ahead[stage + 1] = (ahead[stage][:, None] & fits[stage]).any(axis=0)
    if ahead[stages, layers]:
        return None
    for stage in reversed(range(stages)):
        behind[stage] = (fits[stage] & behind[stage + 1][None, :]).any(axis=1)
    return _least_lacking(problem, ahead, behind)


def _least_lacking(problem: SplitProblem, ahead: Flags, behind: Flags) -> Misfit:
    assert problem.room is not None  # noqa: S101 (for the type checker: the caller looked)
    size = problem.layer_count + 1
    over = (
        bytes_of_blocks(problem.room)
        - problem.room.cap_bytes[problem.rank][:, None, None]
        + np.where(np.triu(np.ones((size, size), dtype=bool), k=1), 0.0, np.inf)
    )
    lacking = np.array(
        [
            np.where(ahead[stage][:, None] & behind[stage + 1][None, :], over[stage], np.inf).min()
            for stage in range(problem.stage_count)
        ]
    )
    stage = int(lacking.argmin())
    if np.isfinite(lacking[stage]):
        return Misfit(stage=stage, lacking_bytes=float(lacking[stage]))
    held = [bool(ahead[stage + 1].any()) for stage in range(problem.stage_count)]
    first = held.index(False) if False in held else problem.stage_count - 1
    return Misfit(stage=first, lacking_bytes=None)
