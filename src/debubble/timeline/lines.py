"""All that is known of one rank in → its line of the timeline, its passes, its collectives.

Small columns, made where the trace is; `replicas/` joins those of all ranks. What runs beside a
pass is taken out of it first: a gather of parameters or a batch's copy is launched in its midst.
"""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

import numpy as np

from debubble.timeline.bubble import find_outside
from debubble.timeline.layers import PassKernels, StagePasses, weight_share
from debubble.timeline.meetings import crossing_work
from debubble.timeline.memory import measure_memory
from debubble.timeline.model import (
    I64,
    UNKNOWN,
    CollectiveKind,
    Flags,
    Intervals,
    Passes,
    PassKind,
    RankCollectives,
    RankTimeline,
    Role,
    role_of,
    without,
)
from debubble.timeline.passes import Assignment
from debubble.timeline.steps import RankRecord, find_set_up, find_unfinished
from debubble.timeline.work import (
    BEFORE_CAPTURE,
    Work,
    apparent_of,
    find_carried_out,
    find_side_work,
    find_synchronisations,
    held_up_of,
    host_ranges,
    names_like,
    number_passes,
    spans_of,
    synchronised_of,
    unissued_of,
)
from debubble.trace.columns import Operation, RankTrace, merge

# As torch, NCCL and gloo spell them: `c10d::allreduce_`, `_reduce_scatter_base_`, `AllGather`.
_KINDS = (
    (re.compile(r"reduce_?scatter", re.IGNORECASE), CollectiveKind.REDUCE_SCATTER),
    (re.compile(r"all_?gather", re.IGNORECASE), CollectiveKind.ALL_GATHER),
    (re.compile(r"all_?reduce", re.IGNORECASE), CollectiveKind.ALL_REDUCE),
)
_HOST_SEND = re.compile(r"^gloo:send$")
_OTHER = 255
_SIDE = (
    ("Memcpy HtoD", "copies_to_device"),
    ("Memcpy DtoH", "copies_to_host"),
    ("Mem", "copies_on_device"),
)
_BESIDE = "kernels_of_other_streams"
# Collectives of no name that are in so few microbatches of so many are gradients' or parameters'.
_FEW, _ENOUGH = 0.5, 4
# Passes that follow each other may share an edge; those that run at once share nearly all.
_INTERLEAVED = 0.5


def without_bystanders(
    rank: RankRecord, assignment: Assignment, members: tuple[int, ...]
) -> tuple[Assignment, Flags]:
    """Take out of the passes what is launched in their midst and is no work of theirs.

    Gathers of sharded parameters and reductions of gradients run beside passes; copies of a batch
    to the device come before forward passes, whenever the host has them ready. Return also which
    work is such a gather or reduction: a collective of a data-parallel or sharded group. A group
    that nothing names is one if its collectives are in few of the passes: those that share a stage
    run in every one. A collective among ranks of different stages, `members`, is a message.
    """
    work, group = rank.work, rank.work.group
    roles = [role_of(named) for named in rank.trace.groups]
    in_pass = assignment.kind >= 0
    microbatches = len(np.unique(assignment.microbatch[in_pass]))
    data = np.array([role is Role.DATA for role in roles] + [False])[group] & (group >= 0)
    for number in np.unique(group[group >= 0]).tolist():
        if roles[number] is Role.UNKNOWN and microbatches >= _ENOUGH:
            mine = group == number
            among = len(np.unique(assignment.microbatch[in_pass & mine]))
            if 0 < among <= _FEW * microbatches:
                data |= mine
    data &= work.collective
    beside = data | ((assignment.kind == PassKind.F) & work.upload)
    beside |= crossing_work(rank.trace, work, members)
    found = Assignment(
        kind=np.where(beside, UNKNOWN, assignment.kind),
        stage=np.where(beside, UNKNOWN, assignment.stage),
        microbatch=np.where(beside, UNKNOWN, assignment.microbatch),
    )
    return found, data


def passes_of(rank: RankRecord, assignment: Assignment, position: int, offset_ns: int) -> Passes:
    """Gather the work of each pass, from its first start to its last end, on the common clock."""
    kept = np.flatnonzero((assignment.kind >= 0) & (rank.work_step >= 0))
    stage = np.where(assignment.stage[kept] >= 0, assignment.stage[kept], position)
    (step, stage, kind, microbatch), group = number_passes(
        rank.work_step[kept], stage, assignment.kind[kept], assignment.microbatch[kept]
    )
    start, end = rank.work.start_ns[kept], rank.work.end_ns[kept]
    starts = np.full(len(step), np.iinfo(np.int64).max, dtype=np.int64)
    ends = np.full(len(step), np.iinfo(np.int64).min, dtype=np.int64)
    issued = starts.copy()
    np.minimum.at(starts, group, start)
    np.maximum.at(ends, group, end)
    np.minimum.at(issued, group, rank.work.issued_ns[kept])
    busy = _busy_of_groups(start, end, group, len(step))
    starts, ends = lay_one_after_the_other(starts, ends, busy)
    return Passes(
        rank=np.full(len(step), rank.rank, dtype=np.int32),
        stage=stage.astype(np.int32),
        kind=kind.astype(np.uint8),
        microbatch=microbatch.astype(np.int32),
        step=step.astype(np.int32),
        issued_ns=issued,
        start_ns=starts,
        end_ns=ends,
        busy_ns=busy,
    ).shifted(offset_ns)


