"""One rank with its passes told in → its passes and its line of the timeline out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from debubble.timeline.collectives import collectives_of, shift_collectives
from debubble.timeline.evidence import find_set_up, find_unfinished
from debubble.timeline.grouping import number_passes
from debubble.timeline.labels import Assignment
from debubble.timeline.layers import Launched, StagePasses
from debubble.timeline.memory import measure_memory
from debubble.timeline.model import (
    I64,
    UNKNOWN,
    Flags,
    Intervals,
    Passes,
    PassKind,
    RankTimeline,
    without,
)
from debubble.timeline.outside import find_outside, lies_outside
from debubble.timeline.parallelism import Role, role_of
from debubble.timeline.prepared import Prepared
from debubble.timeline.work import (
    apparent_of,
    busy_of,
    find_synchronisations,
    held_up_of,
    occupied_of,
    synchronised_of,
    unissued_of,
)
from debubble.trace.busy import merge
from debubble.trace.columns import RankTrace

# Collectives of no name that are in so few microbatches of so many are gradients' or parameters'.
_FEW, _ENOUGH = 0.5, 4


def without_bystanders(rank: Prepared, assignment: Assignment) -> tuple[Assignment, Flags]:
    """Take out of the passes what is launched in their midst and is no work of theirs.

    Gathers of sharded parameters and reductions of gradients run beside passes; copies of a batch
    to the device come before forward passes, whenever the host has them ready. Return also which
    work is such a gather or reduction.
    """
    work = rank.work
    data = work.collective & _for_data(rank, assignment)
    beside = data | ((assignment.kind == PassKind.F) & work.upload)
    found = replace(
        assignment,
        kind=np.where(beside, UNKNOWN, assignment.kind),
        stage=np.where(beside, UNKNOWN, assignment.stage),
        microbatch=np.where(beside, UNKNOWN, assignment.microbatch),
    )
    return found, data


def _for_data(rank: Prepared, assignment: Assignment) -> Flags:
    """Tell which collectives are of data-parallel or sharded groups.

    A group that nothing names is one if its collectives are in few of the passes: those that share
    a stage run in every one.
    """
    group, groups = rank.work.group, rank.trace.groups
    roles = np.array([role_of(one) is Role.DATA for one in groups] + [False])
    found = roles[group] & (group >= 0)
    unnamed = [
        number
        for number in np.unique(group[group >= 0]).tolist()
        if role_of(groups[number]) is Role.UNKNOWN
    ]
    in_pass = assignment.kind >= 0
    microbatches = len(np.unique(assignment.microbatch[in_pass]))
    for number in unnamed:
        mine = in_pass & (group == number)
        among = len(np.unique(assignment.microbatch[mine]))
        if microbatches >= _ENOUGH and 0 < among <= _FEW * microbatches:
            found |= group == number
    return found


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


def line_of(  # noqa: PLR0913 (a rank, what it is made of, and where it stands)
    rank: Prepared,
    assignment: Assignment,
    data: Flags,
    *,
    stages: tuple[int, ...],
    place: tuple[int, int],
    offset: int,
) -> RankTimeline:
    """Return when a rank was busy and waited, and what it is made of, on the common clock.

    `data` is which of its work gathers parameters or reduces gradients.
    """
    pipeline, position = place
    in_pass = assignment.kind >= 0
    busy = busy_of(rank.work)
    calls = find_synchronisations(rank.trace)
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
            occupied_of(rank.work, lies_outside(rank.trace, rank.work, in_pass, rank.work_step)),
            offset,
        ),
        apparent=_shift(apparent_of(rank.trace, rank.work), offset),
        unissued=_shift(unissued_of(rank.work), offset),
        data_parallel=_shift(_exposed(rank, in_pass, data, busy), offset),
        synchronisations=replace(
            calls, start_ns=calls.start_ns + offset, end_ns=calls.end_ns + offset
        ),
        held_up=_shift(held_up_of(rank.trace), offset),
        synchronised=_shift(synchronised_of(rank.work, calls), offset),
        clock_offset_ns=offset,
        set_up=find_set_up(rank, rank.steps),
        unfinished=find_unfinished(rank, rank.steps),
        memory=measure_memory(rank.trace, rank.work, assignment, rank.work_step),
        outside=tuple(
            (name, _shift(intervals, offset))
            for name, intervals in find_outside(rank.trace, rank.work, in_pass, rank.work_step)
        ),
        collectives=shift_collectives(collectives, offset),
        file=rank.trace.file,
        base_ns=rank.trace.header.base_time_ns,
        **_device_of(rank.trace),
    )


def _exposed(rank: Prepared, in_pass: Flags, data: Flags, busy: Intervals) -> Intervals:
    """Return when gathers and reductions ran that no compute covered, until a step's last pass.

    What follows the last pass of a rank holds up none.
    """
    step, until = rank.work_step, np.zeros(len(rank.work), dtype=bool)
    rows = np.arange(len(rank.work))
    for number in np.unique(step[in_pass & (step >= 0)]).tolist():
        until |= (step == number) & (rows <= np.flatnonzero(in_pass & (step == number))[-1])
    kept = np.flatnonzero(data & until)
    kept = kept[np.argsort(rank.work.start_ns[kept], kind="stable")]
    start, end = merge(rank.work.start_ns[kept], rank.work.end_ns[kept])
    return without(Intervals(start_ns=start, end_ns=end), busy)


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


def stage_passes_of(
    rank: Prepared, assignment: Assignment, position: int, numbers: dict[str, int]
) -> list[StagePasses]:
    """Return one forward and one backward pass of each stage of a rank, for its layers to be told.

    The second of the last step: the first may still warm something up, and adds to no gradients;
    all others launch the same kernels. `numbers` gives names their numbers on all ranks.
    """

    def launched(kind: PassKind, stage: int) -> Launched | None:
        mine = (assignment.kind == kind) & (assignment.stage == stage) & (rank.work_step >= 0)
        mine &= ~rank.work.collective
        if not mine.any():
            return None
        number = min(1, int(assignment.microbatch[mine].max()))
        last = int(rank.work_step[mine & (assignment.microbatch == number)].max(initial=-1))
        rows = np.flatnonzero(mine & (assignment.microbatch == number) & (rank.work_step == last))
        names = [rank.trace.names[name] for name in rank.work.name[rows].tolist()]
        return Launched(
            name=np.array([numbers.setdefault(one, len(numbers)) for one in names], dtype=np.int32),
            start_ns=rank.work.start_ns[rows],
            end_ns=rank.work.end_ns[rows],
        )

    found = []
    for stage in np.unique(assignment.stage[assignment.kind == PassKind.F]).tolist():
        forward = launched(PassKind.F, stage)
        if forward is not None and len(forward.name):
            number = stage if stage >= 0 else position
            backward = launched(PassKind.B, stage)
            found.append(StagePasses(stage=number, forward=forward, backward=backward))
    return found


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
