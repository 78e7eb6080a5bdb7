"""A run, read, in → its `Timeline`: ranks in parts that exchange messages, each built by itself.

Replicas only meet in collectives: each pipeline has its own messages, steps and clock. So a part
can be built wherever its ranks are, and a run of thousands is a run of many small ones. Two ranks
and thousands go one way:

    ranks ─ find_parts ─► parts ─ load_part, here or in workers ─► join_parts

Ranks that exchange messages become one `Timeline` by `build_part`, which is the table of contents:
who, steps, transfers and clock, passes, memory and layers. `line_of` gathers all that is known of
one rank; `replicas/` joins those of all. What runs beside a pass is taken out of it first: a gather
of parameters or a batch's copy is launched in its midst.

docs/explanation/how-the-timeline-is-built.md tells why.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np

from debubble.errors import Code, Gap, NoPipeline
from debubble.timeline.clock import (
    align,
    contradict,
    find_mixed,
    name_wrong,
    shift_transfers,
)
from debubble.timeline.figures import PipelineFigures, find_outside
from debubble.timeline.from_table import build_from_table
from debubble.timeline.job import tell_memory
from debubble.timeline.layers import (
    PassKernels,
    StagePasses,
    count_layers,
    recomputed_share,
    weight_share,
)
from debubble.timeline.meetings import (
    Attendance,
    attend,
    crosses_stages,
    crossing_work,
    join_meetings,
    meet,
    meet_in_stages,
)
from debubble.timeline.memory import measure_memory
from debubble.timeline.model import (
    I64,
    UNKNOWN,
    CollectiveKind,
    Flags,
    Intervals,
    Meetings,
    Parallelism,
    Passes,
    PassKind,
    RankCollectives,
    RankTimeline,
    Role,
    Timeline,
    Transfers,
    divide,
    join_columns,
    read_shapes,
    role_of,
    without,
)
from debubble.timeline.passes import (
    Host,
    assign_by_labels,
    assign_by_structure,
    count_pieces,
    has_labels,
    holds_several,
    messages_a_pass,
    name_around,
)
from debubble.timeline.steps import (
    RankRecord,
    Steps,
    find_set_up,
    find_steps,
    find_unfinished,
    infer_steps,
    leading,
    marks_steps,
    record_rank,
    whole_run,
)
from debubble.timeline.transfers import (
    Chain,
    Shifts,
    answers_lag,
    as_collectives,
    choose_groups,
    count_cut_off,
    find_chains,
    find_rings,
    find_shifts,
    join_over_missing,
    match_transfers,
    pipeline_groups,
    rank_of,
    translate_peers,
)
from debubble.timeline.turns import Turns, assign_by_turns, find_turns
from debubble.timeline.work import (
    BEFORE_CAPTURE,
    Messages,
    Work,
    apparent_of,
    find_carried_out,
    find_messages,
    find_side_work,
    find_synchronisations,
    find_waits,
    find_work,
    held_up_of,
    host_ranges,
    names_like,
    number_passes,
    order_by_use,
    spans_of,
    synchronised_of,
    unissued_of,
)
from debubble.trace.columns import KernelKind, Operation, RankTrace, merge
from debubble.trace.format import TraceFile
from debubble.trace.run import Run
from debubble.trace.sidecar import Sidecar
from debubble.trace.source import DEFAULT_LIMITS, Limits
from debubble.units import counted, show_ranks

Loader = Callable[[Limits], RankTrace]
"""Returns a rank, wherever it lies between being read and being built."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part(TraceFile):
    """Ranks that exchange messages, as whoever builds them is handed them."""

    loaders: Mapping[int, Loader]
    """By rank, as the run has settled which it is."""
    members: Mapping[int, tuple[int, ...]]
    """Of ranks whose peers are counted inside a group: who is in it."""
    sidecars: tuple[Sidecar, ...] = ()
    marked: bool = True
    """Some rank of the run, of this part or not, marks steps."""
    may_infer: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltPart:
    """What came of a part."""

    timeline: Timeline | None
    """None where its ranks make no pipeline."""
    peers: Counter[bool] = field(default_factory=Counter)
    """Of ranks that make none: how many messages have a known peer, and how many have none."""
    traces: tuple[RankTrace, ...] = ()
    figures: tuple[PipelineFigures, ...] = ()
    """Of its pipelines, where they were measured."""