def lay_one_after_the_other(start: I64, end: I64, busy: I64) -> tuple[I64, I64]:
    """Lay passes that ran interleaved one after the other, each as long as its share of compute.

    DualPipeV runs a forward and a backward pass at once, from two threads, on one stream:

        F   ├ f  f f   f f ┤           ├──────┤
        B   ├  bb bbb bb  b┤     →            ├───────────┤
    """
    start, end = start.copy(), end.copy()
    order = np.lexsort((-end, start))
    for first, second in pairwise(order.tolist()):
        over = min(end[first], end[second]) - start[second]
        shorter = min(end[first] - start[first], end[second] - start[second])
        if over > _INTERLEAVED * shorter:
            until = max(end[first], end[second])
            share = busy[first] / max(busy[first] + busy[second], 1)
            border = start[first] + round(share * (until - start[first]))
            end[first] = start[second] = border
            end[second] = until
    return start, end


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
    rank: RankRecord,
    assignment: Assignment,
    data: Flags,
    *,
    members: tuple[int, ...],
    stages: tuple[int, ...],
    place: tuple[int, int],
    offset: int,
) -> RankTimeline:
    """Return when a rank was busy and waited, and what it is made of, on the common clock.

    `data` is which of its work gathers parameters or reduces gradients; `place` its pipeline and
    its position there.
    """
    pipeline, position = place
    trace, work, step = rank.trace, rank.work, rank.work_step
    in_pass = assignment.kind >= 0
    busy = work.union(~work.collective)
    outside, named = find_outside(trace, work, in_pass, step)
    crossing = crossing_work(trace, work, members)
    issued = work.where(~crossing)
    calls = find_synchronisations(trace)
    line = RankTimeline(
        rank=rank.rank,
        pipeline=pipeline,
        position=position,
        members=members,
        stages=stages or (position,),
        busy=busy,
        occupied=work.union(~(outside | crossing)),
        apparent=apparent_of(trace, work),
        unissued=unissued_of(issued),
        data_parallel=_exposed(rank, in_pass, data, busy),
        synchronisations=calls,
        held_up=held_up_of(trace),
        synchronised=synchronised_of(issued, calls),
        set_up=find_set_up(rank),
        unfinished=find_unfinished(rank),
        memory=measure_memory(trace, work, assignment, step),
        outside=named,
        side_work=_side_work(trace, work, data),
        handing_over=_handing_over(trace),
        collectives=_collectives_of(rank, busy, assignment.kind == PassKind.F),
        file=trace.file,
        base_ns=trace.header.base_time_ns,
        **_device_of(trace),
    )
    return line.shifted(offset)


def _side_work(trace: RankTrace, work: Work, data: Flags) -> tuple[tuple[str, Intervals], ...]:
    """Name what ran beside the passes, by what it is."""
    kernels = trace.kernels
    rows = np.flatnonzero(find_side_work(trace)) if len(kernels) else np.zeros(0, dtype=np.intp)
    names = [trace.names[name] for name in kernels.name[rows].tolist()]
    kinds = np.array(
        [next((to for begin, to in _SIDE if n.startswith(begin)), _BESIDE) for n in names]
    )
    ran = {kind: spans_of(kernels, rows[kinds == kind]) for kind in np.unique(kinds).tolist()}
    if data.any():
        ran["data_parallel_collectives"] = work.union(data)
    return tuple(ran.items())


def _handing_over(trace: RankTrace) -> Intervals:
    """Return when a host whose messages go by device stood in a send of gloo: a batch's shapes."""
    if not len(trace.kernels):
        return Intervals.no_rows()
    return spans_of(trace.annotations, host_ranges(trace, names_like(trace, _HOST_SEND)))


def _exposed(rank: RankRecord, in_pass: Flags, data: Flags, busy: Intervals) -> Intervals:
    """Return when gathers and reductions ran that no compute covered, until a step's last pass.

    What follows the last pass of a rank holds up none.
    """
    step, until = rank.work_step, np.zeros(len(rank.work), dtype=bool)
    rows = np.arange(len(rank.work))
    for number in np.unique(step[in_pass & (step >= 0)]).tolist():
        until |= (step == number) & (rows <= np.flatnonzero(in_pass & (step == number))[-1])
    return without(rank.work.union(data & until), busy)


