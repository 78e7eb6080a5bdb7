"""All that is known of one rank in → its line of the timeline, its passes, its collectives.

Small columns, made where the trace is; `replicas/` joins those of all ranks. What runs beside a
pass is taken out of it first: a gather of parameters or a batch's copy is launched in its midst.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from debubble.errors import Code, Gap
from debubble.timeline.bubble import find_outside
from debubble.timeline.memory import PassKernels, StagePasses, measure_memory, weight_share
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
    find_synchronisations,
    held_up_of,
    number_passes,
    synchronised_of,
    unissued_of,
)
from debubble.trace.columns import KernelKind, Operation, RankTrace, merge, peak_memory

# As torch, NCCL and gloo spell them: `c10d::allreduce_`, `_reduce_scatter_base_`, `AllGather`.
_KINDS = (
    (re.compile(r"reduce_?scatter", re.IGNORECASE), CollectiveKind.REDUCE_SCATTER),
    (re.compile(r"all_?gather", re.IGNORECASE), CollectiveKind.ALL_GATHER),
    (re.compile(r"all_?reduce", re.IGNORECASE), CollectiveKind.ALL_REDUCE),
)
_OTHER = 255
# Collectives of no name that are in so few microbatches of so many are gradients' or parameters'.
_FEW, _ENOUGH = 0.5, 4
# Passes of one stage and kind that launch neither of their two commonest numbers of kernels are an
# eighth of all at most on 120 recorded ranks; with a tenth of a rank's kernels lost, a half.
_MANY_PASSES, _OF_OTHER_NUMBERS = 6, 0.3
# A pass with so few of the usual kernels has lost some, unless it has fewer on other ranks, too.
_SHORT, _SHORTER = 0.75, 0.95
# Batches of a stream for which a rank runs fewer kernels than for others like them: none at all on
# the 40 recorded ranks of streams. A pipeline of two shows not which of them it is.
_FEWEST_SHORT, _SHORT_BATCHES, _FEWEST_PEERS = 2, 0.04, 3
# Of 190 recorded ranks with two peers and more, three lack a kernel that all others have: the last
# ones of Megatron, which run others as often.
_FEWEST_OF_NAME, _INSTEAD = 6, 0.95
# Libraries that send by kernels of the device.
_BY_KERNELS = frozenset({"nccl", "cuda:nccl", "rccl"})
# A thread that launches passes launches hundreds of kernels.
_OFTEN = 10
# As torch, its compiler, cuDNN and libraries of attention call kernels of backward passes.
_BACKWARD = re.compile(r"backward|_bwd|bprop|[dw]grad|_grad_", re.IGNORECASE)
# As torch calls the range of `Optimizer.step`.
_OPTIMIZER = "Optimizer.step#"


def without_bystanders(rank: RankRecord, assignment: Assignment) -> tuple[Assignment, Flags]:
    """Take out of the passes what is launched in their midst and is no work of theirs.

    Gathers of sharded parameters and reductions of gradients run beside passes; copies of a batch
    to the device come before forward passes, whenever the host has them ready. Return also which
    work is such a gather or reduction: a collective of a data-parallel or sharded group. A group
    that nothing names is one if its collectives are in few of the passes: those that share a stage
    run in every one.
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
    start, end = rank.work.start_ns[kept] + offset_ns, rank.work.end_ns[kept] + offset_ns
    starts = np.full(len(step), np.iinfo(np.int64).max, dtype=np.int64)
    ends = np.full(len(step), np.iinfo(np.int64).min, dtype=np.int64)
    issued = starts.copy()
    np.minimum.at(starts, group, start)
    np.maximum.at(ends, group, end)
    np.minimum.at(issued, group, rank.work.issued_ns[kept])
    return Passes(
        rank=np.full(len(step), rank.rank, dtype=np.int32),
        stage=stage.astype(np.int32),
        kind=kind.astype(np.uint8),
        microbatch=microbatch.astype(np.int32),
        step=step.astype(np.int32),
        issued_ns=issued + offset_ns,
        start_ns=starts,
        end_ns=ends,
        busy_ns=_busy_of_groups(start, end, group, len(step)),
    )


# What some ranks tell and others do not.