Build = Callable[[Sequence[Part]], list[tuple[Part, BuiltPart]]]
"""Builds parts, somewhere; those that could not be built are left out."""


def build_run(run: Run) -> Timeline:
    """Build the timeline of whatever was read: traces of ranks, or an op table."""
    if run.tables and not run.ranks:
        return build_from_table(run.tables[0])
    return build_timeline(run.ranks, run.sidecars)


def build_timeline(traces: Sequence[RankTrace], sidecars: Sequence[Sidecar] = ()) -> Timeline:
    """Turn unlabelled ranks into pipelines of named passes, each on one clock."""
    built, whole = build_parts(
        traces,
        held(traces),
        sidecars,
        marked=any(marks_steps(trace) for trace in traces),
        build=lambda parts: [(part, load_part(part, DEFAULT_LIMITS)) for part in parts],
    )
    return meet_in_stages(whole, [trace for _, part in built for trace in part.traces])


def held(traces: Iterable[RankTrace]) -> dict[int, Loader]:
    """Return what loads ranks that are held in memory."""

    def loader(trace: RankTrace) -> Loader:
        return lambda _: trace

    return {rank_of(trace): loader(trace) for trace in traces}


def build_parts(
    traces: Sequence[RankTrace],
    loaders: Mapping[int, Loader],
    sidecars: Sequence[Sidecar],
    *,
    marked: bool,
    build: Build,
) -> tuple[list[tuple[Part, BuiltPart]], Timeline]:
    """Tell which ranks exchange messages, have each part of them built, and join what came of it.

    `traces` may hold no more than a row a peer. Where the rhythm tells the steps of some parts
    alone, all are built once more without.
    """
    refuse_unread_devices(traces)
    members, gaps = choose_groups(traces)
    named = [translate_peers(trace, members.get(rank_of(trace))) for trace in traces]
    said = {sidecar.rank: sidecar for sidecar in sidecars}
    built = build(
        [
            Part(
                file=f"ranks {show_ranks(ranks)}",
                format="part",
                loaders={rank: loaders[rank] for rank in ranks},
                members={rank: members[rank] for rank in ranks if rank in members},
                sidecars=tuple(said[rank] for rank in ranks if rank in said),
                marked=marked,
            )
            for ranks in find_parts(named)
        ]
    )
    if len({part.timeline.inferred for _, part in built if part.timeline is not None}) > 1:
        built = build([replace(part, marked=False, may_infer=False) for part, _ in built])
    return built, join_parts([part for _, part in built], gaps)


def refuse_unread_devices(traces: Iterable[RankTrace]) -> None:
    """Refuse a run of devices whose kernels, or whose messages, nobody here can read."""
    unread = {Code.FOREIGN_DEVICE, Code.NOT_UNDERSTOOD}
    told = sends_unknown = False
    for trace in traces:
        # CPU operators are not what such a device was busy with.
        if not len(trace.kernels) and any(gap.code in unread for gap in trace.gaps):
            raise NoPipeline(
                "no pipeline: events of these devices are not read",
                hint="CUDA, ROCm, XPU and Ascend are read; of any device, a table of passes is",
                file=trace.file,
            )
        told |= len(trace.operators) > 0
        sends_unknown |= bool((trace.kernels.kind == KernelKind.PEER).any())
    if sends_unknown and not told:
        raise NoPipeline(
            "no pipeline: messages of these devices have no peers",
            hint="give a table of passes, or spans of passes",
        )


