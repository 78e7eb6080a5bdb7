"""One rank with its passes told in → its passes and its line of the timeline out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from debubble.timeline.collectives import collectives_of, shift_collectives
from debubble.timeline.evidence import find_set_up, find_unfinished
from debubble.timeline.grouping import number_passes
from debubble.timeline.labels import Assignment
from debubble.timeline.layers import measure_layers
from debubble.timeline.memory import measure_memory
from debubble.timeline.model import (
    I64,
    UNKNOWN,
    Intervals,
    Passes,
    PassKind,
    RankTimeline,
    StageLayers,
)
from debubble.timeline.outside import find_outside, lies_outside
from debubble.timeline.prepared import Prepared
from debubble.timeline.work import (
    apparent_of,
    busy_of,
    occupied_of,
    unissued_of,
)
from debubble.trace.busy import merge
from debubble.trace.columns import RankTrace


def passes_of(rank: Prepared, assignment: Assignment, position: int) -> Passes:
    """Gather the work of each pass: from its first start to its last end."""
    kept = np.flatnonzero((assignment.kind >= 0) & (rank.work_step >= 0))
    stage = np.where(assignment.stage[kept] >= 0, assignment.stage[kept], position)
    unique, group = number_passes(
        rank.work_step[kept], stage, assignment.kind[kept], assignment.microbatch[kept]
    )
    start, end = rank.work.start_ns[kept], rank.work.end_ns[kept]
    starts = np.full(unique.shape[1], np.iinfo(np.int64).max, dtype=np.int64)
    issued = starts.copy()
    ends = np.full(unique.shape[1], np.iinfo(np.int64).min, dtype=np.int64)
    np.minimum.at(starts, group, start)
    np.maximum.at(ends, group, end)
    np.minimum.at(issued, group, rank.work.issued_ns[kept])
    return Passes(
        rank=np.full(unique.shape[1], rank.rank, dtype=np.int32),
        stage=unique[1].astype(np.int32),
        kind=unique[2].astype(np.uint8),
        microbatch=unique[3].astype(np.int32),
        step=unique[0].astype(np.int32),
        issued_ns=issued,
        start_ns=starts,
        end_ns=ends,
        busy_ns=_busy_of_groups(start, end, group, unique.shape[1]),
    )


def _busy_of_groups(start: I64, end: I64, group: I64, groups: int) -> I64:
    """Return the union of the intervals of each group, all groups in one sweep."""
    if not groups:
        return np.zeros(0, dtype=np.int64)
    begin = int(start.min())
    apart = int(end.max()) - begin + 1  # lift each group above the one before it
    lift = group * apart - begin
    order = np.lexsort((start, group))
    merged_start, merged_end = merge((start + lift)[order], (end + lift)[order])
    busy = np.zeros(groups, dtype=np.int64)
    np.add.at(busy, merged_start // apart, merged_end - merged_start)
    return busy


def line_of(
    rank: Prepared,
    assignment: Assignment,
    stages: tuple[int, ...],
    place: tuple[int, int],
    offset: int,
) -> RankTimeline:
    """Return when a rank was busy and waited, and what it is made of, on the common clock."""
    pipeline, position = place
    in_pass = assignment.kind >= 0
    busy = busy_of(rank.work)
    collectives = collectives_of(
        rank.trace, rank.work, busy, rank.steps, assignment.kind == PassKind.F
    )
    return RankTimeline(
        rank=rank.rank,
        pipeline=pipeline,
        position=position,
        stages=stages or (position,),
        busy=_shift(busy, offset),
        occupied=_shift(
            occupied_of(rank.work, lies_outside(rank.trace, rank.work, in_pass)), offset
        ),
        apparent=_shift(apparent_of(rank.trace, rank.work), offset),
        unissued=_shift(unissued_of(rank.work), offset),
        clock_offset_ns=offset,
        set_up=find_set_up(rank, rank.steps),
        unfinished=find_unfinished(rank, rank.steps),
        memory=measure_memory(rank.trace, rank.work, assignment, rank.work_step),
        layers=_layers(rank, assignment, position),
        outside=tuple(
            (name, _shift(intervals, offset))
            for name, intervals in find_outside(rank.trace, rank.work, in_pass)
        ),
        collectives=shift_collectives(collectives, offset),
        file=rank.trace.file,
        base_ns=rank.trace.header.base_time_ns,
        **_device_of(rank.trace),
    )


def _device_of(trace: RankTrace) -> dict[str, Any]:
    """Return what is known of the device that most kernels ran on."""
    devices = trace.kernels.device[trace.kernels.device >= 0]
    number = int(np.bincount(devices).argmax()) if len(devices) else UNKNOWN
    known = next((one for one in trace.header.devices if one.index == number), None)
    return {
        "device": (trace.header.host, number),
        "device_name": known.name if known else "",
        "multiprocessors": known.multiprocessors if known else None,
    }


def _layers(rank: Prepared, assignment: Assignment, position: int) -> tuple[StageLayers, ...]:
    """Measure the layers of each stage on one forward pass, the second where there are several.

    The first may still warm something up; all others launch the same kernels.
    """
    forward = (assignment.kind == PassKind.F) & (rank.work_step >= 0)
    found = []
    for stage in np.unique(assignment.stage[forward]).tolist():
        mine = forward & (assignment.stage == stage)
        number = min(1, int(assignment.microbatch[mine].max()))
        last = int(rank.work_step[mine].max())
        rows = np.flatnonzero(mine & (assignment.microbatch == number) & (rank.work_step == last))
        layers = measure_layers(
            stage if stage >= 0 else position,
            rank.work.name[rows],
            rank.work.start_ns[rows],
            rank.work.end_ns[rows],
        )
        if layers:
            found.append(layers)
    return tuple(found)


def _shift(intervals: Intervals, offset: int) -> Intervals:
    return Intervals(start_ns=intervals.start_ns + offset, end_ns=intervals.end_ns + offset)


def shift_passes(passes: Passes, offset: int) -> Passes:
    """Lay passes on the common clock."""
    return replace(
        passes,
        issued_ns=passes.issued_ns + offset,
        start_ns=passes.start_ns + offset,
        end_ns=passes.end_ns + offset,
    )
