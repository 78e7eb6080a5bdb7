"""Passes of an op table in → the clocks of its ranks, and the steps that no run can have gone so.

Stamps of rows are the hosts', and may be rounded to whole milliseconds. What a stage makes, the
next one needs; so passes that follow each other bound the difference of two clocks, as messages do:

    stage 0   ├ F0 ┤├ F1 ┤          ├ B0 ┤     its F0 has ended where stage 1's begins,
    stage 1          ├ F0 ┤├─ B0 ─┤            and its B0 begins where stage 1's has ended
    →         stage 1 is ahead by no more than the first says, and by no less than the second

A pass that ends before the one that it needs begins cannot be on any clock that is left: its step
is left out. Two passes of a rank at once are a schedule's right, and count as busy once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from debubble.errors import Code, Gap
from debubble.timeline.clock import Clocks
from debubble.timeline.model import I64, UNKNOWN, Passes, PassKind
from debubble.timeline.steps import numbered
from debubble.units import show_duration

Rows = NDArray[np.intp]

_UNBOUNDED = 2**62


def rounding_of(passes: Passes) -> int:
    """Return what all times of passes are whole numbers of, in ns."""
    begin = passes.start_ns.min(initial=np.iinfo(np.int64).max)
    times = np.concatenate((passes.start_ns - begin, passes.end_ns - passes.start_ns))
    return int(np.gcd.reduce(times)) if len(times) else 1


def lay_by_passes(
    passes: Passes,
    pipelines: Sequence[Sequence[int]],
    pipeline_of: I64,
    hosts: Mapping[int, str],
) -> Clocks:
    """Lay the clocks of each pipeline's ranks together, each on that of the rank before it.

    As they are, where the order of passes allows it, or contradicts itself on any clock; else in
    the middle of what it allows, in most steps. Ranks of one host share its clock.
    """
    hops: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for (first, second, _), bound in _bounds(passes, pipeline_of).items():
        hops.setdefault((first, second), []).append(bound)
    offset_ns: dict[int, int] = {}
    unsure, rounding_ns = 0, rounding_of(passes)
    for ranks in pipelines:
        ahead = 0
        for before, rank in zip((UNKNOWN, *ranks), ranks, strict=False):
            needed = [(0, 0)]
            if not hosts.get(rank) or hosts.get(rank) != hosts.get(before):
                bounds = hops.get((before, rank), [])
                needed = [_offset(low - rounding_ns, high + rounding_ns) for low, high in bounds]
            shift, give = sorted(needed or [(0, 0)])[len(needed) // 2]
            ahead, unsure = ahead + shift, max(unsure, give)
            offset_ns[rank] = ahead
    return Clocks(offset_ns=offset_ns, uncertainty_ns=unsure)


def _offset(low: int, high: int) -> tuple[int, int]:
    """Return what to add to a clock that is behind by so much to so much, give or take."""
    if min(low, high) <= 0 <= max(low, high):
        return 0, 0
    known = [bound for bound in (low, high) if abs(bound) < _UNBOUNDED // 2]
    return sum(known) // len(known), (max(known) - min(known)) // 2


def doubt_clocks(passes: Passes, pipeline_of: I64, file: str) -> list[Gap]:
    """Say by how much passes contradict each other, whatever is added to the stamps of a rank."""
    low: dict[tuple[int, int], int] = {}
    high: dict[tuple[int, int], int] = {}
    for (first, second, _), (least, most) in _bounds(passes, pipeline_of).items():
        low[first, second] = max(low.get((first, second), least), least)
        high[first, second] = min(high.get((first, second), most), most)
    ends = max(low, key=lambda ends: low[ends] - high[ends], default=None)
    if ends is None or low[ends] - high[ends] <= 2 * rounding_of(passes):
        return []
    apart = low[ends] - high[ends]
    return [
        Gap(
            code=Code.CLOCK_OFF,
            message=f"passes of {numbered('rank', sorted(ends))} contradict each other by "
            f"{show_duration(apart)} on whatever clocks: their times are not exact",
            hint="time passes by events of the device, and set the clocks of the hosts by NTP",
            file=file,
            moves_ns=apart // 2,
        )
    ]


def steps_out_of_order(passes: Passes, pipeline_of: I64) -> dict[int, dict[int, set[int]]]:
    """Return the steps of each pipeline in which a pass ends before one that it needs has begun.

    With the ranks of both.
    """
    found: dict[int, dict[int, set[int]]] = {}
    rounding_ns = rounding_of(passes)
    for needed, needing in _needs(passes, pipeline_of):
        early = passes.end_ns[needing] < passes.start_ns[needed] - 2 * rounding_ns
        for one, other in zip(needed[early].tolist(), needing[early].tolist(), strict=True):
            steps = found.setdefault(int(pipeline_of[passes.rank[one]]), {})
            ranks = {int(passes.rank[one]), int(passes.rank[other])}
            steps.setdefault(int(passes.step[one]), set()).update(ranks)
    return found


def _bounds(passes: Passes, pipeline_of: I64) -> dict[tuple[int, int, int], tuple[int, int]]:
    """Return how far a rank's clock is behind another's, at the least and at the most, by step."""
    low: dict[tuple[int, int, int], int] = {}
    for needed, needing in _needs(passes, pipeline_of):
        behind = passes.end_ns[needed] - passes.start_ns[needing]
        keys = np.stack((passes.rank[needed], passes.rank[needing], passes.step[needed]))
        hops, row = np.unique(keys, axis=1, return_inverse=True)
        most = np.full(hops.shape[1], -_UNBOUNDED)
        np.maximum.at(most, row.reshape(-1), behind)
        for (first, second, step), bound in zip(hops.T.tolist(), most.tolist(), strict=True):
            if first != second:
                low[first, second, step] = max(low.get((first, second, step), bound), bound)
    return {
        (first, second, step): (
            low.get((first, second, step), -_UNBOUNDED),
            -low.get((second, first, step), -_UNBOUNDED),
        )
        for first, second, step in {*low, *((b, a, step) for a, b, step in low)}
    }


def _needs(passes: Passes, pipeline_of: I64) -> Iterator[tuple[Rows, Rows]]:
    """Yield passes that are needed, and those that need them: of the stage before, or after it."""
    backward = np.isin(passes.kind, (PassKind.B, PassKind.I))
    batch = (passes.microbatch, passes.step, pipeline_of[passes.rank])
    told = passes.microbatch >= 0
    for rows, keys in (
        (told & (passes.kind == PassKind.F), (passes.stage, *batch)),
        (told & backward, (-passes.stage, *batch)),
        (told & (backward | (passes.kind == PassKind.F)), (backward, passes.stage, *batch)),
    ):
        order = np.lexsort(keys)
        order = order[rows[order]]
        apart = [np.diff(np.asarray(key, dtype=np.int64)[order]) for key in keys]
        follows = (apart[0] == 1) & ~np.any(apart[1:], axis=0)
        yield order[:-1][follows], order[1:][follows]
