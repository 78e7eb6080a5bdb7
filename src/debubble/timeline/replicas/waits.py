"""Cells in → how late each replica came to each of them, and how long each rank waited there."""

from __future__ import annotations

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
