"""Passes and messages in → which message is whose result, and which pass needs it."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from debubble.simulate.program import NONE, BatchTable, MessageTable, PassTable
from debubble.timeline.model import I64, PassKind

Need = tuple[int, int, int]
"""Stage, direction (0 forward, 1 backward) and microbatch of a result."""


def link_messages(
    passes: PassTable, messages: MessageTable, batches: BatchTable
) -> tuple[I64, I64, int]:
    """Return the pass that made each message, the pass that needs it, and how many are left over.

    From one rank to another results go in the order in which they were made. Where a result goes in
    several messages, each pass has as many.
    """
    producer = np.full(len(messages), NONE)
    consumer = np.full(len(messages), NONE)
    takers = consumers_of(passes)
    made: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for row, result in enumerate(results_of(passes)):
        taker = takers.get(result) if result else None
        if taker is not None and passes.place[taker] != passes.place[row]:
            made[int(passes.place[row]), int(passes.place[taker])].append((row, taker))
    unlinked = 0
    source, destination = batches.place[messages.sent], batches.place[messages.received]
    for (here, there), pairs in made.items():
        rows = np.flatnonzero((source == here) & (destination == there))
        rows = rows[np.argsort(messages.sent[rows], kind="stable")]  # batches stand in their order
        if len(rows) % len(pairs):
            unlinked += len(rows)
        elif len(rows):
            each = len(rows) // len(pairs)
            producer[rows] = np.repeat([made_by for made_by, _ in pairs], each)
            consumer[rows] = np.repeat([taker for _, taker in pairs], each)
    return producer, consumer, unlinked


def results_of(passes: PassTable) -> list[Need | None]:
    """Return what each pass hands on to a neighbouring stage; a weight gradient nothing."""
    found: list[Need | None] = []
    for stage, kind, microbatch in _rows(passes):
        if kind == PassKind.W:
            found.append(None)
        elif kind == PassKind.F:
            found.append((stage + 1, 0, microbatch))
        else:
            found.append((stage - 1, 1, microbatch))
    return found


def consumers_of(passes: PassTable) -> dict[Need, int]:
    """Return the pass that each result is needed by.

    Where the input gradient of the first stage has no kernels, its weight gradient is all there is.
    """
    found: dict[Need, int] = {}
    for row, (stage, kind, microbatch) in enumerate(_rows(passes)):
        if kind == PassKind.W:
            found.setdefault((stage, 1, microbatch), row)
        else:
            found[stage, int(kind != PassKind.F), microbatch] = row
    return found


def inputs_of(passes: PassTable, messages: MessageTable) -> I64:
    """Return pairs of a pass and the pass whose result it needs, where no message tells of it."""
    told = set(zip(messages.consumer.tolist(), messages.producer.tolist(), strict=True))
    takers = consumers_of(passes)
    pairs = [
        (takers[result], row)
        for row, result in enumerate(results_of(passes))
        if result in takers and (takers[result], row) not in told
    ]
    return np.array(pairs, dtype=np.int64).reshape(-1, 2)


def _rows(passes: PassTable) -> list[tuple[int, int, int]]:
    return list(
        zip(passes.stage.tolist(), passes.kind.tolist(), passes.microbatch.tolist(), strict=True)
    )
