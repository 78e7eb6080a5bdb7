"""A run's traces in → its `Timeline` out: the steps of the analysis, one after the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from debubble.errors import Code, Gap, NoPipeline
from debubble.timeline.chain import Chain, find_chains
from debubble.timeline.clock import align, shift_transfers
from debubble.timeline.collectives import collectives_of, shift_collectives
from debubble.timeline.evidence import find_set_up, find_unfinished
from debubble.timeline.from_table import build_from_table
from debubble.timeline.grouping import number_passes
from debubble.timeline.job import tell_memory
from debubble.timeline.labels import Assignment, assign_by_labels, has_labels
from debubble.timeline.layers import measure_layers
from debubble.timeline.loops import Host, count_pieces, holds_several, name_around
from debubble.timeline.memory import measure_memory
from debubble.timeline.missing import join_over_missing
from debubble.timeline.mixed import contradict, find_mixed
from debubble.timeline.model import (
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
from debubble.timeline.prepared import Prepared, prepare
from debubble.timeline.rhythm import infer_steps, leading
from debubble.timeline.rings import as_collectives, find_rings
from debubble.timeline.steps import Steps, find_steps, whole_run
from debubble.timeline.structure import Posts, assign_by_structure, messages_a_pass
from debubble.timeline.transfers import (
    Posted,
    answers_lag,
    count_cut_off,
    find_shift,
    match_transfers,
)
from debubble.timeline.work import (
    apparent_of,
    busy_of,
    find_waits,
    find_work,
    occupied_of,
    order_by_use,
    unissued_of,
)
from debubble.trace.busy import merge
from debubble.trace.columns import RankTrace
from debubble.trace.run import Run
from debubble.trace.run_gaps import show_ranks
from debubble.units import counted


def build_run(run: Run) -> Timeline:
    """Build the timeline of whatever was read: traces of ranks, or an op table."""
    if run.ranks or not run.tables:
        return tell_memory(build_timeline(run.ranks), run.sidecars)
    return build_from_table(run.tables[0])


def build_timeline(traces: Sequence[RankTrace]) -> Timeline:
    """Turn unlabelled ranks into pipelines of named passes on one clock."""
    named, unknown_groups = name_peers(traces)
    work = [find_work(trace) for trace in named]
    if rings := find_rings(named, work):
        named = tuple(as_collectives(trace, rings) for trace in named)
        work = [find_work(trace) for trace in named]
    marked = any(len(find_steps(trace).number) for trace in named)
    ranks = [
        prepare(trace, computed, find_steps(trace) if marked else whole_run())
        for trace, computed in zip(named, work, strict=True)
    ]
    messages = {rank.rank: leading(rank) for rank in ranks}
    chains = join_over_missing(find_chains(messages), named, messages)
    chains = tuple(chain for chain in chains if len(chain.ranks) > 1)
    if not chains:
        raise _no_pipeline(ranks, unknown_groups, rings=bool(rings))
    gaps = list(unknown_groups)
    inferred = False
    if marked:
        gaps += _beside_marks(ranks, chains)
    else:
        ranks, inferred = _in_inferred_steps(ranks, chains)
        marked = inferred
    posted = {r.rank: Posted(messages=r.messages, step=r.message_step) for r in ranks}
    across = _pairs_across_steps(posted, chains, marked)
    transfers, unmatched = match_transfers(posted, across)
    found = [find_mixed(ranks, chain, transfers, across) for chain in chains]
    gaps += [gap for gap in found if gap]
    clocks = align(transfers, posted)
    lines: list[RankTimeline] = []
    parts: list[Passes] = []
    for number, chain in enumerate(chains):
        before = {} if marked else _batches_before(posted, chain)
        around = _name_around(chain, ranks, gaps) if marked else {}
        for rank in (one for one in ranks if one.rank in chain.ranks):
            assignment = around.get(rank.rank) or _assign(rank, chain, ranks, before.get(rank.rank))
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
        unmatched=unmatched,
        inferred=inferred,
        mixed=frozenset(number for number, gap in enumerate(found) if gap),
    )


def _in_inferred_steps(
    ranks: Sequence[Prepared], chains: Sequence[Chain]
) -> tuple[list[Prepared], bool]:
    """Part a run that marks no steps by its own rhythm, where every pipeline shows one."""
    found: dict[int, Steps] = {}
    for chain in chains:
        mine = [one for one in ranks if one.rank in chain.ranks]
        assigned = {one.rank: _assign(one, chain, ranks, 0) for one in mine}
        steps = infer_steps(mine, chain, assigned)
        if steps is None:
            return list(ranks), False
        found |= steps
    parted = [one.in_steps(found[one.rank]) if one.rank in found else one for one in ranks]
    if _contradict(parted, chains, marked=True) and not _contradict(ranks, chains, marked=False):
        return list(ranks), False
    return parted, True


def _contradict(ranks: Sequence[Prepared], chains: Sequence[Chain], *, marked: bool) -> bool:
    """Tell whether messages arrive before they are sent, as steps pair them or their mere order."""
    posted = {r.rank: Posted(messages=r.messages, step=r.message_step) for r in ranks}
    across = _pairs_across_steps(posted, chains, marked)
    transfers, _ = match_transfers(posted, across)
    return any(contradict(transfers, chain.ranks) for chain in chains)


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


def _assign(
    rank: Prepared, chain: Chain, ranks: Sequence[Prepared], before: int | None
) -> Assignment:
    """Name the passes of a rank. Without steps labels repeat from batch to batch, so count on."""
    labelled = assign_by_labels(rank.trace, rank.work) if before is None else None
    if labelled is not None:
        return labelled
    beside = chain.beside(rank.rank)
    posts = replace(
        _posts(rank),
        inputs_each=_sent_at_a_time(ranks, beside.previous, rank.rank),
        gradients_each=_sent_at_a_time(ranks, beside.next, rank.rank),
    )
    found = assign_by_structure(rank.work, rank.work_step, posts, beside)
    return replace(found, microbatch=found.microbatch + (before or 0))


def _posts(rank: Prepared) -> Posts:
    messages, step = rank.messages, rank.message_step
    if not len(rank.trace.kernels):
        messages, step = order_by_use(messages, step)
    return Posts(messages=messages, step=step, waits_ns=find_waits(rank.trace))


def _name_around(chain: Chain, ranks: Sequence[Prepared], gaps: list[Gap]) -> dict[int, Assignment]:
    """Name the passes of unlabelled ranks that hold several stages each; say where none can be."""
    mine = {rank.rank: rank for rank in ranks if rank.rank in chain.ranks}
    if len(mine) < len(chain.ranks) or any(has_labels(rank.trace) for rank in mine.values()):
        return {}
    hosts = [
        Host(
            rank=rank,
            work=mine[rank].work,
            step=mine[rank].work_step,
            posts=_posts(mine[rank]),
            sent_at_a_time=_sent_at_a_time(ranks, rank, following or chain.ranks[0]),
        )
        for rank in chain.ranks
        for following in (chain.beside(rank).next,)
    ]
    named = name_around(hosts)
    if named is None and holds_several(hosts[0]):
        gaps.append(_stages_unknown(chain))
        return {
            host.rank: count_pieces(host, receives_first=place > 0)
            for place, host in enumerate(hosts)
        }
    return named or {}


def _sent_at_a_time(ranks: Sequence[Prepared], source: int | None, destination: int) -> int:
    """Ask the sender, who sends when it has computed; receives may be posted long ahead."""
    sender = next((rank for rank in ranks if rank.rank == source), None)
    return messages_a_pass(sender.messages, sender.work, destination) if sender else 1


def _passes(rank: Prepared, assignment: Assignment, position: int) -> Passes:
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


def _line(
    rank: Prepared,
    assignment: Assignment,
    stages: tuple[int, ...],
    place: tuple[int, int],
    offset: int,
) -> RankTimeline:
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


def _shift_passes(passes: Passes, offset: int) -> Passes:
    return replace(
        passes,
        issued_ns=passes.issued_ns + offset,
        start_ns=passes.start_ns + offset,
        end_ns=passes.end_ns + offset,
    )


def _join_passes(parts: Sequence[Passes]) -> Passes:
    columns = {
        name: np.concatenate([getattr(part, name) for part in parts])
        for name in Passes.__dataclass_fields__
    }
    order = np.argsort(columns["start_ns"], kind="stable")
    return Passes(**{name: column[order] for name, column in columns.items()})


def _beside_marks(ranks: Sequence[Prepared], chains: Sequence[Chain]) -> list[Gap]:
    """Name the ranks that exchange messages before their first mark, or after their last one."""
    found = []
    for one in ranks:
        outside = one.message_step < 0
        if len(one.steps.number) and any(one.rank in chain.ranks for chain in chains):
            issued = one.messages.issued_ns[outside]
            ends = (issued < one.steps.start_ns[0]) | (issued >= one.steps.end_ns[-1])
            found += [one.rank] if ends.any() else []
    if not found:
        return []
    who = f"{'rank' if len(found) == 1 else 'ranks'} {show_ranks(found)}"
    return [
        Gap(
            code=Code.CUT_STEPS,
            message=f"a step before or after the marked ones, captured in part by {who}, left out",
            hint="let the capture begin and end between two steps",
        )
    ]


def _no_pipeline(
    ranks: Sequence[Prepared], unknown_groups: Sequence[Gap], *, rings: bool
) -> NoPipeline:
    posts = sum(len(rank.messages) for rank in ranks)
    if not posts and rings:
        return NoPipeline(
            "no pipeline in these traces: ranks only pass blocks around a ring",
            hint="context parallelism looks so; it makes no pipeline, nor do collectives",
        )
    if not posts:
        return NoPipeline(
            "no pipeline in these traces: no rank sends or receives point to point",
            hint="`debubble inspect` says what they hold; collectives alone make no pipeline",
        )
    return NoPipeline(
        f"no pipeline can be told: the peers of all {counted(posts, 'message')} are unknown",
        hint=unknown_groups[0].hint if unknown_groups else "record with record_shapes=True",
    )


def _stages_unknown(chain: Chain) -> Gap:
    return Gap(
        code=Code.STAGES_UNKNOWN,
        message=f"ranks {show_ranks(chain.ranks)} hold several stages each, "
        "and their passes are in no order that is known: all of a rank count as one stage",
        hint="label passes as torch does, such as record_function('PP:4F0'): stage 4, microbatch 0",
    )
