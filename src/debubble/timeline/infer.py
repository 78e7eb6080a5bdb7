"""Ranks that exchange messages in → one `Timeline`: the order in which it is inferred from traces.

`build_part` is the table of contents; docs/explanation/how-the-timeline-is-built.md tells why.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import numpy as np

from debubble.errors import Code, Gap
from debubble.timeline.bubble import measure_stream
from debubble.timeline.chain import (
    Chain,
    as_collectives,
    find_chains,
    find_rings,
    join_over_missing,
)
from debubble.timeline.clock import (
    align,
    contradict,
    find_jumps,
    find_mixed,
    name_wrong,
    shift_transfers,
)
from debubble.timeline.doubts import doubt_messages, doubt_passes
from debubble.timeline.layers import StagePasses, count_layers, recomputed_share
from debubble.timeline.lines import (
    line_of,
    passes_of,
    stage_passes_of,
    without_bystanders,
)
from debubble.timeline.meetings import (
    Attendance,
    attend,
    crosses_stages,
    join_meetings,
    meet,
)
from debubble.timeline.model import (
    UNKNOWN,
    Meetings,
    Parallelism,
    Passes,
    RankTimeline,
    Timeline,
    Transfers,
    divide,
    join_columns,
    read_shapes,
)
from debubble.timeline.passes import (
    Assignment,
    Host,
    Posts,
    assign_by_labels,
    assign_by_structure,
    count_pieces,
    has_labels,
    holds_several,
    messages_a_pass,
    name_around,
)
from debubble.timeline.rhythm import infer_steps, leading
from debubble.timeline.steps import (
    RankRecord,
    Steps,
    find_steps,
    numbered,
    record_rank,
    whole_run,
)
from debubble.timeline.transfers import (
    RankMessages,
    Shift,
    Shifts,
    answers_lag,
    count_cut_off,
    find_shifts,
    match_transfers,
    pair_with_more,
)
from debubble.timeline.turns import Turns, assign_by_turns, find_turns
from debubble.timeline.work import find_waits, find_work, order_by_use
from debubble.trace.columns import Operation, RankTrace
from debubble.units import show_ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class NoPipelineHere:
    """Ranks that make no pipeline, and what they exchange instead."""

    messages: int
    rings: bool


def build_part(
    named: Sequence[RankTrace],
    *,
    marked: bool,
    may_infer: bool = True,
    in_flight: int | None = None,
    shifts: Shifts | None = None,
) -> Timeline | NoPipelineHere:
    """Turn unlabelled ranks into pipelines of named passes on one clock, if they make any.

    `marked`: some rank of the run, of this part or not, marks steps. `in_flight`: how many batches
    of a stream are said to be. `shifts`: how its messages are paired, where that is known.
    """
    again = partial(build_part, named, marked=marked, may_infer=may_infer)
    # Who. Traces → what each rank computed and exchanged → the order of ranks in each pipeline.
    ranks, rings = _record_ranks(named, marked=marked)
    chains = _order_ranks(ranks)
    if not chains:
        return NoPipelineHere(messages=sum(len(rank.messages) for rank in ranks), rings=rings)

    # Steps. The profiler's marks, else the pipelines' own rhythm → the step of work and messages.
    gaps = doubt_messages(named)
    gaps += _beside_marks(ranks, chains) if marked else []
    inferred = _in_inferred_steps(ranks, chains) if may_infer and not marked else None
    in_steps = marked or inferred is not None
    ranks = inferred or ranks

    # Transfers and clock. Sends and receives → pairs → are they of one run → one clock for all.
    posted = {rank.rank: rank.posted for rank in ranks}
    across = _pairs_across_steps(posted, chains, in_steps=in_steps)
    shifts = {} if in_steps else shifts or find_shifts(posted, [chain.ranks for chain in chains])
    transfers, unmatched = match_transfers(posted, across, shifts)
    mixed = [find_mixed(ranks, chain, transfers, across) for chain in chains]
    gaps += [gap for gap in mixed if gap]
    clocks = align(_telling_clocks(transfers, shifts), posted)
    gaps += [] if any(mixed) else name_wrong(clocks)
    # A host that waits for a message late tells nothing of when it came; a kernel does.
    if not any(mixed) and all(len(rank.trace.kernels) for rank in ranks):
        gaps += find_jumps(transfers, posted)

    # Passes. Labels, else what the host launched between messages → the pass of all work.
    assigned: list[dict[int, Assignment]] = []
    counted_before: list[Mapping[int, int]] = []
    unsure: dict[int, tuple[int, int | None]] = {}
    for chain in chains:
        before, off = ({}, (0, 0)) if in_steps else _batches_before(ranks, chain, shifts, transfers)
        unsure |= {len(assigned): off} if off != (0, 0) else {}
        passes_of_ranks, unknown = _assign_passes(chain, ranks, before, in_steps=in_steps)
        assigned.append(passes_of_ranks)
        counted_before.append(before)
        gaps += unknown
        told = [(r, passes_of_ranks[r.rank]) for r in ranks if r.rank in passes_of_ranks]
        gaps += doubt_passes(told)

    # Memory and layers. Work with its pass → the line of each rank, what its stages are made of.
    lines: list[RankTimeline] = []
    passes: list[Passes] = []
    for number, chain in enumerate(chains):
        drawn, ran = _draw_pipeline(number, chain, ranks, assigned[number], clocks.offset_ns)
        drawn = [_with_turns(line, ranks, counted_before[number]) for line in drawn]
        lines += drawn
        passes += ran

    # Figures are made of this by `figures.measure_pipeline`, for each pipeline.
    steps = {step for rank in ranks for step in rank.work_step.tolist() if in_steps and step >= 0}
    built = Timeline(
        ranks=tuple(sorted(lines, key=lambda line: (line.pipeline, line.position))),
        passes=join_columns(passes, by="start_ns"),
        transfers=shift_transfers(transfers, clocks),
        steps=tuple(sorted(steps)),
        clock_uncertainty_ns=clocks.uncertainty_ns,
        gaps=tuple(gaps),
        unmatched=unmatched,
        inferred=inferred is not None,
        mixed=frozenset(number for number, gap in enumerate(mixed) if gap),
        unsure=unsure,
    )
    stated: dict[tuple[int, int], Shift | None] = {}
    for number in unsure:
        stream = None if in_flight is None else measure_stream(built, number)
        if stream is not None and in_flight is not None:
            more = in_flight - stream.usual_in_flight
            stated |= pair_with_more(chains[number].ranks, shifts, more)
    return again(shifts={**shifts, **stated}) if stated else built


# Who: what each rank did, and the order of ranks in their pipelines.


def _record_ranks(named: Sequence[RankTrace], *, marked: bool) -> tuple[list[RankRecord], bool]:
    """List what each rank computed and exchanged; rings as collectives, and if there are any."""
    work = [find_work(trace) for trace in named]
    rings = find_rings(named, work)
    if rings:
        named = [as_collectives(trace, rings) for trace in named]
        work = [find_work(trace) for trace in named]
    ranks = [
        record_rank(trace, computed, find_steps(trace) if marked else whole_run())
        for trace, computed in zip(named, work, strict=True)
    ]
    return (ranks if marked else [_tagged(rank) for rank in ranks]), bool(rings)


def _tagged(rank: RankRecord) -> RankRecord:
    """Tell messages by their batches, where an engine names those."""
    turns, messages = find_turns(rank.trace), rank.messages
    if turns is None:
        return rank
    tag = turns.tags(messages.issued_ns, messages.is_send)
    return replace(rank, messages=replace(messages, tag=tag))


def _order_ranks(ranks: Sequence[RankRecord]) -> list[Chain]:
    """Chain the ranks of each pipeline, by their first messages and over ranks without a trace."""
    messages = {rank.rank: leading(rank) for rank in ranks}
    pieces, traces = find_chains(messages), [rank.trace for rank in ranks]
    joined = join_over_missing(pieces, traces, messages)
    return [chain for chain in joined if len(chain.ranks) > 1]


# Steps: where no mark tells them, the rhythm does, unless messages contradict it.


def _beside_marks(ranks: Sequence[RankRecord], chains: Sequence[Chain]) -> list[Gap]:
    """Name the ranks that exchange messages before their first mark, or after their last one."""
    found = []
    for rank in ranks:
        if len(rank.steps.number) and any(rank.rank in chain.ranks for chain in chains):
            issued = rank.messages.issued_ns[rank.message_step < 0]
            ends = (issued < rank.steps.start_ns[0]) | (issued >= rank.steps.end_ns[-1])
            found += [rank.rank] if ends.any() else []
    if not found:
        return []
    who = numbered("rank", found)
    return [
        Gap(
            code=Code.CUT_STEPS,
            message=f"a step before or after the marked ones, captured in part by {who}, left out",
            hint="let the capture begin and end between two steps",
        )
    ]


def _in_inferred_steps(
    ranks: Sequence[RankRecord], chains: Sequence[Chain]
) -> list[RankRecord] | None:
    """Part a run that marks no steps by its own rhythm; None where a pipeline shows none.

    Nor where messages then arrive before they are sent, and in their mere order do not.
    """
    found: dict[int, Steps] = {}
    for chain in chains:
        mine = [rank for rank in ranks if rank.rank in chain.ranks]
        assigned = {rank.rank: _assign(rank, chain, ranks, 0) for rank in mine}
        steps = infer_steps(mine, chain, assigned)
        if steps is None:
            return None
        found |= steps
    parted = [rank.in_steps(found[rank.rank]) if rank.rank in found else rank for rank in ranks]

    def contradicted(records: Sequence[RankRecord], *, in_steps: bool) -> bool:
        posted = {rank.rank: rank.posted for rank in records}
        across = _pairs_across_steps(posted, chains, in_steps=in_steps)
        transfers, _ = match_transfers(posted, across)
        return any(contradict(transfers, chain.ranks) for chain in chains)

    if contradicted(parted, in_steps=True) and not contradicted(ranks, in_steps=False):
        return None
    return parted


# Transfers: between which ranks steps tell what belongs together.


def _pairs_across_steps(
    posted: Mapping[int, RankMessages], chains: Sequence[Chain], *, in_steps: bool
) -> set[tuple[int, int]]:
    """Return the pairs of ranks between which steps say nothing: all, or a server's ends."""
    if not in_steps:
        return {(source, destination) for source in posted for destination in posted}
    ends = [(chain.ranks[0], chain.ranks[1], chain.ranks[-1]) for chain in chains]
    return {
        (last, first)
        for first, following, last in ends
        if first in posted and answers_lag(posted[first], following, last)
    }


