"""Ranks in → doubts about what was told of them: of messages without kernels, of hidden passes."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from debubble.errors import Code, Gap, Touch
from debubble.timeline.model import PassKind
from debubble.timeline.passes import Assignment
from debubble.timeline.steps import RankRecord
from debubble.trace.columns import Operation, RankTrace
from debubble.trace.communication import SENDS_BY_KERNELS

# As torch, its compiler, cuDNN and libraries of attention call kernels of backward passes.
_BACKWARD = re.compile(r"backward|_bwd|bprop|[dw]grad", re.IGNORECASE)


def doubt_messages(traces: Sequence[RankTrace]) -> list[Gap]:
    """Name ranks whose messages lost all their kernels: only the calls of their hosts are known.

    So where a profiler lost buffers, or somebody thinned a trace out.
    """
    return [
        Gap(
            code=Code.LOST_OPERATORS,
            message="none of its messages has a kernel, though NCCL sends by kernels",
            hint="record the rank again",
            file=trace.file,
            rank=trace.rank,
            only=frozenset({Touch.MESSAGES}),
        )
        for trace in traces
        if len(trace.kernels) and trace.header.backend in SENDS_BY_KERNELS and _lost_all(trace)
    ]


def _lost_all(trace: RankTrace) -> bool:
    moves = np.isin(trace.operators.operation, (Operation.SEND, Operation.RECEIVE))
    return bool(moves.any() and not (trace.operators.kernel[moves] >= 0).any())


def doubt_passes(assigned: Sequence[tuple[RankRecord, Assignment]]) -> list[Gap]:
    """Name ranks that train, by the names of their kernels, where no pass is told as backward.

    Autograd's own thread tells backward passes, or labels do. It runs on the caller's where
    `torch.autograd.set_multithreading_enabled(False)` says so.
    """
    if any((passes.kind > PassKind.F).any() for _, passes in assigned):
        return []
    trains = []
    for rank, _ in assigned:
        named = [_BACKWARD.search(name) is not None for name in rank.trace.names] or [False]
        ran = len(rank.trace.kernels) and np.array(named)[rank.work.name].any()
        trains += [rank.trace] if ran else []
    return [
        Gap(
            code=Code.WRONG_FIELDS,
            message="it runs kernels of backward passes, and no pass is told as one: "
            "its threads are not those that it had, or no step of it is whole",
            hint="record whole steps, and threads as they are; or label passes",
            file=trace.file,
            rank=trace.rank,
            only=frozenset({Touch.TIMES, Touch.LAYERS}),
        )
        for trace in trains
    ]