def load_part(part: Part, limits: Limits) -> BuiltPart:
    """Build a part from its ranks."""
    traces = tuple(
        translate_peers(load(limits), part.members.get(rank)) for rank, load in part.loaders.items()
    )
    timeline = build_part(traces, marked=part.marked, may_infer=part.may_infer)
    if timeline is None:
        peers = np.concatenate([find_messages(trace).peer for trace in traces])
        return BuiltPart(timeline=None, peers=Counter((peers >= 0).tolist()), traces=traces)
    return BuiltPart(timeline=tell_memory(timeline, part.sidecars), traces=traces)


def find_parts(named: Sequence[RankTrace]) -> tuple[tuple[int, ...], ...]:
    """Return the captured ranks of each part: who exchanges messages, over missing ranks too."""
    parent: dict[int, int] = {}

    def root(rank: int) -> int:
        parent.setdefault(rank, rank)
        while parent[rank] != rank:
            parent[rank] = parent[parent[rank]]
            rank = parent[rank]
        return rank

    def unite(rank: int, others: Collection[int]) -> None:
        for other in others:
            parent[root(other)] = root(rank)

    captured = {trace.rank: trace.operators for trace in named if trace.rank is not None}
    for rank, operators in captured.items():
        posts = np.isin(operators.operation, (Operation.SEND, Operation.RECEIVE))
        unite(rank, np.unique(operators.peer[posts & (operators.peer >= 0)]).tolist())
    for members in pipeline_groups(named):
        unite(members[0], members[1:])
    parts: dict[int, list[int]] = {}
    for rank in sorted(captured):
        parts.setdefault(root(rank), []).append(rank)
    return tuple(tuple(ranks) for ranks in parts.values())


def join_parts(parts: Sequence[BuiltPart], gaps: Sequence[Gap] = ()) -> Timeline:
    """Put the timelines of strangers together, pipelines numbered in the order of their ranks."""
    built = [part.timeline for part in parts if part.timeline is not None]
    if not built:
        raise _no_pipeline(sum((part.peers for part in parts), Counter()), gaps)
    members = sorted(members for part in built for members in part.members.values())
    numbers = {ranks: number for number, ranks in enumerate(members)}
    built = [renumber(part, numbers) for part in built]
    if len(built) == 1:
        return replace(built[0], gaps=(*gaps, *built[0].gaps))
    ranks = [rank for part in built for rank in part.ranks]
    return Timeline(
        ranks=tuple(sorted(ranks, key=lambda rank: (rank.pipeline, rank.position))),
        passes=join_columns([part.passes for part in built], by="start_ns"),
        transfers=join_columns([part.transfers for part in built], by="receive_end_ns"),
        steps=tuple(sorted({step for part in built for step in part.steps})),
        clock_uncertainty_ns=max(part.clock_uncertainty_ns for part in built),
        gaps=(*gaps, *(gap for part in built for gap in part.gaps)),
        unmatched=tuple(left_over for part in built for left_over in part.unmatched),
        inferred=any(part.inferred for part in built),
        mixed=frozenset(number for part in built for number in part.mixed),
        unsure={number: off for part in built for number, off in part.unsure.items()},
    )


def renumber(part: Timeline, numbers: Mapping[tuple[int, ...], int]) -> Timeline:
    """Return a part with its pipelines as the whole run numbers them."""
    own = {number: numbers[members] for number, members in part.members.items()}
    return replace(
        part,
        ranks=tuple(replace(rank, pipeline=own[rank.pipeline]) for rank in part.ranks),
        mixed=frozenset(own[number] for number in part.mixed),
        unsure={own[number]: off for number, off in part.unsure.items()},
    )


def _no_pipeline(peers: Counter[bool], unknown_groups: Sequence[Gap]) -> NoPipeline:
    if peers[False]:
        return NoPipeline(
            f"no pipeline: the peers of all {counted(peers[False], 'message')} are unknown",
            hint=unknown_groups[0].hint if unknown_groups else "record with record_shapes=True",
        )
    if peers[True]:
        return NoPipeline(
            "no pipeline in these traces: ranks only pass blocks around a ring",
            hint="context parallelism looks so; it makes no pipeline, nor do collectives",
        )
    return NoPipeline(
        "no pipeline in these traces: no rank sends or receives point to point",
        hint="`debubble inspect` says what they hold; collectives alone make no pipeline",
    )


