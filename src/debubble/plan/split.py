"""The lever of layers: who holds which."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from debubble.costs.passes import PassModel
from debubble.errors import UsageError
from debubble.plan.baseline import Baseline, stages_of
from debubble.plan.change import Change
from debubble.plan.partition import Partition, find_partition
from debubble.plan.split_problem import Room, SplitProblem, Work, room_for, split_problem, turns_of
from debubble.simulate.engine import covered_ns
from debubble.simulate.predict import extra_layers, mean_lengths, usual_factor
from debubble.timeline.model import F64, I64, PassKind
from debubble.units import NS_PER_S

# Splits at a time: more columns than these fit no cache.
_AT_ONCE = 100
# Until slowed passes and the messages beside them agree.
_ROUNDS = 4


def quick_latency_s(baseline: Baseline, change: Change) -> float:
    """Return the batch latency of a change, every pass and message at its mean."""
    engine = baseline.engine(change)
    lengths = mean_lengths(engine.program, baseline.source, baseline.what_if(change))
    return float(engine.windows(lengths)[0]) * baseline.correction / NS_PER_S


def slowed_latencies_s(
    baseline: Baseline, change: Change, slowdowns: F64, free_share: float = 1.0
) -> F64:
    """Return the same for several slowdowns of compute beside messages.

    `free_share` is what passes would take, against now, if no message had been beside them.
    """
    engine = baseline.engine(change)
    lengths = mean_lengths(engine.program, baseline.source, baseline.what_if(change))
    alone = lengths.passes[:, None] * np.full(len(slowdowns), free_share)
    beside = np.zeros_like(alone)
    for _ in range(_ROUNDS):
        times = engine.run(replace(lengths, passes=np.rint(alone + beside).astype(np.int64)))
        beside = (1 - 1 / slowdowns) * covered_ns(engine.program, times)
    latencies: F64 = times.window_ns * baseline.correction / NS_PER_S
    return latencies


def time_splits(baseline: Baseline, change: Change) -> Callable[[I64], F64]:
    """Return a function from splits, a row each, to their latencies in seconds."""
    what_if = baseline.what_if(change)
    engine = baseline.engine(change)
    program, stages = engine.program, len(what_if.layers)
    extra = extra_layers(program, baseline.source.passes)[:, None]
    unit = mean_lengths(program, baseline.source, replace(what_if, layers=(1.0,) * stages))
    one_layer = unit.passes[:, None] / (1 + extra)

    def latencies(splits: I64) -> F64:
        found = []
        for begin in range(0, len(splits), _AT_ONCE):
            held = splits[begin : begin + _AT_ONCE].T[program.passes.stage] + extra
            passes = np.rint(one_layer * held).astype(np.int64)
            found.append(engine.windows(replace(unit, passes=passes)))
        return np.concatenate(found) * baseline.correction / NS_PER_S

    return latencies


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
