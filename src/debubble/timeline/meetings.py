"""Collectives of each rank in → who came last, and what is theirs: one rule for all of them.

A collective's own time runs from the arrival of its last member to its end. What a member's kernel
lasts before that is wait, and is followed to the member that was late. The token that a last rank
samples, broadcast to four ranks:

    rank 0   wwwwwwwwwwwwwwww#        w: it spins
    rank 1       wwwwwwwwwwww#        #: its own time
    rank 2            wwwwwww#
    rank 3                   #        the late one

Among ranks of one stage it is work of a pass. Among ranks of different stages it is a message of
the pipeline: no kernel of it is work.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from debubble.timeline.model import (
    I64,
    MOST_IN_FLIGHT,
    UNKNOWN,
    Columns,
    Flags,
    Meetings,
    RankTimeline,
    Role,
    Timeline,
    join_columns,
    role_of,
)
from debubble.timeline.work import Work
from debubble.trace.columns import Group, Operation, RankTrace
from debubble.units import NS_PER_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Attendance(Columns):
    """The collectives of one group as one rank saw them, in their order, on the common clock."""

    issued_ns: I64
    """When its host asked for each."""
    start_ns: I64
    end_ns: I64
    size: I64


def crosses_stages(group: Group, stages: Sequence[int]) -> bool:
    """Tell whether members of a group are of several stages, given a rank of each stage."""
    if group.ranks:
        return len({*group.ranks} & {*stages}) > 1
    return role_of(group) is Role.PIPELINE


def crossing_work(trace: RankTrace, work: Work, stages: Sequence[int]) -> Flags:
    """Tell which work of a rank is a collective among ranks of different stages."""
    crossing = [crosses_stages(group, stages) for group in trace.groups]
    flags: Flags = np.array([*crossing, False])[work.group] & work.collective
    return flags


def attend(trace: RankTrace, group: int, offset_ns: int) -> Attendance:
    """List a rank's collectives of one group that its device ran."""
    operators, kernels = trace.operators, trace.kernels
    mine = (operators.operation == Operation.COLLECTIVE) & (operators.group == group)
    rows = np.flatnonzero(mine & (operators.kernel >= 0))
    kernel, first = np.unique(operators.kernel[rows], return_index=True)
    order = np.argsort(kernels.start_ns[kernel], kind="stable")
    start = kernels.start_ns[kernel][order] + offset_ns
    return Attendance(
        issued_ns=operators.start_ns[rows[first]][order] + offset_ns,
        start_ns=start,
        end_ns=start + kernels.duration_ns[kernel][order],
        size=operators.message_bytes[rows[first]][order],
    )


def meet(members: Mapping[int, Attendance]) -> Meetings:
    """Match the collectives of one group, and say when the last member of each came.

    Captures begin at different ones. Sizes must agree, and members leave at about the same time.
    """
    ranks = sorted(rank for rank, seen in members.items() if len(seen.start_ns))
    if not ranks:
        return Meetings.no_rows()
    reference = max(ranks, key=lambda rank: len(members[rank].start_ns))
    shifts = {rank: _shift(members[reference], members[rank]) for rank in ranks}
    first = min(shifts.values())
    count = max(shifts[rank] + len(members[rank].start_ns) for rank in ranks) - first
    start = np.full((len(ranks), count), np.iinfo(np.int64).max)
    end = np.full((len(ranks), count), np.iinfo(np.int64).min)
    for row, rank in enumerate(ranks):
        held = slice(shifts[rank] - first, shifts[rank] - first + len(members[rank].start_ns))
        start[row, held], end[row, held] = members[rank].start_ns, members[rank].end_ns
    there = end > np.iinfo(np.int64).min
    parts = []
    for row, rank in enumerate(ranks):
        at = np.flatnonzero(there[row])
        # Nobody waits for one who came after it had left: a root leaves once it has sent.
        came = np.where(there[:, at] & (start[:, at] < end[row, at]), start[:, at], start[row, at])
        late = came.argmax(axis=0)
        parts.append(
            Meetings(
                rank=np.full(len(at), rank, dtype=np.int32),
                start_ns=start[row, at],
                end_ns=end[row, at],
                arrived_ns=came.max(axis=0),
                late=np.where(late == row, UNKNOWN, np.array(ranks)[late]).astype(np.int32),
            )
        )
    return join_meetings(parts)


