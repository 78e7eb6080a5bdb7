"""What a rank does between two steps in → how long each kind of it takes.

Optimizer, clipping, reductions and data loading lie outside the window: they are no bubble, and
no schedule of the pipeline removes them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean, median

import numpy as np

from debubble.timeline.bubble import Window
from debubble.timeline.model import I32, I64, Flags, Intervals, RankTimeline
from debubble.timeline.work import Work
from debubble.trace.busy import merge
from debubble.trace.columns import RankTrace

# An instant that is two things at once counts as the first of them.
OPTIMIZER, REDUCTION, CLIPPING, DATA_LOADING = "optimizer", "reduction", "clipping", "data_loading"
OTHER = "other"

_OPTIMIZER = re.compile(r"^Optimizer\.(?:step|zero_grad)#")
_DATA_LOADING = re.compile(r"^enumerate\(DataLoader\)#")
# The operators and kernels of `clip_grad_norm_` and of `GradScaler`, on a CPU and on a GPU. Where a
# step has an optimizer, whatever else comes after its passes is of the kind, too.
_CLIPPING = re.compile(
    r"foreach_norm|vector_norm|LpNorm|foreach_mul_|ScalarTensorFunctor|clamp|clip_grad"
    r"|non_finite|unscale|amp_update_scale",
    re.IGNORECASE,
)


def lies_outside(trace: RankTrace, work: Work, in_pass: Flags, step: I32) -> Flags:
    """Tell which work is known to be none of the pipeline's, although it may run in its window.

    Not among it are collectives issued while a rank runs its passes, gathers of sharded parameters
    and reductions of gradients, and what follows the passes of a step that has no optimizer: torch
    scales gradients so.
    """
    outside = np.zeros(len(work), dtype=bool)
    for _, flags in _kinds(trace, work, in_pass, step):
        outside |= flags
    return outside


def find_outside(
    trace: RankTrace, work: Work, in_pass: Flags, step: I32
) -> tuple[tuple[str, Intervals], ...]:
    """Name what a rank does besides its passes; the first of two names wins."""
    found = {name: _union(work, flags) for name, flags in _kinds(trace, work, in_pass, step)}
    if not len(trace.kernels):  # where there are kernels, the host's call is no measure of theirs
        called, ran = _annotated(trace, _OPTIMIZER), found[OPTIMIZER]
        found[OPTIMIZER] = _joined(
            np.concatenate((ran.start_ns, called.start_ns)),
            np.concatenate((ran.end_ns, called.end_ns)),
        )
    found[DATA_LOADING] = _annotated(trace, _DATA_LOADING)
    return tuple((name, intervals) for name, intervals in found.items() if len(intervals.start_ns))


def _kinds(
    trace: RankTrace, work: Work, in_pass: Flags, step: I32
) -> tuple[tuple[str, Flags], ...]:
    optimizes = ~in_pass & _begins_in(_annotated(trace, _OPTIMIZER), work)
    among, after = np.zeros(len(work), dtype=bool), np.zeros(len(work), dtype=bool)
    rows = np.arange(len(work))
    for number in np.unique(step[in_pass & (step >= 0)]).tolist():
        here = step == number
        mine = np.flatnonzero(in_pass & here)
        among |= (rows >= mine[0]) & (rows <= mine[-1])
        if optimizes[here].any():
            after |= here & (rows > mine[-1])
    reduces = work.collective & ~in_pass & ~among & ~optimizes
    clips = ~in_pass & (_names_like(trace, _CLIPPING)[work.name] | after) & ~optimizes & ~reduces
    return (OPTIMIZER, optimizes), (REDUCTION, reduces), (CLIPPING, clips)


def measure_outside(ranks: Sequence[RankTimeline], windows: Sequence[Window]) -> dict[str, int]:
    """Return the mean of each kind over the ranks, the middle of all steps, and the rest; in ns.

    Only between two captured steps: what follows the last one is not captured whole. A rank that
    ends its passes early runs its optimizer inside the window; a mean keeps the sum right.
    """
    lengths: dict[str, list[float]] = {}
    for before, after in pairwise(windows):
        if after.step != before.step + 1 or after.start_ns <= before.end_ns:
            continue
        cuts = [_cut(rank, before.end_ns, after.start_ns) for rank in ranks]
        for name in cuts[0]:
            lengths.setdefault(name, []).append(fmean(cut[name] for cut in cuts))
    return {name: round(median(all_of)) for name, all_of in lengths.items() if any(all_of)}


def _cut(rank: RankTimeline, begin: int, end: int) -> dict[str, int]:
    """Divide one stretch of one rank; the parts add up to it."""
    covered = 0
    parts = {}
    starts, ends = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    for name in (OPTIMIZER, REDUCTION, CLIPPING, DATA_LOADING):
        for intervals in (one for called, one in rank.outside if called == name):
            starts = np.concatenate((starts, intervals.start_ns))
            ends = np.concatenate((ends, intervals.end_ns))
        reach = _joined(starts, ends).inside(begin, end)
        parts[name] = reach - covered
        covered = reach
    return {**parts, OTHER: end - begin - covered}


def _names_like(trace: RankTrace, pattern: re.Pattern[str]) -> Flags:
    return np.array([bool(pattern.search(name)) for name in trace.names] or [False], dtype=bool)


def _annotated(trace: RankTrace, pattern: re.Pattern[str]) -> Intervals:
    annotations = trace.annotations
    rows = _names_like(trace, pattern)[annotations.name] & (annotations.stream < 0)
    start = annotations.start_ns[rows]
    return _joined(start, start + annotations.duration_ns[rows])


def _begins_in(intervals: Intervals, work: Work) -> Flags:
    if not len(intervals.start_ns):
        return np.zeros(len(work), dtype=bool)
    row = np.searchsorted(intervals.start_ns, work.issued_ns, side="right") - 1
    return (row >= 0) & (work.issued_ns < intervals.end_ns[row])


def _union(work: Work, kept: Flags) -> Intervals:
    return _joined(work.start_ns[kept], work.end_ns[kept])


def _joined(start: I64, end: I64) -> Intervals:
    order = np.argsort(start, kind="stable")
    merged_start, merged_end = merge(start[order], end[order])
    return Intervals(start_ns=merged_start, end_ns=merged_end)
