"""Cells in → who waits for whom, what evening them out would save, and how sure that is.

A collective begins on a replica when its gradients are there and the group's collective before it
is through; it ends when all have begun and the data has gone around. Compute that waited for an
earlier collective moves with it: weights that are gathered layer by layer keep replicas in step.

Two questions, either of which may answer: is it last in more steps than chance lets it (which asks
nothing of the noise, but takes ten steps of two replicas), and is its lead larger than what steps
differ by (Student's test, the noise pooled over all replicas). Each is asked of the worst of all
replicas, so each is held to its share of the error.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from debubble.timeline.model import F64, I64
from debubble.timeline.replicas.cells import Cells


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrivals:
    """Where each replica stood in each step; arrays are by step and replica, NaN if unknown."""

    steps: tuple[int, ...]
    late_ns: F64
    """Later than the middle of the others, at the group whose reduction ends last on it."""
    last: F64
    """1 where no other came later."""
    waited_ns: F64
    """By all its ranks, in all groups, with nothing computed meanwhile."""


def measure_arrivals(cells: Sequence[Cells], steps: Sequence[int], replicas: int) -> Arrivals:
    """Put each replica's deciding group of each step together."""
    columns: dict[str, list[F64]] = {}
    for one in cells:
        length = one.end_ns - one.start_ns
        together = length.min(axis=(1, 2), keepdims=True)
        waited = np.maximum(one.exposed_ns - together, 0).sum(axis=3)
        arrival = length.min(axis=2)
        late = (middle_of_others(arrival) - arrival).sum(axis=2)
        last = late == late.max(axis=1, keepdims=True)
        lanes = one.rank.shape
        for name, column in {
            "step": np.broadcast_to(one.step[:, None, None], lanes),
            "pipeline": one.pipeline,
            "replica": np.broadcast_to(one.replica[:, :, None], lanes),
            "ends": one.end_ns[..., -1],
            "waited": waited,
            "late": np.broadcast_to(late[:, :, None], lanes),
            "last": np.broadcast_to(last[:, :, None], lanes),
        }.items():
            columns.setdefault(name, []).append(column.ravel())
    rows = {name: np.concatenate(parts) for name, parts in columns.items()}
    row_step = np.searchsorted(np.array(steps), rows["step"])
    row_replica = rows["replica"].astype(np.int64)
    waited_ns = np.zeros((len(steps), replicas))
    np.add.at(waited_ns, (row_step, row_replica), rows["waited"])
    deciding = _deciding(rows)
    at = row_step[deciding], row_replica[deciding]
    return Arrivals(
        steps=tuple(steps),
        late_ns=_mean_at(at, rows["late"][deciding], waited_ns.shape),
        last=_mean_at(at, rows["last"][deciding], waited_ns.shape),
        waited_ns=waited_ns,
    )


def middle_of_others(values: F64 | I64) -> F64:
    """Return for each row of the second axis the median of all others."""
    count = values.shape[1]
    order = np.argsort(values, axis=1, kind="stable")
    place = np.argsort(order, axis=1, kind="stable")
    ordered = np.take_along_axis(values, order, axis=1)

    def other(number: int) -> F64 | I64:
        """Return the n-th of the others."""
        lower, upper = ordered[:, number : number + 1], ordered[:, number + 1 : number + 2]
        return np.where(place <= number, upper, lower)

    half = (count - 1) // 2
    if count % 2:
        return np.asarray((other(half - 1) + other(half)) / 2)
    return np.asarray(other(half), dtype=np.float64)


def spread_of_ends(cells: Sequence[Cells]) -> float:
    """Return by how much members differ about the time between two ends, in the middle."""
    found = []
    for one in cells:
        known = (one.since_ns >= 0).all(axis=(1, 2))
        spread = one.since_ns.max(axis=(1, 2)) - one.since_ns.min(axis=(1, 2))
        found.append(spread[known])
    every = np.concatenate(found) if found else np.zeros(0)
    return float(np.median(every)) if len(every) else 0.0


def _deciding(rows: dict[str, F64]) -> I64:
    """Return the row of each pipeline and step that ends last on its clock."""
    order = np.lexsort((rows["ends"], rows["pipeline"], rows["step"]))
    key = np.stack((rows["step"], rows["pipeline"]))[:, order]
    ends = np.append((key[:, 1:] != key[:, :-1]).any(axis=0), True)
    found: I64 = order[ends]
    return found


def _mean_at(at: tuple[I64, I64], values: F64, shape: tuple[int, ...]) -> F64:
    total, count = np.zeros(shape), np.zeros(shape)
    np.add.at(total, at, values)
    np.add.at(count, at, 1)
    mean: F64 = np.divide(total, count, out=np.full(shape, np.nan), where=count > 0)
    return mean


# A collective that begins so soon after the one before it was queued behind it.
_QUEUED_NS = 50_000


def replay_without(cells: Cells, replica: int) -> tuple[I64, F64]:
    """Return the cells that a replica is in, and how much sooner each would end, in ns."""
    which = np.flatnonzero((cells.replica == replica).any(axis=1))
    mine = (cells.replica[which] == replica).argmax(axis=1)
    length = (cells.end_ns - cells.start_ns)[which].min(axis=2)
    ends = _common_ends(cells.end_ns[which])
    ready = ends[:, None] - (cells.end_ns[which] - _ready(cells, which)).min(axis=2)
    takes = length.min(axis=1)
    as_was = _play(ready, takes)
    sooner = _sooner(ready, takes, as_was, _waited_for(cells, which), mine)
    return which, as_was[:, -1] - sooner[:, -1]