def build_part(
    named: Sequence[RankTrace],
    *,
    marked: bool,
    may_infer: bool = True,
) -> Timeline | None:
    """Turn unlabelled ranks into pipelines of named passes on one clock, if they make any.

    `marked`: some rank of the run, of this part or not, marks steps.
    """
    # Who. Traces → what each rank computed and exchanged → the order of ranks in each pipeline.
    ranks = _record_ranks(named, marked=marked)
    pieces = find_chains({rank.rank: leading(rank) for rank in ranks})
    whole = join_over_missing(pieces, [rank.trace for rank in ranks])
    chains = [chain for chain in whole if len(chain.ranks) > 1]
    if not chains:
        return None

    # Steps. The profiler's marks, else the pipelines' own rhythm → the step of work and messages.
    gaps: list[Gap] = []
    inferred = _in_inferred_steps(ranks, chains) if may_infer and not marked else None
    in_steps = marked or inferred is not None
    ranks = inferred or ranks

    # Transfers and clock. Sends and receives → pairs → are they of one run → one clock for all.
    posted = {rank.rank: rank.messages for rank in ranks}
    across = _pairs_across_steps(posted, chains, in_steps=in_steps)
    shifts = {} if in_steps else find_shifts(posted, [chain.ranks for chain in chains])
    transfers, unmatched = match_transfers(posted, across, shifts)
    mixed = [find_mixed(ranks, chain, transfers, across) for chain in chains]
    gaps += [gap for gap in mixed if gap]
    clocks = align(_telling_clocks(transfers, shifts), posted)
    gaps += [] if any(mixed) else name_wrong(clocks)

    # Passes. Labels, else what the host launched between messages → the pass of all work.
    # Memory and layers. Work with its pass → the line of each rank, what its stages are made of.
    lines: list[RankTimeline] = []
    passes: list[Passes] = []
    unsure: dict[int, tuple[int, int | None]] = {}
    for number, chain in enumerate(chains):
        before, off = ({}, (0, 0)) if in_steps else _batches_before(ranks, chain, shifts, transfers)
        unsure |= {number: off} if off != (0, 0) else {}
        told, unknown = _assign_passes(chain, ranks, before, in_steps=in_steps)
        gaps += unknown
        drawn, ran = _draw_pipeline(number, chain, told, clocks.offset_ns)
        lines += [_with_turns(line, told, before) for line in drawn]
        passes += ran

    # Figures are made of this by `figures.measure_pipeline`, for each pipeline.
    steps = {step for rank in ranks for step in rank.work.step.tolist() if in_steps and step >= 0}
    return Timeline(
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


# Who: what each rank did, and the order of ranks in their pipelines.


def _record_ranks(named: Sequence[RankTrace], *, marked: bool) -> list[RankRecord]:
    """List what each rank computed and exchanged; what goes around rings as collectives."""
    work = [find_work(trace) for trace in named]
    rings = find_rings(named, work)
    if rings:
        named = [as_collectives(trace, rings) for trace in named]
        work = [find_work(trace) for trace in named]
    return [
        record_rank(trace, computed, find_steps(trace) if marked else whole_run())
        for trace, computed in zip(named, work, strict=True)
    ]


# Steps: where no mark tells them, the rhythm does, unless messages contradict it.


def _in_inferred_steps(
    ranks: Sequence[RankRecord], chains: Sequence[Chain]
) -> list[RankRecord] | None:
    """Part a run that marks no steps by its own rhythm; None where a pipeline shows none.

    Nor where messages then arrive before they are sent, and in their mere order do not.
    """
    found: dict[int, Steps] = {}
    for chain in chains:
        members = [rank for rank in ranks if rank.rank in chain.ranks]
        steps = infer_steps(
            [replace(rank, work=_assign(rank, chain, ranks, 0)) for rank in members], chain
        )
        if steps is None:
            return None
        found |= steps
    parted = [rank.in_steps(found[rank.rank]) if rank.rank in found else rank for rank in ranks]

    def contradicted(records: Sequence[RankRecord], *, in_steps: bool) -> bool:
        posted = {rank.rank: rank.messages for rank in records}
        across = _pairs_across_steps(posted, chains, in_steps=in_steps)
        transfers, _ = match_transfers(posted, across)
        return any(contradict(transfers, chain.ranks) for chain in chains)

    if contradicted(parted, in_steps=True) and not contradicted(ranks, in_steps=False):
        return None
    return parted


# Transfers: between which ranks steps tell what belongs together.


def _pairs_across_steps(
    posted: Mapping[int, Messages], chains: Sequence[Chain], *, in_steps: bool
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
) -> tuple[list[RankRecord], list[Gap]]:
    """Name the passes of each rank of a pipeline; say where stages cannot be told apart."""
    around, gaps = _name_around(chain, ranks) if in_steps else ({}, [])
    works = {
        rank.rank: around.get(rank.rank) or _assign(rank, chain, ranks, before.get(rank.rank))
        for rank in ranks
        if rank.rank in chain.ranks
    }
    return [replace(r, work=works[r.rank]) for r in ranks if r.rank in works], gaps


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
    records = {rank.rank: rank for rank in ranks}
    turns = {rank.rank: turns for rank in ranks if (turns := find_turns(rank.trace)) is not None}
    first, fewer = [0], 0
    more: int | None = 0
    for left, right in pairwise(chain.ranks):
        shift = 0
        if left in records and right in records:
            found = shifts[left, right]
            each = messages_a_pass(records[left].messages, records[left].work, right)
            if found is not None:
                shift, fewer = found.first // each, fewer + (found.most - found.first) // each
                if more is not None:
                    least = found.least
                    more = None if least is None else more + (found.first - least) // each
            if left in turns and right in turns:
                shift = _batches_apart(transfers, (left, right), turns[left], turns[right])
            else:
                shift -= count_cut_off(records[left].messages, chain.beside(left))
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
) -> Work:
    """Name the passes of a rank. Without steps labels repeat from batch to batch, so count on."""
    labelled = assign_by_labels(rank.trace, rank.work) if before is None else None
    if labelled is not None:
        return labelled
    turns = None if before is None else find_turns(rank.trace)
    if turns is not None:
        return assign_by_turns(rank, turns, chain, before or 0)
    work = assign_by_structure(_host_of(rank, chain, ranks), chain.beside(rank.rank))
    return replace(work, microbatch=work.microbatch + (before or 0))


