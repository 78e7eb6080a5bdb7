"""A run's traces in → its `Timeline` out: the steps of the analysis, one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from debubble.errors import Code, Gap, NoPipeline
from debubble.timeline.chain import Chain, find_chains
from debubble.timeline.clock import Clocks, align
from debubble.timeline.labels import Assignment, assign_by_labels
from debubble.timeline.model import (
    I32,
    I64,
    UNKNOWN,
    Intervals,
    Passes,
    RankTimeline,
    Timeline,
    Transfers,
)
from debubble.timeline.steps import find_steps
from debubble.timeline.structure import assign_by_structure
from debubble.timeline.transfers import Posted, match_transfers
from debubble.timeline.work import (
    Messages,
    Work,
    apparent_of,
    busy_of,
    find_messages,
    find_work,
    occupied_of,
)
from debubble.trace.busy import merge
from debubble.trace.columns import RankTrace
from debubble.trace.summary import peak_memory
from debubble.units import counted


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rank:
    """One rank on the way to the timeline."""

    trace: RankTrace
    rank: int
    work: Work
    messages: Messages
    work_step: I32
    message_step: I32


def build_timeline(traces: Sequence[RankTrace]) -> Timeline:
    """Turn unlabelled ranks into pipelines of named passes on one clock."""
    ranks = [_prepare(trace) for trace in traces]
    chains = find_chains({rank.rank: rank.messages for rank in ranks})
    chains = tuple(chain for chain in chains if len(chain.ranks) > 1)
    if not chains:
        raise _no_pipeline(ranks)
    gaps: list[Gap] = []
    posted = {r.rank: Posted(messages=r.messages, step=r.message_step) for r in ranks}
    transfers, unmatched = match_transfers(posted)
    if unmatched:
        gaps.append(_unmatched(unmatched))
    clocks = align(transfers, posted)
    lines: list[RankTimeline] = []
    parts: list[Passes] = []
    for number, chain in enumerate(chains):
        for rank in (one for one in ranks if one.rank in chain.ranks):
            assignment = _assign(rank, chain)
            position, offset = chain.ranks.index(rank.rank), clocks.offset_ns[rank.rank]
            passes = _passes(rank, assignment, position)
            stages = tuple(sorted(set(passes.stage.tolist())))
            parts.append(_shift_passes(passes, offset))
            lines.append(_line(rank, assignment, stages, (number, position), offset))
    steps = sorted({step for rank in ranks for step in rank.work_step.tolist() if step >= 0})
    return Timeline(
        ranks=tuple(sorted(lines, key=lambda line: (line.pipeline, line.position))),
        passes=_join_passes(parts),
        transfers=_shift_transfers(transfers, clocks),
        steps=tuple(steps),
        clock_uncertainty_ns=clocks.uncertainty_ns,
        gaps=tuple(gaps),
    )


def _prepare(trace: RankTrace) -> _Rank:
    work, messages, steps = find_work(trace), find_messages(trace), find_steps(trace)
    return _Rank(
        trace=trace,
        rank=trace.rank if trace.rank is not None else UNKNOWN,
        work=work,
        messages=messages,
        work_step=steps.at(work.issued_ns),
        message_step=steps.at(messages.issued_ns),
    )


def _assign(rank: _Rank, chain: Chain) -> Assignment:
    labelled = assign_by_labels(rank.trace, rank.work)
    if labelled is not None:
        return labelled
    beside = chain.beside(rank.rank)
    return assign_by_structure(rank.work, rank.work_step, rank.messages, rank.message_step, beside)


def _passes(rank: _Rank, assignment: Assignment, position: int) -> Passes:
    """Gather the work of each pass: from its first start to its last end."""
    kept = np.flatnonzero((assignment.kind >= 0) & (rank.work_step >= 0))
    stage = np.where(assignment.stage[kept] >= 0, assignment.stage[kept], position)
    keys = np.stack(
        (rank.work_step[kept], stage, assignment.kind[kept], assignment.microbatch[kept])
    ).astype(np.int64)
    unique, group = np.unique(keys, axis=1, return_inverse=True)
    group = group.reshape(-1)
    start, end = rank.work.start_ns[kept], rank.work.end_ns[kept]
    starts = np.full(unique.shape[1], np.iinfo(np.int64).max, dtype=np.int64)
    ends = np.full(unique.shape[1], np.iinfo(np.int64).min, dtype=np.int64)
    np.minimum.at(starts, group, start)
    np.maximum.at(ends, group, end)
    return Passes(
        rank=np.full(unique.shape[1], rank.rank, dtype=np.int32),
        stage=unique[1].astype(np.int32),
        kind=unique[2].astype(np.uint8),
        microbatch=unique[3].astype(np.int32),
        step=unique[0].astype(np.int32),
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


def _line(
    rank: _Rank,
    assignment: Assignment,
    stages: tuple[int, ...],
    place: tuple[int, int],
    offset: int,
) -> RankTimeline:
    pipeline, position = place
    return RankTimeline(
        rank=rank.rank,
        pipeline=pipeline,
        position=position,
        stages=stages or (position,),
        busy=_shift(busy_of(rank.work), offset),
        occupied=_shift(occupied_of(rank.work, assignment.kind >= 0), offset),
        apparent=_shift(apparent_of(rank.trace, rank.work), offset),
        peak_memory_bytes=peak_memory(rank.trace),
        clock_offset_ns=offset,
    )


def _shift(intervals: Intervals, offset: int) -> Intervals:
    return Intervals(start_ns=intervals.start_ns + offset, end_ns=intervals.end_ns + offset)


def _shift_passes(passes: Passes, offset: int) -> Passes:
    return replace(passes, start_ns=passes.start_ns + offset, end_ns=passes.end_ns + offset)


def _shift_transfers(transfers: Transfers, clocks: Clocks) -> Transfers:
    ranks = np.array(sorted(clocks.offset_ns), dtype=np.int64)
    offsets = np.array([clocks.offset_ns[rank] for rank in ranks.tolist()], dtype=np.int64)
    sent = offsets[np.searchsorted(ranks, transfers.source)]
    received = offsets[np.searchsorted(ranks, transfers.destination)]
    return replace(
        transfers,
        send_start_ns=transfers.send_start_ns + sent,
        send_end_ns=transfers.send_end_ns + sent,
        receive_start_ns=transfers.receive_start_ns + received,
        receive_end_ns=transfers.receive_end_ns + received,
    )


def _join_passes(parts: Sequence[Passes]) -> Passes:
    columns = {
        name: np.concatenate([getattr(part, name) for part in parts])
        for name in Passes.__dataclass_fields__
    }
    order = np.argsort(columns["start_ns"], kind="stable")
    return Passes(**{name: column[order] for name, column in columns.items()})


def _no_pipeline(ranks: Sequence[_Rank]) -> NoPipeline:
    posts = sum(len(rank.messages) for rank in ranks)
    if not posts:
        return NoPipeline(
            "no pipeline in these traces: no rank sends or receives point to point",
            hint="`debubble inspect` says what they hold; collectives alone make no pipeline",
        )
    return NoPipeline(
        f"no pipeline can be told: the peers of all {counted(posts, 'message')} are unknown",
        hint="record with record_shapes=True",
    )


def _unmatched(count: int) -> Gap:
    return Gap(
        code=Code.UNMATCHED_TRANSFERS,
        message=f"{counted(count, 'message')} without a counterpart left out",
        hint="a rank is missing, or was captured for another stretch of time",
    )