def _common_ends(end_ns: I64) -> F64:
    """Return when each collective ended, from the first one's end; members agree about that."""
    since = end_ns - end_ns[..., :1]
    return np.asarray(np.median(since.reshape(len(since), -1, since.shape[-1]), axis=1))


def _ready(cells: Cells, which: I64) -> I64:
    """Return when each rank was ready: when it began, where it did not queue."""
    start, end, ready = cells.start_ns[which], cells.end_ns[which], cells.ready_ns[which]
    queued = np.zeros(start.shape, dtype=bool)
    queued[..., 1:] = start[..., 1:] - end[..., :-1] < _QUEUED_NS
    return np.where(queued, ready, start)


def _waited_for(cells: Cells, which: I64) -> I64:
    """Return the last collective whose end each one's replica had waited for; -1 for none.

    Each rank tells by its own clock whether one had ended when the next was ready.
    """
    end, ready = cells.end_ns[which], _ready(cells, which)
    blocks = cells.blocks[which].any(axis=2)
    found = np.full(blocks.shape, -1)
    latest = np.maximum.accumulate(np.where(blocks, np.arange(blocks.shape[2]), -1), axis=2)
    for number in range(1, blocks.shape[2]):
        over = (end[..., :number] <= ready[..., number, None]).sum(axis=3).min(axis=2) - 1
        known = np.take_along_axis(latest, np.maximum(over, 0)[..., None], axis=2)[..., 0]
        found[..., number] = np.where(over >= 0, known, -1)
    return found


def _play(ready: F64, takes: I64) -> F64:
    """Return the ends of collectives, each behind the one before it."""
    ends = np.zeros(takes.shape)
    free = np.full(len(takes), -np.inf)
    for number in range(takes.shape[1]):
        free = np.maximum(ready[:, :, number].max(axis=1), free) + takes[:, number]
        ends[:, number] = free
    return ends


def _sooner(ready: F64, takes: I64, as_was: F64, waited_for: I64, mine: I64) -> F64:
    """Play again with one replica in the middle of the others, compute moved where it waited."""
    cells = np.arange(len(takes))
    ends = np.zeros(takes.shape)
    gained = np.zeros(takes.shape)
    free = np.full(len(takes), -np.inf)
    for number in range(takes.shape[1]):
        before = waited_for[:, :, number]
        moved = gained[cells[:, None], np.maximum(before, 0)]
        begins = ready[:, :, number] - np.where(before >= 0, moved, 0)
        others = begins.copy()
        others[cells, mine] = np.nan
        begins[cells, mine] = np.fmin(begins[cells, mine], np.nanmedian(others, axis=1))
        free = np.maximum(begins.max(axis=1), free) + takes[:, number]
        ends[:, number] = free
        gained[:, number] = as_was[:, number] - free
    return ends


# How often equal replicas may be told apart, over both questions: tests/timeline counts.
ERROR = 0.005
FEWEST_STEPS = 2
# Of two steps that both had a spike, Student's test of 16 replicas named one in 50 runs of equals.
_FEWEST_FOR_STUDENT = 3
# Beyond so many degrees of freedom Student's distribution no longer moves.
_MOST_FREEDOM = 400


def surely_late(late_ns: F64, last: F64, replica: int) -> bool:
    """Tell whether a replica's lead is no accident; never of a single step."""
    mine = late_ns[:, replica]
    known = np.flatnonzero(np.isfinite(late_ns).any(axis=0))
    replica = int(np.searchsorted(known, replica))
    late_ns, last = late_ns[:, known], last[:, known]
    steps = int(np.isfinite(mine).sum())
    if steps < FEWEST_STEPS or np.nanmean(mine) <= 0:
        return False
    replicas = late_ns.shape[1]
    chance = chance_of_last(int(np.nansum(last[:, replica] == 1)), steps, replicas)
    return bool(min(chance, _chance_of_lead(late_ns, replica)) * replicas <= ERROR / 2)


def chance_of_last(times: int, steps: int, replicas: int) -> float:
    """Return how likely one of equal replicas is last in so many steps, or more."""
    one = 1 / replicas
    return math.fsum(
        math.comb(steps, n) * one**n * (1 - one) ** (steps - n) for n in range(times, steps + 1)
    )


def _chance_of_lead(late_ns: F64, replica: int) -> float:
    steps, replicas = late_ns.shape
    if steps < _FEWEST_FOR_STUDENT:
        return 1.0
    off = late_ns - np.nanmean(late_ns, axis=0)
    freedom = (steps - 1) * (replicas - 1)
    pooled = float(np.nansum(off**2)) / (freedom * replicas / (replicas - 1))
    own = float(np.nansum(off[:, replica] ** 2)) / (steps - 1)
    noise = math.sqrt(max(pooled, own) / steps)
    lead = float(np.nanmean(late_ns[:, replica]))
    return student_tail(lead / noise, freedom) if noise else 0.0


def student_tail(t: float, freedom: int) -> float:
    """Return how likely Student's t is larger, by its finite series for whole degrees."""
    freedom = min(freedom, _MOST_FREEDOM)
    angle = math.atan(t / math.sqrt(freedom))
    sine, square = math.sin(angle), math.cos(angle) ** 2
    odd = freedom % 2
    term = math.cos(angle) if odd else 1.0
    total = 0.0
    for number in range(1 + odd, freedom, 2):
        total += term
        term *= square * number / (number + 1)
    within = 2 / math.pi * (angle + sine * total) if odd else sine * total
    return max(0.0, (1 - within) / 2)