# Passes: by labels, by structure, or around a loop of stages.


def _assign_passes(
    chain: Chain,
    ranks: Sequence[RankRecord],
    before: Mapping[int, int],
    *,
    in_steps: bool,
) -> tuple[dict[int, Assignment], list[Gap]]:
    """Name the passes of each rank of a pipeline; say where stages cannot be told apart."""
    around, gaps = _name_around(chain, ranks) if in_steps else ({}, [])
    return {
        rank.rank: around.get(rank.rank) or _assign(rank, chain, ranks, before.get(rank.rank))
        for rank in ranks
        if rank.rank in chain.ranks
    }, gaps


def _telling_clocks(transfers: Transfers, shifts: Shifts) -> Transfers:
    """Leave out hops of a stream on which nobody waits, or that may be paired otherwise."""
    told = np.ones(len(transfers), dtype=bool)
    for (source, destination), shift in shifts.items():
        if shift is not None and not (shift.sure and shift.waited):
            told &= (transfers.source != source) | (transfers.destination != destination)
    return transfers.where(told)


def _batches_before(
    ranks: Sequence[RankRecord], chain: Chain, shifts: Shifts, transfers: Transfers
) -> tuple[dict[int, int], tuple[int, int | None]]:
    """Return what to add to a rank's count of batches, where captures began at different ones; and
    how many fewer may lie between the first rank and the last than that tells, and how many more.
    """  # noqa: D205 (one sentence)
    posted = {rank.rank: rank.posted for rank in ranks}
    turns = {rank.rank: turns for rank in ranks if (turns := find_turns(rank.trace)) is not None}
    first, fewer = [0], 0
    more: int | None = 0
    for left, right in pairwise(chain.ranks):
        shift = 0
        if left in posted and right in posted:
            found = shifts[left, right]
            each = _sent_at_a_time(ranks, left, right)
            if found is not None:
                shift, fewer = found.first // each, fewer + (found.most - found.first) // each
                if more is not None:
                    least = found.least
                    more = None if least is None else more + (found.first - least) // each
            if left in turns and right in turns:
                shift = _batches_apart(transfers, (left, right), turns[left], turns[right])
            else:
                shift -= count_cut_off(posted[left].messages, chain.beside(left))
        first.append(first[-1] + shift)
    before = {rank: batch - min(first) for rank, batch in zip(chain.ranks, first, strict=True)}
    return before, (fewer, more)


