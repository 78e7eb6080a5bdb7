"""A run's traces in → its `Timeline` out: the steps of the analysis, one after the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from debubble.errors import Code, Gap, NoPipeline
from debubble.timeline.chain import Chain, find_chains
from debubble.timeline.clock import align, shift_transfers
from debubble.timeline.from_table import build_from_table
from debubble.timeline.grouping import number_passes
from debubble.timeline.labels import Assignment, assign_by_labels
from debubble.timeline.layers import measure_layers
from debubble.timeline.memory import measure_memory
from debubble.timeline.model import (
    I32,
    I64,
    UNKNOWN,
    Intervals,
    Passes,
    PassKind,
    RankTimeline,
    StageLayers,
    Timeline,
)
from debubble.timeline.outside import find_outside, lies_outside
from debubble.timeline.peers import name_peers
from debubble.timeline.steps import find_steps, whole_run
from debubble.timeline.structure import Posts, assign_by_structure, messages_a_pass
from debubble.timeline.transfers import (
    Posted,
    answers_lag,
    count_cut_off,
    find_shift,
    match_transfers,
)
from debubble.timeline.work import (
    Messages,
    Work,
    apparent_of,
    busy_of,
    find_messages,
    find_waits,
    find_work,
    occupied_of,
)
from debubble.trace.busy import merge
from debubble.trace.columns import RankTrace
from debubble.trace.run import Run
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


def build_run(run: Run) -> Timeline:
    """Build the timeline of whatever was read: traces of ranks, or an op table."""
    if run.ranks or not run.tables:
        return build_timeline(run.ranks)
    return build_from_table(run.tables[0])


def build_timeline(traces: Sequence[RankTrace]) -> Timeline:
    """Turn unlabelled ranks into pipelines of named passes on one clock."""
    named, unknown_groups = name_peers(traces)
    marked = any(len(find_steps(trace).number) for trace in named)
    ranks = [_prepare(trace, marked=marked) for trace in named]
    chains = find_chains({rank.rank: rank.messages for rank in ranks})
    chains = tuple(chain for chain in chains if len(chain.ranks) > 1)
    if not chains:
        raise _no_pipeline(ranks, unknown_groups)
    gaps = list(unknown_groups)
    posted = {r.rank: Posted(messages=r.messages, step=r.message_step) for r in ranks}
    transfers, unmatched = match_transfers(posted, _pairs_across_steps(posted, chains, marked))
    if unmatched:
        gaps.append(_unmatched(unmatched))
    clocks = align(transfers, posted)
    lines: list[RankTimeline] = []
    parts: list[Passes] = []
    for number, chain in enumerate(chains):
        before = {} if marked else _batches_before(posted, chain)
        for rank in (one for one in ranks if one.rank in chain.ranks):
            assignment = _assign(rank, chain, ranks, before.get(rank.rank))
            position, offset = chain.ranks.index(rank.rank), clocks.offset_ns[rank.rank]
            passes = _passes(rank, assignment, position)
            stages = tuple(sorted(set(passes.stage.tolist())))
            parts.append(_shift_passes(passes, offset))
            line = _line(rank, assignment, stages, (number, position), offset)
            lines.append(replace(line, members=chain.ranks))
    steps = {step for rank in ranks for step in rank.work_step.tolist() if marked and step >= 0}
    return Timeline(
        ranks=tuple(sorted(lines, key=lambda line: (line.pipeline, line.position))),
        passes=_join_passes(parts),
        transfers=shift_transfers(transfers, clocks),
        steps=tuple(sorted(steps)),
        clock_uncertainty_ns=clocks.uncertainty_ns,
        gaps=tuple(gaps),
    )


def _prepare(trace: RankTrace, *, marked: bool) -> _Rank:
    work, messages = find_work(trace), find_messages(trace)
    steps = find_steps(trace) if marked else whole_run()
    return _Rank(
        trace=trace,
        rank=trace.rank if trace.rank is not None else UNKNOWN,
        work=work,
        messages=messages,
        work_step=steps.at(work.issued_ns),
        message_step=steps.at(messages.issued_ns),
    )


def _pairs_across_steps(
    posted: Mapping[int, Posted], chains: Sequence[Chain], marked: bool
) -> set[tuple[int, int]]:
    """Return the pairs of ranks between which steps say nothing: all, or a server's ends."""
    if not marked:
        return {(source, destination) for source in posted for destination in posted}
    ends = [(chain.ranks[0], chain.ranks[1], chain.ranks[-1]) for chain in chains]
    return {
        (last, first)
        for first, following, last in ends
        if first in posted and answers_lag(posted[first], following, last)
    }