def _name_around(chain: Chain, ranks: Sequence[RankRecord]) -> tuple[dict[int, Work], list[Gap]]:
    """Name the passes of unlabelled ranks that hold several stages each; say where none can be."""
    members = {rank.rank: rank for rank in ranks if rank.rank in chain.ranks}
    if len(members) < len(chain.ranks) or any(has_labels(r.trace) for r in members.values()):
        return {}, []
    hosts = [_host_of(members[rank], chain, ranks) for rank in chain.ranks]
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


def _host_of(rank: RankRecord, chain: Chain, ranks: Sequence[RankRecord]) -> Host:
    """Return what a rank's host issued, and how many messages its neighbours and it send at a time.

    The sender is asked, who sends when it has computed; receives may be posted long ahead.
    """
    records = {record.rank: record for record in ranks}

    def sent_at_a_time(source: int | None, destination: int) -> int:
        sender = None if source is None else records.get(source)
        return messages_a_pass(sender.messages, sender.work, destination) if sender else 1

    beside, position = chain.beside(rank.rank), chain.ranks.index(rank.rank)
    following = chain.ranks[(position + 1) % len(chain.ranks)]
    on_device = len(rank.trace.kernels) > 0
    return Host(
        rank=rank.rank,
        work=rank.work,
        messages=rank.messages if on_device else order_by_use(rank.messages),
        waits_ns=find_waits(rank.trace),
        inputs_each=sent_at_a_time(beside.previous, rank.rank),
        gradients_each=sent_at_a_time(beside.next, rank.rank),
        outputs_each=sent_at_a_time(rank.rank, following),
    )