def _batches_apart(transfers: Transfers, hop: tuple[int, int], left: Turns, right: Turns) -> int:
    """Return how many batches later one rank's first label is than another's, by their messages."""
    mine = transfers.where((transfers.source == hop[0]) & (transfers.destination == hop[1]))
    sent, received = left.under_way(mine.send_issued_ns), right.following(mine.receive_issued_ns)
    apart = (sent - received)[(sent >= 0) & (received >= 0)]
    return int(np.median(apart)) if len(apart) else 0


def _assign(
    rank: RankRecord, chain: Chain, ranks: Sequence[RankRecord], before: int | None
) -> Assignment:
    """Name the passes of a rank. Without steps labels repeat from batch to batch, so count on."""
    labelled = assign_by_labels(rank.trace, rank.work) if before is None else None
    if labelled is not None:
        return labelled
    turns = None if before is None else find_turns(rank.trace)
    if turns is not None:
        return assign_by_turns(rank, turns, chain, before or 0)
    beside = chain.beside(rank.rank)
    posts = replace(
        _posts(rank),
        inputs_each=_sent_at_a_time(ranks, beside.previous, rank.rank),
        gradients_each=_sent_at_a_time(ranks, beside.next, rank.rank),
    )
    found = assign_by_structure(rank.work, rank.work_step, posts, beside)
    return replace(found, microbatch=found.microbatch + (before or 0))


