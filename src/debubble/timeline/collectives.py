"""One rank's trace in → what it reduces and gathers with others, and what of it nothing covers.

Small columns, made where the trace is; `replicas/` joins those of all ranks.
"""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np

from debubble.timeline.model import I64, CollectiveKind, Flags, Intervals, RankCollectives
from debubble.timeline.steps import Steps
from debubble.timeline.work import BEFORE_CAPTURE, Work, find_carried_out
from debubble.trace.columns import Operation, RankTrace

# As torch, NCCL and gloo spell them: `c10d::allreduce_`, `_reduce_scatter_base_`, `AllGather`.
_KINDS = (
    (re.compile(r"reduce_?scatter", re.IGNORECASE), CollectiveKind.REDUCE_SCATTER),
    (re.compile(r"all_?gather", re.IGNORECASE), CollectiveKind.ALL_GATHER),
    (re.compile(r"all_?reduce", re.IGNORECASE), CollectiveKind.ALL_REDUCE),
)
_OTHER = 255


def collectives_of(
    trace: RankTrace, work: Work, busy: Intervals, steps: Steps, in_forward: Flags
) -> RankCollectives | None:
    """List a rank's reductions and gathers; `in_forward` tells which work is of a forward pass.

    None where there are none.
    """
    kinds = np.array([_kind_of(name) for name in trace.names] or [_OTHER], dtype=np.uint8)
    rows, issued, start, end = _on_device(trace) if len(trace.kernels) else _on_host(trace)
    kind = kinds[trace.operators.name[rows]]
    kept = kind != _OTHER
    if not kept.any():
        return None
    order = np.flatnonzero(kept)[np.argsort(issued[kept], kind="stable")]
    rows, issued, start, end = rows[order], issued[order], start[order], end[order]
    return RankCollectives(
        groups=trace.groups,
        group=trace.operators.group[rows],
        kind=kind[order],
        step=steps.at(issued),
        ready_ns=np.minimum(np.maximum(issued, _computed_before(work, issued)), start),
        start_ns=start,
        end_ns=end,
        exposed_ns=end - start - (_covered_until(busy, end) - _covered_until(busy, start)),
        blocks=_covered_until(busy, end) == _covered_until(busy, end - 1),
        in_forward=_in_forward(work, in_forward, issued),
        message_bytes=trace.operators.message_bytes[rows],
    )


def shift_collectives(found: RankCollectives | None, offset_ns: int) -> RankCollectives | None:
    """Lay them on the pipeline's clock."""
    if found is None:
        return None
    return replace(
        found,
        ready_ns=found.ready_ns + offset_ns,
        start_ns=found.start_ns + offset_ns,
        end_ns=found.end_ns + offset_ns,
    )


def _kind_of(name: str) -> int:
    return next((kind for pattern, kind in _KINDS if pattern.search(name)), _OTHER)


def _on_device(trace: RankTrace) -> tuple[I64, I64, I64, I64]:
    """Return the operators whose kernel is there, when it was issued, and when it ran.

    A coalesced batch is one kernel: its first operator stands for all.
    """
    operators, kernels, launches = trace.operators, trace.kernels, trace.launches
    candidates = np.flatnonzero(
        (operators.operation == Operation.COLLECTIVE) & (operators.kernel >= 0)
    )
    _, first = np.unique(operators.kernel[candidates], return_index=True)
    rows = candidates[first]
    kernel = operators.kernel[rows]
    launch = kernels.launch[kernel]
    issued = operators.start_ns[rows].copy()
    if len(launches):
        issued = np.where(launch >= 0, launches.start_ns[np.maximum(launch, 0)], issued)
    start = kernels.start_ns[kernel]
    return rows, issued, start, start + kernels.duration_ns[kernel]


def _on_host(trace: RankTrace) -> tuple[I64, I64, I64, I64]:
    carried, issued = find_carried_out(trace)
    rows = np.flatnonzero(carried)
    start = trace.operators.start_ns[rows]
    return rows, issued, start, start + trace.operators.duration_ns[rows]


def _computed_before(work: Work, issued: I64) -> I64:
    """Return when all compute had ended that was issued before each moment."""
    computes = ~work.collective
    ends = np.maximum.accumulate(work.end_ns[computes])
    row = np.searchsorted(work.issued_ns[computes], issued, side="left") - 1
    if not len(ends):
        return np.full(len(issued), BEFORE_CAPTURE)
    return np.where(row >= 0, ends[np.maximum(row, 0)], BEFORE_CAPTURE)


def _covered_until(busy: Intervals, moments: I64) -> I64:
    """Return how much compute there was until each moment."""
    if not len(busy.start_ns):
        return np.zeros(len(moments), dtype=np.int64)
    before = np.concatenate(([0], np.cumsum(busy.end_ns - busy.start_ns)))
    row = np.searchsorted(busy.start_ns, moments, side="right") - 1
    inside = np.minimum(moments, busy.end_ns[row]) - busy.start_ns[row]
    return np.where(row >= 0, before[row] + inside, 0)


def _in_forward(work: Work, in_forward: Flags, issued: I64) -> Flags:
    """Tell which collectives are work of a forward pass."""
    rows = np.flatnonzero(work.collective)
    if not len(rows):
        return np.zeros(len(issued), dtype=bool)
    row = rows[np.minimum(np.searchsorted(work.issued_ns[rows], issued), len(rows) - 1)]
    same: Flags = work.issued_ns[row] == issued
    return same & in_forward[row]
