"""Cells in → how much sooner they would end if one replica came with the middle of the others.

A collective begins on a replica when its gradients are there and the group's collective before it
is through; it ends when all have begun and the data has gone around. Compute that waited for an
earlier collective moves with it: weights that are gathered layer by layer keep replicas in step.
"""

from __future__ import annotations

import numpy as np

from debubble.timeline.model import F64, I64
from debubble.timeline.replicas.cells import Cells

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