def _batches_before(posted: Mapping[int, Posted], chain: Chain) -> dict[int, int]:
    """Return what to add to a rank's count of batches, where captures began at different ones."""
    first = [0]
    for left, right in pairwise(chain.ranks):
        shift = 0
        if left in posted and right in posted:
            shift = find_shift(posted, left, right)
            shift -= count_cut_off(posted[left].messages, chain.beside(left))
        first.append(first[-1] + shift)
    return {rank: one - min(first) for rank, one in zip(chain.ranks, first, strict=True)}


def _assign(rank: _Rank, chain: Chain, ranks: Sequence[_Rank], before: int | None) -> Assignment:
    """Name the passes of a rank. Without steps labels repeat from batch to batch, so count on."""
    labelled = assign_by_labels(rank.trace, rank.work) if before is None else None
    if labelled is not None:
        return labelled
    beside = chain.beside(rank.rank)
    posts = Posts(
        messages=rank.messages,
        step=rank.message_step,
        waits_ns=find_waits(rank.trace),
        inputs_each=_sent_at_a_time(ranks, beside.previous, rank.rank),
        gradients_each=_sent_at_a_time(ranks, beside.next, rank.rank),
    )
    found = assign_by_structure(rank.work, rank.work_step, posts, beside)
    return replace(found, microbatch=found.microbatch + (before or 0))


def _sent_at_a_time(ranks: Sequence[_Rank], source: int | None, destination: int) -> int:
    """Ask the sender, who sends when it has computed; receives may be posted long ahead."""
    sender = next((rank for rank in ranks if rank.rank == source), None)
    return messages_a_pass(sender.messages, sender.work, destination) if sender else 1


def _passes(rank: _Rank, assignment: Assignment, position: int) -> Passes:
    """Gather the work of each pass: from its first start to its last end."""
    kept = np.flatnonzero((assignment.kind >= 0) & (rank.work_step >= 0))
    stage = np.where(assignment.stage[kept] >= 0, assignment.stage[kept], position)
    unique, group = number_passes(
        rank.work_step[kept], stage, assignment.kind[kept], assignment.microbatch[kept]
    )
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
    in_pass = assignment.kind >= 0
    return RankTimeline(
        rank=rank.rank,
        pipeline=pipeline,
        position=position,
        stages=stages or (position,),
        busy=_shift(busy_of(rank.work), offset),
        occupied=_shift(
            occupied_of(rank.work, lies_outside(rank.trace, rank.work, in_pass)), offset
        ),
        apparent=_shift(apparent_of(rank.trace, rank.work), offset),
        clock_offset_ns=offset,
        memory=measure_memory(rank.trace, rank.work, assignment, rank.work_step),
        layers=_layers(rank, assignment, position),
        outside=tuple(
            (name, _shift(intervals, offset))
            for name, intervals in find_outside(rank.trace, rank.work, in_pass)
        ),
    )


def _layers(rank: _Rank, assignment: Assignment, position: int) -> tuple[StageLayers, ...]:
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


def _shift_passes(passes: Passes, offset: int) -> Passes:
    return replace(passes, start_ns=passes.start_ns + offset, end_ns=passes.end_ns + offset)


def _join_passes(parts: Sequence[Passes]) -> Passes:
    columns = {
        name: np.concatenate([getattr(part, name) for part in parts])
        for name in Passes.__dataclass_fields__
    }
    order = np.argsort(columns["start_ns"], kind="stable")
    return Passes(**{name: column[order] for name, column in columns.items()})


def _no_pipeline(ranks: Sequence[_Rank], unknown_groups: Sequence[Gap]) -> NoPipeline:
    posts = sum(len(rank.messages) for rank in ranks)
    if not posts:
        return NoPipeline(
            "no pipeline in these traces: no rank sends or receives point to point",
            hint="`debubble inspect` says what they hold; collectives alone make no pipeline",
        )
    return NoPipeline(
        f"no pipeline can be told: the peers of all {counted(posts, 'message')} are unknown",
        hint=unknown_groups[0].hint if unknown_groups else "record with record_shapes=True",
    )


def _unmatched(count: int) -> Gap:
    return Gap(
        code=Code.UNMATCHED_TRANSFERS,
        message=f"{counted(count, 'message')} without a counterpart left out",
        hint="a rank is missing, or was captured for another stretch of time",
    )