def _device_of(trace: RankTrace) -> dict[str, Any]:
    """Return what is known of the device that most kernels ran on."""
    devices, counts = np.unique(trace.kernels.device, return_counts=True)
    counts[devices < 0] = 0
    number = int(devices[counts.argmax()]) if counts.any() else UNKNOWN
    known = next((device for device in trace.header.devices if device.index == number), None)
    return {
        "device": (trace.header.host, number),
        "device_name": known.name if known else "",
        "multiprocessors": known.multiprocessors if known else None,
    }


def stage_passes_of(
    rank: RankRecord,
    assignment: Assignment,
    position: int,
    numbers: dict[str, int],
    shown: int | None = None,
) -> list[StagePasses]:
    """Return one forward and one backward pass of each stage of a rank, for its layers to be told.

    The second of the last step: the first may still warm something up, and adds to no gradients;
    all others launch the same kernels. `numbers` gives names their numbers on all ranks; `shown` is
    the microbatch to take, where they differ.
    """

    def launched(kind: PassKind, stage: int) -> tuple[PassKernels, float | None] | None:
        mine = (assignment.kind == kind) & (assignment.stage == stage) & (rank.work_step >= 0)
        mine &= ~rank.work.collective
        if not mine.any():
            return None
        number = min(1, int(assignment.microbatch[mine].max())) if shown is None else shown
        last = int(rank.work_step[mine & (assignment.microbatch == number)].max(initial=-1))
        rows = np.flatnonzero(mine & (assignment.microbatch == number) & (rank.work_step == last))
        names = [rank.trace.names[name] for name in rank.work.name[rows].tolist()]
        start, end = rank.work.start_ns[rows], rank.work.end_ns[rows]
        share = weight_share(names, end - start) if kind == PassKind.B else None
        kernels = PassKernels(
            name=np.array([numbers.setdefault(n, len(numbers)) for n in names], dtype=np.int32),
            start_ns=start,
            end_ns=end,
        )
        return kernels, share

    found = []
    for stage in np.unique(assignment.stage[assignment.kind == PassKind.F]).tolist():
        forward = launched(PassKind.F, stage)
        if forward is not None and len(forward[0].name):
            backward, share = launched(PassKind.B, stage) or (None, None)
            found.append(
                StagePasses(
                    stage=stage if stage >= 0 else position,
                    forward=forward[0],
                    backward=backward,
                    weight_share=share,
                )
            )
    return found


def _collectives_of(rank: RankRecord, busy: Intervals, in_forward: Flags) -> RankCollectives | None:
    """List a rank's reductions and gathers; `in_forward` tells which work is of a forward pass.

    None where there are none.
    """
    trace, work = rank.trace, rank.work
    kinds = np.array(
        [
            next((kind for pattern, kind in _KINDS if pattern.search(name)), _OTHER)
            for name in trace.names
        ]
        or [_OTHER],
        dtype=np.uint8,
    )
    if len(trace.kernels):
        rows, issued, start, end = _on_device(trace)
    else:
        carried, issued = find_carried_out(trace)
        rows = np.flatnonzero(carried)
        start = trace.operators.start_ns[rows]
        end = start + trace.operators.duration_ns[rows]
    kind = kinds[trace.operators.name[rows]]
    kept = kind != _OTHER
    if not kept.any():
        return None
    order = np.flatnonzero(kept)[np.argsort(issued[kept], kind="stable")]
    rows, issued, start, end = rows[order], issued[order], start[order], end[order]
    ready = np.minimum(np.maximum(issued, _computed_before(work, issued)), start)
    covered = busy.covered_until(end)
    return RankCollectives(
        groups=trace.groups,
        group=trace.operators.group[rows],
        kind=kind[order],
        step=rank.steps.at(issued),
        ready_ns=ready,
        start_ns=start,
        end_ns=end,
        exposed_ns=end - start - (covered - busy.covered_until(start)),
        blocks=covered == busy.covered_until(end - 1),
        in_forward=_in_forward(work, in_forward, issued),
        message_bytes=trace.operators.message_bytes[rows],
    )


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


def _computed_before(work: Work, issued: I64) -> I64:
    """Return when all compute had ended that was issued before each moment."""
    computes = ~work.collective
    ends = np.maximum.accumulate(work.end_ns[computes])
    row = np.searchsorted(work.issued_ns[computes], issued, side="left") - 1
    if not len(ends):
        return np.full(len(issued), BEFORE_CAPTURE)
    return np.where(row >= 0, ends[np.maximum(row, 0)], BEFORE_CAPTURE)


def _in_forward(work: Work, in_forward: Flags, issued: I64) -> Flags:
    """Tell which collectives are work of a forward pass."""
    rows = np.flatnonzero(work.collective)
    if not len(rows):
        return np.zeros(len(issued), dtype=bool)
    row = rows[np.minimum(np.searchsorted(work.issued_ns[rows], issued), len(rows) - 1)]
    same: Flags = work.issued_ns[row] == issued
    return same & in_forward[row]
