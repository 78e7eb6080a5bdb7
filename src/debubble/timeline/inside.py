"""Passes timed from mark to mark, and a capture of the same job, in → the gaps inside them, too.

```
meter     │◄──────── F0 ────────►│        begins when it is asked for, ends with its last kernel
capture      │k0│ │k1│  │k2│ │k3│         begins with its first kernel, and is idle in between
```

A meter sees no kernels. What a pass of a stage and kind begins later than its mark, and the share
of it that is work, hardly change from step to step: both are taken from steps that were metered and
profiled at once, and hold for all others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from debubble.timeline.model import AT_ONCE_NS, I64, Intervals, Passes, Timeline, union_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Inside:
    """What passes of one rank, stage and kind are inside."""

    lead_ns: int
    """From the mark to the first kernel."""
    share: float
    """Of the rest, occupied."""


Key = tuple[int, int, int]
"""Rank, stage and kind of passes."""


def measure_inside(captured: Timeline, metered: Timeline) -> dict[Key, Inside]:
    """Hold passes of a capture against what the meter made of them.

    `metered` has the same steps and no others; passes that it lacks begin with their marks.
    """
    passes, timed = captured.passes, metered.passes
    worked = np.zeros(len(passes), dtype=np.int64)
    for rank in captured.ranks:
        mine = np.flatnonzero(passes.rank == rank.rank)
        window = passes.where(np.isin(passes.rank, rank.members))
        start, step = passes.start_ns[mine], passes.step[mine]
        # What is done until the next pass of the step, as a loss is, counts to the one before; and
        # until the window's end to the last.
        last = {one: window.end_ns[window.step == one].max() for one in np.unique(step).tolist()}
        ends = np.array([last[one] for one in step.tolist()], dtype=np.int64)
        until = np.where(np.diff(step, append=-1) == 0, np.roll(start, -1), ends)
        done = rank.occupied.covered_until(until) - rank.occupied.covered_until(start)
        worked[mine] = np.maximum(done, 0)
    marks, found = _rows_by_key(timed), {}
    for key, rows in _rows_by_key(passes).items():
        length = (passes.end_ns - passes.start_ns)[rows]
        marked = (timed.end_ns - timed.start_ns)[marks[key]] if key in marks else length
        lead = max(0, round(float(np.median(marked) - np.median(length))))
        if worked[rows].any():
            share = worked[rows].mean() / max(marked.mean() - lead, 1)
            found[key] = Inside(lead_ns=lead, share=min(1.0, float(share)))
    return found


def put_inside(timeline: Timeline, inside: Mapping[Key, Inside]) -> Timeline:
    """Let passes begin with their first kernel, and ranks idle in the gaps of their passes."""
    passes = timeline.passes
    start, busy = passes.start_ns.copy(), passes.busy_ns.copy()
    ranks = []
    for rank in timeline.ranks:
        mine = np.flatnonzero(passes.rank == rank.rank)
        known = [inside.get(key) for key in _keys(passes.where(mine))]
        lead = np.array([0 if one is None else one.lead_ns for one in known], dtype=np.int64)
        share = np.array([1.0 if one is None else one.share for one in known])
        end = passes.end_ns[mine]
        start[mine] = np.minimum(start[mine] + lead, end)
        busy[mine] = np.rint((end - start[mine]) * share).astype(np.int64)
        worked = _spread(start[mine], end, busy[mine])
        ranks.append(replace(rank, busy=worked, occupied=worked))
    moved = replace(passes, start_ns=start, issued_ns=start, busy_ns=busy)
    ordered = moved.where(np.argsort(start, kind="stable"))
    return replace(timeline, ranks=tuple(ranks), passes=ordered)


def _rows_by_key(passes: Passes) -> dict[Key, list[int]]:
    rows: dict[Key, list[int]] = {}
    for row, key in enumerate(_keys(passes)):
        rows.setdefault(key, []).append(row)
    return rows


def _keys(passes: Passes) -> Iterator[Key]:
    return zip(passes.rank.tolist(), passes.stage.tolist(), passes.kind.tolist(), strict=True)


def _spread(start: I64, end: I64, busy: I64) -> Intervals:
    """Cut passes into stretches of work with equal gaps between; they begin and end at work.

    Where in a pass its gaps lie is not told: each is shorter than a wait is.
    """
    gaps = -(-(end - start - busy) // AT_ONCE_NS)
    row = np.repeat(np.arange(len(start)), gaps + 1)
    number = np.arange(len(row)) - np.repeat(np.cumsum(gaps + 1) - gaps - 1, gaps + 1)
    work = busy[row] / (gaps[row] + 1)
    pause = (end - start - busy)[row] / np.maximum(gaps[row], 1)
    begins = start[row] + np.rint(number * (work + pause)).astype(np.int64)
    ends = start[row] + np.rint(number * (work + pause) + work).astype(np.int64)
    return union_of(begins, ends)
