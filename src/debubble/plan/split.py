"""The lever of the split: which stage holds how many layers."""

from __future__ import annotations

import numpy as np

from debubble.costs.pass_model import PassModel
from debubble.errors import UsageError
from debubble.plan.baseline import Baseline
from debubble.plan.change import Change
from debubble.plan.partition import Partition, find_partition
from debubble.plan.prepared import stages_of
from debubble.plan.quick import time_splits
from debubble.plan.room import room_for
from debubble.plan.split_problem import Room, SplitProblem, Work, split_problem
from debubble.plan.turns import turns_of
from debubble.simulate.predict import usual_factor
from debubble.timeline.model import F64, PassKind
from debubble.units import NS_PER_S

# Ranks of one kind differ by a tenth or two; a layer counted wrongly, by a layer or more.
_MOST_APART = 2.5


def best_split(
    baseline: Baseline,
    change: Change,
    *,
    room: Room | None = None,
    near: tuple[int, ...] | None = None,
) -> Partition:
    """Return the best split for a change; the one in use is never bettered by a worse one.

    `room` stands for what memory has room for; by default for what the change needs. `near` is the
    best split for a like change, which makes the search a short one.
    """
    source = baseline.source
    if source.split is None:
        raise UsageError(
            "how many layers each stage has is not known",
            hint="say it with --layers, such as 4,4,4,4",
        )
    _refuse_unlike(source.passes)
    order = baseline.what_if(change).order
    problem = _problem(baseline, change, room)
    given = source.split if stages_of(order) == len(source.split) else None
    found: Partition = find_partition(
        problem, time_splits(baseline, change), given=given, near=near
    )
    return found


def _refuse_unlike(model: PassModel) -> None:
    """Refuse layers that are none: alike, they do not take several times as long on one stage."""
    bases = [
        base for (kind, first, _), base in model.base.items() if kind == PassKind.F and not first
    ]
    apart = float(np.exp(max(bases) - min(bases))) if bases else 1.0
    if apart > _MOST_APART:
        raise UsageError(
            f"a layer takes {apart:.1f} times as long on one stage as on another: these layers are"
            " not alike",
            hint="say how many each stage holds with --layers",
        )


def _problem(baseline: Baseline, change: Change, room: Room | None) -> SplitProblem:
    """Write the run as layers to be cut; seeds and bounds are made of it."""
    source, order = baseline.source, baseline.what_if(change).order
    layers, stages = sum(source.split or ()), stages_of(order)
    home = {action.stage: rank for rank, actions in enumerate(order) for action in actions}
    often = baseline.correction * usual_factor(source) * baseline.microbatch_scale(change)
    forward = _layer_s(source.passes, PassKind.F) * often
    backward = _backward_s(source.passes) * often
    more = {kind: np.zeros(stages) for kind in (PassKind.F, PassKind.B)}
    for kind, extra in more.items():
        extra[0], extra[-1] = source.passes.besides_layers(kind)
    limits = [
        limit - (others or 0)
        for limit, others in zip(baseline.limits, baseline.others, strict=True)
        if limit is not None
    ]
    if room is None and baseline.memory is not None and len(limits) == len(baseline.limits):
        room = room_for(
            baseline.memory,
            order,
            layers=layers,
            limit_bytes=limits,
            token_scale=baseline.microbatch_scale(change),
        )
    rank = np.array([home[stage] for stage in range(stages)], dtype=np.int64)
    slowness = _slowness(source.passes, len(order))[rank]
    return split_problem(
        np.full(layers, forward),
        np.full(layers, backward),
        rank=rank,
        microbatches=change.microbatches or source.microbatches,
        stages=Work(
            forward=more[PassKind.F] * forward * slowness,
            backward=more[PassKind.B] * backward * slowness,
            weight=np.zeros(stages),
        ),
        slowness=slowness,
        room=room,
        turns=turns_of(order),
    )


def _layer_s(model: PassModel, kind: int) -> float:
    """Return the least of the ranks: a bound must not exceed the truth."""
    bases = [base for (of, _, _), base in model.base.items() if of == kind]
    return float(np.exp(min(bases))) / NS_PER_S if bases else 0.0


def _slowness(model: PassModel, ranks: int) -> F64:
    """Return how many times as long a layer takes on each rank as on the quickest, at least."""
    quickest: dict[tuple[int, bool], float] = {}
    for (kind, first, _), base in model.base.items():
        quickest[kind, first] = min(base, quickest.get((kind, first), np.inf))
    slower = np.full(ranks, np.inf)
    for (kind, first, place), base in model.base.items():
        slower[place] = min(slower[place], base - quickest[kind, first])
    found: F64 = np.exp(np.where(np.isfinite(slower), slower, 0.0))
    return found


def _backward_s(model: PassModel) -> float:
    if model.splits_backward:
        return _layer_s(model, PassKind.I) + _layer_s(model, PassKind.W)
    return _layer_s(model, PassKind.B)