def name_untold(traces: Sequence[RankTrace]) -> list[Gap]:
    """Name ranks that do not tell of memory, optimizer, threads or messages what others tell."""
    peaks = [peak_memory(trace) for trace in traces]
    others = any(peak is not None for peak in peaks)
    several = len(traces) > 1  # an engine's one rank may say so, its memory laid out before
    without_memory = [
        peak is None
        and (others or (several and bool(trace.header.profile_memory and len(trace.kernels))))
        for trace, peak in zip(traces, peaks, strict=True)
    ]
    optimizers = list(map(_marks_optimizer, traces))
    threads = list(map(_launching_threads, traces))
    usual = sorted(threads)[len(threads) // 2]
    carried = list(map(_carries_messages, traces))
    asked = (
        (
            without_memory,
            Code.WRONG_MEMORY,
            "nothing of its device's memory in it, though other ranks have some"
            if others
            else "nothing of its device's memory in it, though it was recorded with profile_memory",
            "record with profile_memory=True on every rank",
        ),
        (
            [any(optimizers) and not has for has in optimizers],
            Code.UNEVEN_RANGES,
            "no range of an optimizer that launches, though other ranks have one",
            "record the same steps on every rank",
        ),
        (
            [0 < count < usual for count in threads],
            Code.WRONG_FIELDS,
            f"it launches from fewer than {usual} threads, as other ranks do: passes may be wrong",
            "record the rank again",
        ),
        (
            [
                has is False
                and (any(carried) or (len(trace.kernels) and trace.header.backend in _BY_KERNELS))
                for trace, has in zip(traces, carried, strict=True)
            ],
            Code.WRONG_FIELDS,
            "none of its messages has a kernel, though NCCL sends by kernels",
            "record the rank again",
        ),
    )
    return [
        Gap(code=code, message=message, hint=hint, file=trace.file, rank=trace.rank)
        for untold, code, message, hint in asked
        for trace, is_untold in zip(traces, untold, strict=True)
        if is_untold
    ]


def _marks_optimizer(trace: RankTrace) -> bool:
    """Tell whether a range of an optimizer launches something, or is there on a CPU."""
    ranges, calls = trace.annotations, trace.launches.start_ns
    names = [row for row, name in enumerate(trace.names) if name.startswith(_OPTIMIZER)]
    mine = np.isin(ranges.name, names) & (ranges.stream < 0)
    end_ns = ranges.start_ns[mine] + ranges.duration_ns[mine]
    first, last = np.searchsorted(calls, ranges.start_ns[mine]), np.searchsorted(calls, end_ns)
    return bool((last > first).any() if len(trace.kernels) else mine.any())


def _launching_threads(trace: RankTrace) -> int:
    """Count threads that launch kernels: by autograd's, backward passes are told."""
    calls = trace.kernels.launch[trace.kernels.launch >= 0]
    launched = np.bincount(trace.launches.thread[calls], minlength=1)
    return int((launched >= _OFTEN).sum())


def _carries_messages(trace: RankTrace) -> bool | None:
    """Tell whether a message has its kernel; None where there are no messages."""
    operators = trace.operators
    moves = np.isin(operators.operation, (Operation.SEND, Operation.RECEIVE))
    return bool((operators.kernel[moves] >= 0).any()) if moves.any() else None


def name_hidden_backward(assigned: Sequence[tuple[RankRecord, Assignment]]) -> list[Gap]:
    """Name ranks that train, by the names of their kernels, where no pass is told as backward.

    Autograd's own thread tells backward passes, or labels do.
    """
    if any((passes.kind > PassKind.F).any() for _, passes in assigned):
        return []
    hidden = []
    for rank, _ in assigned:
        names = [_BACKWARD.search(name) is not None for name in rank.trace.names]
        trains = len(rank.trace.kernels) and np.array(names)[rank.work.name].sum() >= _OFTEN
        hidden += [rank] if trains else []
    return [
        Gap(
            code=Code.WRONG_FIELDS,
            message="it runs kernels of backward passes, and no pass is told as one: "
            "its threads are not those that it had, or no step of it is whole",
            hint="record whole steps, and threads as they are; or label passes",
            file=rank.trace.file,
            rank=rank.rank,
        )
        for rank in hidden
    ]


def name_uneven_passes(assigned: Sequence[tuple[RankRecord, Assignment]]) -> list[Gap]:
    """Name ranks whose passes run other numbers of kernels, where those of most ranks do not.

    The first microbatch sums no gradients and the last reduces them, on most ranks alike; all
    others launch the same.
    """
    shares = [_kernel_shares(rank, passes) for rank, passes in assigned]
    uneven = [
        scattered
        or any(
            share < _SHORT
            and 2 * sum(other.get(key, 1.0) < _SHORTER for _, other in shares) <= len(shares)
            for key, share in mine.items()
        )
        for scattered, mine in shares
    ]
    if 2 * sum(uneven) > len(assigned):
        return []
    return [
        Gap(
            code=Code.LOST_OPERATORS,
            message="its passes run other numbers of kernels, where those of other ranks run "
            "the same: some may have been lost",
            hint="record the rank again; if its stage does differ from pass to pass, all is well",
            file=rank.trace.file,
            rank=rank.rank,
        )
        for (rank, _), is_uneven in zip(assigned, uneven, strict=True)
        if is_uneven
    ]


def name_uneven_batches(assigned: Sequence[tuple[RankRecord, Assignment]]) -> list[Gap]:
    """Name ranks that run fewer kernels for some batches of a stream than for others like them.

    Batches are alike where the other ranks run as many kernels for them: a server's batches differ,
    and on all ranks alike. The first and the last batch may be cut.
    """
    kernels: dict[int, dict[int, int]] = {}
    for rank, passes in assigned:
        kept = (passes.kind >= 0) & ~rank.work.collective
        batch, count = np.unique(passes.microbatch[kept], return_counts=True)
        kernels[rank.rank] = {int(key): int(many) for key, many in zip(batch, count, strict=True)}
    common = sorted(set.intersection(*map(set, kernels.values())))[1:-1] if kernels else []
    if len(kernels) < _FEWEST_PEERS:
        return []
    uneven = []
    for rank, _ in assigned:
        others = [counts for other, counts in kernels.items() if other != rank.rank]
        alike: dict[int, list[int]] = {}
        for number in common:
            usual = sorted(counts[number] for counts in others)[len(others) // 2]
            alike.setdefault(usual, []).append(kernels[rank.rank][number])
        short = sum(count < _SHORTER * max(like) for like in alike.values() for count in like)
        if short >= max(_FEWEST_SHORT, _SHORT_BATCHES * len(common)):
            uneven.append(rank)
    if 2 * len(uneven) > len(assigned):
        return []
    return [
        Gap(
            code=Code.LOST_OPERATORS,
            message="it runs fewer kernels for some batches than for others, where other ranks run "
            "the same: some may have been lost",
            hint="record the rank again; if its stage does differ from batch to batch, all is well",
            file=rank.trace.file,
            rank=rank.rank,
        )
        for rank in uneven
    ]


def name_lost_names(traces: Sequence[RankTrace]) -> list[Gap]:
    """Name ranks that never run a kernel that all others run often, nor one in its place.

    Layers are alike on all ranks. Where one was tuned to another kernel, that runs as often. What
    runs once a pass may be of the ends: a first layer has no gradient to hand on.
    """
    counts: list[dict[str, int]] = []
    for trace in traces:
        kernels = trace.kernels
        number = np.bincount(kernels.name[kernels.kind == KernelKind.COMPUTE]).tolist()
        counts.append({trace.names[row]: count for row, count in enumerate(number) if count})
    if len(traces) < _FEWEST_PEERS or not all(counts):
        return []
    ranks_with = Counter(name for known in counts for name in known)
    often = {
        name: sorted(known[name] for known in counts if name in known)
        for name, ranks in ranks_with.items()
        if ranks == len(traces) - 1
    }
    gaps = []
    for trace, mine in zip(traces, counts, strict=True):
        own = [count for name, count in mine.items() if ranks_with[name] == 1]
        fewest = max(_FEWEST_OF_NAME, 2 * _passes_back(trace))
        lost = [
            name
            for name in sorted(often.keys() - mine.keys())
            if often[name][0] >= fewest
            and not any(
                _INSTEAD * often[name][0] <= count <= often[name][-1] / _INSTEAD for count in own
            )
        ]
        if lost:
            gaps.append(
                Gap(
                    code=Code.LOST_OPERATORS,
                    message=f"it never runs {lost[0][:60]}, which all other ranks run "
                    f"{often[lost[0]][0]} times and more: its kernels may have been lost",
                    hint="record the rank again; if its layers are others, all is well",
                    file=trace.file,
                    rank=trace.rank,
                )
            )
    return gaps


def _passes_back(trace: RankTrace) -> int:
    """Count the gradients of an end of a pipeline, which has one peer; else there are none."""
    operators = trace.operators
    sends = operators.peer[operators.operation == Operation.SEND]
    receives = operators.peer[operators.operation == Operation.RECEIVE]
    peers = set(sends.tolist()) | set(receives.tolist())
    return min(len(sends), len(receives)) if len(peers) == 1 else 0


def _kernel_shares(
    rank: RankRecord, passes: Assignment
) -> tuple[bool, dict[tuple[int, int, int], float]]:
    """Tell whether passes of a kind run ever other numbers of kernels, and each one's share.

    By step, kind and microbatch: its kernels over those of the middle one of its kind; of several
    stages the least. The first and the last pass of a capture may be cut.
    """
    kept = np.flatnonzero((passes.kind >= 0) & (rank.work_step >= 0) & ~rank.work.collective)
    (step, stage, kind, microbatch), group = number_passes(
        rank.work_step[kept], passes.stage[kept], passes.kind[kept], passes.microbatch[kept]
    )
    kernels = np.bincount(group, minlength=len(stage))
    scattered, shares = False, dict[tuple[int, int, int], float]()
    for alike in {*zip(stage.tolist(), kind.tolist(), strict=True)}:
        mine = np.flatnonzero((stage == alike[0]) & (kind == alike[1]))
        if len(mine) < _MANY_PASSES:
            continue
        times = np.sort(np.unique(kernels[mine], return_counts=True)[1])
        scattered |= int(times[:-2].sum()) > _OF_OTHER_NUMBERS * len(mine)
        usual = float(np.median(kernels[mine]))
        for row in set(mine.tolist()) - {int(group[0]), int(group[-1])}:
            key = (int(step[row]), int(kind[row]), int(microbatch[row]))
            shares[key] = min(shares.get(key, 1.0), float(kernels[row]) / usual)
    return scattered, shares


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
    calls = find_synchronisations(trace)
    return RankTimeline(
        rank=rank.rank,
        pipeline=pipeline,
        position=position,
        stages=stages or (position,),
        busy=busy.shifted(offset),
        occupied=work.union(~outside).shifted(offset),
        apparent=apparent_of(trace, work).shifted(offset),
        unissued=unissued_of(work).shifted(offset),
        data_parallel=_exposed(rank, in_pass, data, busy).shifted(offset),
        synchronisations=replace(
            calls, start_ns=calls.start_ns + offset, end_ns=calls.end_ns + offset
        ),
        held_up=held_up_of(trace).shifted(offset),
        synchronised=synchronised_of(work, calls).shifted(offset),
        clock_offset_ns=offset,
        set_up=find_set_up(rank),
        unfinished=find_unfinished(rank),
        memory=measure_memory(trace, work, assignment, step),
        outside=tuple((name, intervals.shifted(offset)) for name, intervals in named),
        collectives=_collectives_of(rank, busy, assignment.kind == PassKind.F, offset),
        file=trace.file,
        base_ns=trace.header.base_time_ns,
        **_device_of(trace),
    )


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
    rank: RankRecord, assignment: Assignment, position: int, numbers: dict[str, int]
) -> list[StagePasses]:
    """Return one forward and one backward pass of each stage of a rank, for its layers to be told.

    The second of the last step: the first may still warm something up, and adds to no gradients;
    all others launch the same kernels. `numbers` gives names their numbers on all ranks.
    """

    def launched(kind: PassKind, stage: int) -> tuple[PassKernels, float | None] | None:
        mine = (assignment.kind == kind) & (assignment.stage == stage) & (rank.work_step >= 0)
        mine &= ~rank.work.collective
        if not mine.any():
            return None
        number = min(1, int(assignment.microbatch[mine].max()))
        last = int(rank.work_step[mine & (assignment.microbatch == number)].max(initial=-1))
        rows = np.flatnonzero(mine & (assignment.microbatch == number) & (rank.work_step == last))
        names = [rank.trace.names[name] for name in rank.work.name[rows].tolist()]
        start, end = rank.work.start_ns[rows], rank.work.end_ns[rows]
        kernels = PassKernels(
            name=np.array([numbers.setdefault(n, len(numbers)) for n in names], dtype=np.int32),
            start_ns=start,
            end_ns=end,
        )
        return kernels, weight_share(names, end - start) if kind == PassKind.B else None

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


def _collectives_of(
    rank: RankRecord, busy: Intervals, in_forward: Flags, offset_ns: int
) -> RankCollectives | None:
    """List a rank's reductions and gathers; `in_forward` tells which work is of a forward pass.

    None where there are none. Times are laid on the pipeline's clock.
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
        ready_ns=ready + offset_ns,
        start_ns=start + offset_ns,
        end_ns=end + offset_ns,
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