# Memory and layers: the line of each rank.


def _draw_pipeline(
    number: int,
    chain: Chain,
    ranks: Sequence[RankRecord],
    offset_ns: Mapping[int, int],
) -> tuple[list[RankTimeline], list[Passes]]:
    """Return the lines of a pipeline's ranks and their passes, on one clock.

    Layers are counted over all stages at once: they are alike on all of them.
    """
    lines: list[RankTimeline] = []
    passes: list[Passes] = []
    seen: list[StagePasses] = []
    numbers: dict[str, int] = {}
    meetings = _meet(chain, ranks, offset_ns)
    shown = _shown(ranks)
    for record in ranks:
        rank, data = without_bystanders(record, chain.ranks)
        position, offset = chain.ranks.index(rank.rank), offset_ns[rank.rank]
        ran = passes_of(rank, position, offset)
        stages = tuple(sorted(set(ran.stage.tolist())))
        place = number, position
        line = line_of(rank, data, members=chain.ranks, stages=stages, place=place, offset=offset)
        lines.append(replace(line, meetings=meetings.where(meetings.rank == rank.rank)))
        passes.append(ran)
        seen += stage_passes_of(rank, position, numbers, shown)
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


def _shown(ranks: Sequence[RankRecord]) -> int | None:
    """Return a batch that all ranks of a labelled stream show: sizes differ, and so do kernels."""
    if any(find_turns(rank.trace) is None or len(np.unique(rank.work.step)) > 1 for rank in ranks):
        return None
    held = [set(rank.work.microbatch.tolist()) - {UNKNOWN} for rank in ranks]
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
    for rank in ranks:
        for number, group in enumerate(rank.trace.groups):
            if crosses_stages(group, chain.ranks):
                attendance = attend(rank.trace, number, offset_ns[rank.rank])
                seen.setdefault(group.name, {})[rank.rank] = attendance
    return join_meetings([meet(members) for members in seen.values()])


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
    mine = (messages.peer == chain.beside(first.rank).next) & (messages.step >= 0)
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


def without_bystanders(rank: RankRecord, members: tuple[int, ...]) -> tuple[RankRecord, Flags]:
    """Take out of the passes what is launched in their midst and is no work of theirs.

    Gathers of sharded parameters and reductions of gradients run beside passes; copies of a batch
    to the device come before forward passes, whenever the host has them ready. Return also which
    work is such a gather or reduction: a collective of a data-parallel or sharded group. A group
    that nothing names is one if its collectives are in few of the passes: those that share a stage
    run in every one. A collective among ranks of different stages, `members`, is a message.
    """
    work, group = rank.work, rank.work.group
    roles = [role_of(named) for named in rank.trace.groups]
    in_pass = work.in_pass
    microbatches = len(np.unique(work.microbatch[in_pass]))
    data = np.array([role is Role.DATA for role in roles] + [False])[group] & (group >= 0)
    for number in np.unique(group[group >= 0]).tolist():
        if roles[number] is Role.UNKNOWN and microbatches >= _ENOUGH:
            mine = group == number
            among = len(np.unique(work.microbatch[in_pass & mine]))
            if 0 < among <= _FEW * microbatches:
                data |= mine
    data &= work.collective
    beside = data | ((work.kind == PassKind.F) & work.upload)
    beside |= crossing_work(rank.trace, work, members)
    columns = {name: getattr(work, name) for name in ("kind", "stage", "microbatch")}
    taken_out = {name: np.where(beside, UNKNOWN, column) for name, column in columns.items()}
    return replace(rank, work=replace(work, **taken_out)), data