def join_meetings(parts: Sequence[Meetings]) -> Meetings:
    """Put the collectives of several groups, or pipelines, together."""
    return join_columns([Meetings.no_rows(), *parts], by="start_ns")


def meet_in_stages(timeline: Timeline, traces: Iterable[RankTrace]) -> Timeline:
    """Match the collectives among ranks of one stage, which lie in several pipelines.

    Pipelines have clocks of their own; members leave such a collective together. Traces may also be
    of ranks that share a stage with those of the timeline.
    """
    lines = {line.rank: line for line in timeline.ranks}
    seen: dict[tuple[str, tuple[int, ...]], dict[int, Attendance]] = {}
    for trace in traces:
        rank = UNKNOWN if trace.rank is None else trace.rank
        for number, group in enumerate(trace.groups):
            member = lines.get(rank) or lines.get(min({*group.ranks} & lines.keys(), default=-1))
            among = role_of(group) is Role.INNER and rank in group.ranks and len(group.ranks) > 1
            if member is not None and among and not crosses_stages(group, member.members):
                attendance = attend(trace, number, member.clock_offset_ns)
                seen.setdefault((group.name, group.ranks), {})[rank] = attendance
    found: dict[int, list[Meetings]] = {}
    for (_, ranks), members in seen.items():
        if len(members) < len(ranks) or len({len(one.end_ns) for one in members.values()}) > 1:
            continue  # who came last, or which belongs to which, is not known
        first = members[min(members)]
        offsets = {rank: one.end_ns - first.end_ns for rank, one in members.items()}
        laid = {
            rank: one.shifted(-int(np.median(offsets[rank])) if len(offsets[rank]) else 0)
            for rank, one in members.items()
        }
        met = meet(laid)
        for rank, one in members.items():
            mine = met.where(met.rank == rank)
            back = (one.start_ns[0] - mine.start_ns[0]) if len(mine) else 0
            found.setdefault(rank, []).append(mine.shifted(int(back)))
    ranks_met = tuple(
        replace(line, shared=join_meetings(found[line.rank])) if line.rank in found else line
        for line in timeline.ranks
    )
    return replace(timeline, ranks=ranks_met)


def _shift(reference: Attendance, other: Attendance) -> int:
    """Return which collective of the reference the first of another rank is."""
    best = (np.inf, 0)
    for shift in range(-MOST_IN_FLIGHT, MOST_IN_FLIGHT + 1):
        late, early = max(0, shift), max(0, -shift)
        count = min(len(reference.start_ns) - late, len(other.start_ns) - early)
        if count < 1:
            continue
        mine, theirs = slice(late, late + count), slice(early, early + count)
        sizes = reference.size[mine], other.size[theirs]
        if ((sizes[0] != sizes[1]) & (sizes[0] >= 0) & (sizes[1] >= 0)).any():
            continue
        apart = float(np.median(np.abs(reference.end_ns[mine] - other.end_ns[theirs])))
        best = min(best, (apart, shift))
    return best[1]


class LateRank(msgspec.Struct, frozen=True, kw_only=True):
    """Whom a rank waits for most in collectives of its stage."""

    rank: int
    late_rank: int
    wait_s: float
    """Over all that was captured."""


def latest_in_collectives(rank: RankTimeline) -> LateRank | None:
    """Return the rank that one waits for longest in collectives; None where it waits for none."""
    waits, met = Counter[int](), rank.shared
    for late, waited in zip(
        met.late.tolist(), (met.arrived_ns - met.start_ns).tolist(), strict=True
    ):
        if late >= 0:
            waits[late] += waited
    if not waits:
        return None
    late, waited = waits.most_common(1)[0]
    return LateRank(rank=rank.rank, late_rank=late, wait_s=waited / NS_PER_S)