def _name_around(
    chain: Chain, ranks: Sequence[RankRecord]
) -> tuple[dict[int, Assignment], list[Gap]]:
    """Name the passes of unlabelled ranks that hold several stages each; say where none can be."""
    mine = {rank.rank: rank for rank in ranks if rank.rank in chain.ranks}
    if len(mine) < len(chain.ranks) or any(has_labels(rank.trace) for rank in mine.values()):
        return {}, []
    hosts = [
        Host(
            rank=rank,
            work=mine[rank].work,
            step=mine[rank].work_step,
            posts=_posts(mine[rank]),
            sent_at_a_time=_sent_at_a_time(ranks, rank, following),
        )
        for rank, following in zip(chain.ranks, (*chain.ranks[1:], chain.ranks[0]), strict=True)
    ]
    named = name_around(hosts)
    if named is not None or not holds_several(hosts[0]):
        return named or {}, []
    unknown = Gap(
        code=Code.STAGES_UNKNOWN,
        message=f"ranks {show_ranks(chain.ranks)} hold several stages each, "
        "and their passes are in no order that is known: all of a rank count as one stage",
        hint="label passes as torch does, such as record_function('PP:4F0'): stage 4, microbatch 0",
    )
    counted_only = {
        host.rank: count_pieces(host, first=position == 0) for position, host in enumerate(hosts)
    }
    return counted_only, [unknown]


def _posts(rank: RankRecord) -> Posts:
    messages, step = rank.messages, rank.message_step
    if not len(rank.trace.kernels):
        messages, step = order_by_use(messages, step)
    return Posts(messages=messages, step=step, waits_ns=find_waits(rank.trace))


def _sent_at_a_time(ranks: Sequence[RankRecord], source: int | None, destination: int) -> int:
    """Ask the sender, who sends when it has computed; receives may be posted long ahead."""
    sender = next((rank for rank in ranks if rank.rank == source), None)
    return messages_a_pass(sender.messages, sender.work, destination) if sender else 1


# Memory and layers: the line of each rank.