def passes_of(rank: RankRecord, position: int, offset_ns: int) -> Passes:
    """Gather the work of each pass, from its first start to its last end, on the common clock."""
    work = rank.work.where(rank.work.in_pass & (rank.work.step >= 0))
    work = replace(work, stage=np.where(work.stage >= 0, work.stage, np.int32(position)))
    (step, stage, kind, microbatch), group = number_passes(work)
    start, end = work.start_ns, work.end_ns
    starts = np.full(len(step), np.iinfo(np.int64).max, dtype=np.int64)
    ends = np.full(len(step), np.iinfo(np.int64).min, dtype=np.int64)
    issued = starts.copy()
    np.minimum.at(starts, group, start)
    np.maximum.at(ends, group, end)
    np.minimum.at(issued, group, work.issued_ns)
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
    trace, work = rank.trace, rank.work
    busy = work.union(~work.collective)
    outside, named = find_outside(trace, work)
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
        data_parallel=_exposed(work, data, busy),
        synchronisations=calls,
        held_up=held_up_of(trace),
        synchronised=synchronised_of(issued, calls),
        set_up=find_set_up(rank),
        unfinished=find_unfinished(rank),
        memory=measure_memory(trace, work),
        outside=named,
        side_work=_side_work(trace, work, data),
        handing_over=_handing_over(trace),
        collectives=_collectives_of(rank, busy),
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


def _exposed(work: Work, data: Flags, busy: Intervals) -> Intervals:
    """Return when gathers and reductions ran that no compute covered, until a step's last pass.

    What follows the last pass of a rank holds up none.
    """
    until, rows = np.zeros(len(work), dtype=bool), np.arange(len(work))
    for number in np.unique(work.step[work.in_pass & (work.step >= 0)]).tolist():
        here = work.step == number
        until |= here & (rows <= np.flatnonzero(work.in_pass & here)[-1])
    return without(work.union(data & until), busy)


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
    position: int,
    numbers: dict[str, int],
    shown: int | None = None,
) -> list[StagePasses]:
    """Return one forward and one backward pass of each stage of a rank, for its layers to be told.

    The second of the last step: the first may still warm something up, and adds to no gradients;
    all others launch the same kernels. `numbers` gives names their numbers on all ranks; `shown` is
    the microbatch to take, where they differ.
    """
    work = rank.work

    def launched(kind: PassKind, stage: int) -> tuple[PassKernels, float | None] | None:
        mine = (work.kind == kind) & (work.stage == stage) & (work.step >= 0) & ~work.collective
        if not mine.any():
            return None
        number = min(1, int(work.microbatch[mine].max())) if shown is None else shown
        mine &= work.microbatch == number
        rows = np.flatnonzero(mine & (work.step == work.step[mine].max(initial=-1)))
        names = [rank.trace.names[name] for name in work.name[rows].tolist()]
        start, end = work.start_ns[rows], work.end_ns[rows]
        share = weight_share(names, end - start) if kind == PassKind.B else None
        kernels = PassKernels(
            name=np.array([numbers.setdefault(n, len(numbers)) for n in names], dtype=np.int32),
            start_ns=start,
            end_ns=end,
        )
        return kernels, share

    found = []
    for stage in np.unique(work.stage[work.kind == PassKind.F]).tolist():
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


def _collectives_of(rank: RankRecord, busy: Intervals) -> RankCollectives | None:
    """List a rank's reductions and gathers; None where there are none."""
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
        in_forward=_in_forward(work, issued),
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


def _in_forward(work: Work, issued: I64) -> Flags:
    """Tell which collectives are work of a forward pass."""
    rows = np.flatnonzero(work.collective)
    if not len(rows):
        return np.zeros(len(issued), dtype=bool)
    row = rows[np.minimum(np.searchsorted(work.issued_ns[rows], issued), len(rows) - 1)]
    same: Flags = (work.issued_ns[row] == issued) & (work.kind[row] == PassKind.F)
    return same
