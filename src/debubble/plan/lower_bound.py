"""A split problem in → what no run can beat: of one split, and of all of them.

A rank has to do all of its passes. Before its first, a microbatch comes through the stages before
it; after its last backward pass it has to go back through them. Forward only, it goes on through
the stages after it. Where the order is known, so is how long a stage waits to turn. Transfers are
taken to be free, so that what is said holds for any link.
"""

from __future__ import annotations

import numpy as np

from debubble.plan.min_max import min_max
from debubble.plan.split_problem import (
    SplitProblem,
    fits_alone,
    seconds_of_blocks,
    seconds_of_splits,
)
from debubble.plan.turns import span_at_least
from debubble.timeline.model import F64, I64


def bound_splits(problem: SplitProblem, splits: I64) -> F64:
    """Return a time for each split that no order of its passes can beat."""
    layers, stages = problem.layers, problem.stages
    forward, backward, weight = (
        seconds_of_splits(problem, splits, of_layers, of_stages)
        for of_layers, of_stages in (
            (layers.forward, stages.forward),
            (layers.backward, stages.backward),
            (layers.weight, stages.weight),
        )
    )
    both = forward + backward
    away = np.cumsum(both, axis=1) - both
    bounds = [both.sum(axis=1), (problem.microbatches * both + away).max(axis=1)]
    for rank in range(problem.ranks):
        mine = np.flatnonzero(problem.rank == rank)
        first, last = int(mine[0]), int(mine[-1])
        waited = both[:, mine].sum(axis=1)
        lead = forward[:, :first].sum(axis=1)
        back = backward[:, :first].sum(axis=1)
        on = 0.0 if problem.trains else forward[:, last + 1 :].sum(axis=1)
        bounds += [
            problem.microbatches * waited + lead + back + on,
            problem.microbatches * (waited + weight[:, mine].sum(axis=1)) + lead,
        ]
    if problem.turns is not None:
        after = both.sum(axis=1, keepdims=True) - both - away
        of_stages = (forward.T, backward.T, after.T)
        spans = span_at_least(problem.turns, problem.microbatches, *of_stages)
        bounds.append((spans.T + away).max(axis=1))
    best: F64 = np.max(bounds, axis=0)
    return best


def bound_all(problem: SplitProblem) -> float:
    """Return a time that no split can beat, whatever the order."""
    return max(_bound_by_path(problem), _bound_by_stages(problem), _bound_by_average(problem))


def blocks_bound(problem: SplitProblem) -> F64:
    """Return, of each stage with layers i to j - 1, a time that no run can beat: [stage, i, j]."""
    layers, stages, m = problem.layers, problem.stages, problem.microbatches
    to_and_fro = layers.forward + layers.backward, stages.forward + stages.backward
    waited = seconds_of_blocks(problem, *to_and_fro)
    whole = seconds_of_blocks(problem, layers.whole, stages.whole)
    lead = least_before(problem, layers.forward, stages.forward)
    both = least_before(problem, *to_and_fro)
    after = least_after(problem, *to_and_fro)[1:, None, :]
    span = m * waited + (0.0 if problem.trains else after)
    if problem.turns is not None:
        forward = seconds_of_blocks(problem, layers.forward, stages.forward)
        span = np.maximum(span, span_at_least(problem.turns, m, forward, waited - forward, after))
    bounds = np.maximum(span + both[:-1, :, None], m * whole + lead[:-1, :, None])
    possible = np.triu(np.ones(bounds.shape[1:], dtype=bool), k=1)
    return np.where(possible & np.isfinite(bounds), bounds, np.inf)


def least_before(problem: SplitProblem, layers: F64, stages: F64) -> F64:
    """Return the least that stages before one can take for the layers before a place."""
    blocks = _possible(seconds_of_blocks(problem, layers, stages))
    least = np.full((problem.stage_count + 1, problem.layer_count + 1), np.inf)
    least[0, 0] = 0.0
    for stage in range(problem.stage_count):
        least[stage + 1] = (least[stage][:, None] + blocks[stage]).min(axis=0)
    return least


def least_after(problem: SplitProblem, layers: F64, stages: F64) -> F64:
    """Return the least that a stage and those after it can take for the layers from a place on."""
    blocks = _possible(seconds_of_blocks(problem, layers, stages))
    least = np.full((problem.stage_count + 1, problem.layer_count + 1), np.inf)
    least[problem.stage_count, problem.layer_count] = 0.0
    for stage in reversed(range(problem.stage_count)):
        least[stage] = (blocks[stage] + least[stage + 1][None, :]).min(axis=1)
    return least


def _bound_by_path(problem: SplitProblem) -> float:
    """Let one microbatch go all the way, alone."""
    layers, stages = problem.layers, problem.stages
    least = least_before(
        problem, layers.forward + layers.backward, stages.forward + stages.backward
    )
    return float(least[-1, -1])


def _bound_by_stages(problem: SplitProblem) -> float:
    """Let each stage be alone on its rank: then the best split for the bound is found exactly."""
    found = min_max(blocks_bound(problem), fits_alone(problem))
    return found.cost if found else float("inf")


def _bound_by_average(problem: SplitProblem) -> float:
    """Let layers be cut anywhere: at best all ranks work from when they can begin to the end."""
    layers, stages = problem.layers, problem.stages
    to_and_fro = layers.forward + layers.backward, stages.forward + stages.backward
    return max(
        _average(problem, to_and_fro, least_before(problem, *to_and_fro)),
        _average(
            problem,
            (layers.whole, stages.whole),
            least_before(problem, layers.forward, stages.forward),
        ),
    )


def _average(problem: SplitProblem, work: tuple[F64, F64], away: F64) -> float:
    """Share work out by speed, while each rank waits for the stages before its first."""
    of_layers, of_stages = work
    waits = away.min(axis=1)
    total, speed = problem.microbatches * float(of_layers.sum()), 0.0
    for rank in range(problem.ranks):
        mine = np.flatnonzero(problem.rank == rank)
        slowness = float(problem.slowness[mine].min())
        fixed = problem.microbatches * float(of_stages[mine].sum())
        total += (float(waits[mine[0]]) + fixed) / slowness
        speed += 1 / slowness
    return total / speed


def _possible(blocks: F64) -> F64:
    """Leave only runs of one layer or more."""
    return np.where(np.triu(np.ones(blocks.shape[1:], dtype=bool), k=1), blocks, np.inf)