def _draw_pipeline(
    number: int,
    chain: Chain,
    ranks: Sequence[RankRecord],
    assigned: Mapping[int, Assignment],
    offset_ns: Mapping[int, int],
) -> tuple[list[RankTimeline], list[Passes]]:
    """Return the lines of a pipeline's ranks and their passes, on one clock.

    Layers are counted over all stages at once: they are alike on all of them.
    """
    lines: list[RankTimeline] = []
    passes: list[Passes] = []
    seen: list[StagePasses] = []
    numbers: dict[str, int] = {}
    mine = [rank for rank in ranks if rank.rank in chain.ranks]
    meetings = _meet(chain, mine, offset_ns)
    shown = _shown(mine, assigned)
    for rank in mine:
        assignment, data = without_bystanders(rank, assigned[rank.rank], chain.ranks)
        position, offset = chain.ranks.index(rank.rank), offset_ns[rank.rank]
        ran = passes_of(rank, assignment, position, offset)
        stages = tuple(sorted(set(ran.stage.tolist())))
        place = number, position
        line = line_of(
            rank, assignment, data, members=chain.ranks, stages=stages, place=place, offset=offset
        )
        lines.append(replace(line, meetings=meetings.where(meetings.rank == rank.rank)))
        passes.append(ran)
        seen += stage_passes_of(rank, assignment, position, numbers, shown)
    layers = count_layers(seen, tuple(numbers))
    again, divided = recomputed_share(seen, layers), _divide(chain, ranks)
    shares = {one.stage: one.weight_share for one in seen if one.weight_share is not None}
    for row, line in enumerate(lines):
        lines[row] = replace(
            line,
            layers=tuple(layers[stage] for stage in line.stages if stage in layers),
            weight_shares={stage: shares[stage] for stage in line.stages if stage in shares},
            recomputed_share=again,
            parallelism=divided,
        )
    return lines, passes


def _shown(ranks: Sequence[RankRecord], assigned: Mapping[int, Assignment]) -> int | None:
    """Return a batch that all ranks of a labelled stream show: sizes differ, and so do kernels."""
    if any(find_turns(rank.trace) is None or len(np.unique(rank.work_step)) > 1 for rank in ranks):
        return None
    held = [set(assigned[rank.rank].microbatch.tolist()) - {UNKNOWN} for rank in ranks]
    common = sorted(set.intersection(*held)) if held else []
    return common[len(common) // 2] if common else None


def _with_turns(
    line: RankTimeline, ranks: Sequence[RankRecord], before: Mapping[int, int]
) -> RankTimeline:
    """Add the turns of its scheduler to the line of a rank that streams."""
    if line.rank not in before:
        return line
    trace = next(rank.trace for rank in ranks if rank.rank == line.rank)
    turns = find_turns(trace)
    return replace(line, turns=turns and turns.laid(line.clock_offset_ns, before[line.rank]))


def _meet(chain: Chain, ranks: Sequence[RankRecord], offset_ns: Mapping[int, int]) -> Meetings:
    """Match the collectives among ranks of different stages of a pipeline."""
    seen: dict[str, dict[int, Attendance]] = {}
    sizes: dict[str, int] = {}
    for rank in ranks:
        for number, group in enumerate(rank.trace.groups):
            if crosses_stages(group, chain.ranks):
                attendance = attend(rank.trace, number, offset_ns[rank.rank])
                seen.setdefault(group.name, {})[rank.rank] = attendance
                sizes[group.name] = len(group.ranks) or len(chain.ranks)
    return join_meetings([meet(members, sizes[name]) for name, members in seen.items()])


def _divide(chain: Chain, ranks: Sequence[RankRecord]) -> Parallelism:
    """Return how the job of a pipeline is divided, by whose framework; sizes by its messages.

    DeepSpeed names nothing, but nobody else posts the receive of a gradient before it sends the
    output of the forward pass that it has just run, each by itself.
    """
    first = next((rank for rank in ranks if rank.rank in chain.ranks), None)
    if first is None:
        return Parallelism()
    found = divide(first.trace.groups)
    messages = first.messages
    mine = (messages.peer == chain.beside(first.rank).next) & (first.message_step >= 0)
    after_work = np.searchsorted(first.work.issued_ns, messages.issued_ns[mine])
    sends, fused = messages.is_send[mine], messages.fused[mine]
    together = np.diff(after_work) == 0
    backwards = together & ~sends[:-1] & sends[1:] & ~fused[1:]
    forwards = together & sends[:-1] & ~sends[1:] & ~fused[1:]
    if (
        found.framework is None
        and first.rank == chain.ranks[0]
        and backwards.sum() > max(1, int(forwards.sum()))
    ):
        found = replace(found, framework="deepspeed")
    turns = find_turns(first.trace)
    if found.framework is None and turns is not None:
        found = replace(found, framework=turns.engine)
    operators = first.trace.operators
    shapes = operators.shape[(operators.operation == Operation.SEND) & (operators.shape >= 0)]
    return read_shapes(found, Counter(first.trace.names[shape] for shape in shapes.tolist()))
