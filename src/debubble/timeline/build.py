"""`RankTrace`s in → one `Timeline`.

Replicas only meet in collectives: each pipeline has its own messages, steps and clock. So a part
can be built wherever its ranks are, and a run of thousands is a run of many small ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from debubble.errors import Code, Gap, NoPipeline
from debubble.timeline.chain import (
    Chain,
    as_collectives,
    find_chains,
    find_rings,
    join_over_missing,
    name_peers,
    pipeline_groups,
)
from debubble.timeline.clock import align, contradict, find_mixed, shift_transfers
from debubble.timeline.from_table import build_from_table
from debubble.timeline.job import tell_memory
from debubble.timeline.layers import StagePasses, count_layers, recomputed_share
from debubble.timeline.lines import (
    line_of,
    passes_of,
    shift_passes,
    stage_passes_of,
    without_bystanders,
)
from debubble.timeline.loops import Host, count_pieces, holds_several, name_around
from debubble.timeline.model import (
    Passes,
    RankTimeline,
    Timeline,
    join_columns,
)
from debubble.timeline.parallelism import Parallelism, divide, read_shape
from debubble.timeline.passes import (
    Assignment,
    Posts,
    assign_by_labels,
    assign_by_structure,
    has_labels,
    messages_a_pass,
)
from debubble.timeline.rhythm import infer_steps, leading
from debubble.timeline.steps import Prepared, Steps, find_steps, marks_steps, prepare, whole_run
from debubble.timeline.transfers import (
    Posted,
    answers_lag,
    count_cut_off,
    find_shift,
    match_transfers,
)
from debubble.timeline.work import (
    find_waits,
    find_work,
    order_by_use,
)
from debubble.trace.columns import Operation, RankTrace
from debubble.trace.run import Run, show_ranks
from debubble.units import counted


@dataclass(frozen=True, slots=True, kw_only=True)
class NoChain:
    """Ranks that make no pipeline, and what they exchange instead."""

    messages: int
    rings: bool


def build_part(
    named: Sequence[RankTrace], *, marked: bool, may_infer: bool = True
) -> Timeline | NoChain:
    """Turn unlabelled ranks into pipelines of named passes on one clock, if they make any.

    `marked`: some rank of the run, of this part or not, marks steps.
    """
    work = [find_work(trace) for trace in named]
    if rings := find_rings(named, work):
        named = tuple(as_collectives(trace, rings) for trace in named)
        work = [find_work(trace) for trace in named]
    ranks = [
        prepare(trace, computed, find_steps(trace) if marked else whole_run())
        for trace, computed in zip(named, work, strict=True)
    ]
    messages = {rank.rank: leading(rank) for rank in ranks}
    chains = join_over_missing(find_chains(messages), named, messages)
    chains = tuple(chain for chain in chains if len(chain.ranks) > 1)
    if not chains:
        return NoChain(messages=sum(len(rank.messages) for rank in ranks), rings=bool(rings))
    gaps: list[Gap] = []
    inferred = False
    if marked:
        gaps += _beside_marks(ranks, chains)
    elif may_infer:
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
        numbers: dict[str, int] = {}
        stages_seen: list[StagePasses] = []
        mine: list[RankTimeline] = []
        for rank in (one for one in ranks if one.rank in chain.ranks):
            assignment = around.get(rank.rank) or _assign(rank, chain, ranks, before.get(rank.rank))
            assignment, data = without_bystanders(rank, assignment)
            position, offset = chain.ranks.index(rank.rank), clocks.offset_ns[rank.rank]
            passes = passes_of(rank, assignment, position)
            stages = tuple(sorted(set(passes.stage.tolist())))
            parts.append(shift_passes(passes, offset))
            place = number, position
            line = line_of(rank, assignment, data, stages=stages, place=place, offset=offset)
            mine.append(replace(line, members=chain.ranks))
            stages_seen += stage_passes_of(rank, assignment, position, numbers)
        lines += _with_layers(mine, stages_seen, _divided(chain, ranks))
    steps = {step for rank in ranks for step in rank.work_step.tolist() if marked and step >= 0}
    return Timeline(
        ranks=tuple(sorted(lines, key=lambda line: (line.pipeline, line.position))),
        passes=join_columns(parts, by="start_ns"),
        transfers=shift_transfers(transfers, clocks),
        steps=tuple(sorted(steps)),
        clock_uncertainty_ns=clocks.uncertainty_ns,
        gaps=tuple(gaps),
        unmatched=unmatched,
        inferred=inferred,
        mixed=frozenset(number for number, gap in enumerate(found) if gap),
    )


def _divided(chain: Chain, ranks: Sequence[Prepared]) -> Parallelism:
    """Return how the job of a pipeline is divided, and by whose framework.

    DeepSpeed names nothing, but nobody else posts the receive of a gradient before it sends the
    output of the forward pass that it has just run, each by itself.
    """
    first = next((one for one in ranks if one.rank in chain.ranks), None)
    if first is None:
        return Parallelism()
    found = divide(first.trace.groups)
    following = chain.beside(first.rank).next
    messages = first.messages
    mine = (messages.peer == following) & (first.message_step >= 0)
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
    return read_shape(found, _usual_shape(first))


def _usual_shape(one: Prepared) -> str:
    """Return the shape of most of what a rank sends, where shapes were recorded."""
    operators = one.trace.operators
    shapes = operators.shape[(operators.operation == Operation.SEND) & (operators.shape >= 0)]
    return one.trace.names[int(np.bincount(shapes).argmax())] if len(shapes) else ""


def _with_layers(
    lines: Sequence[RankTimeline], seen: Sequence[StagePasses], divided: Parallelism
) -> Iterator[RankTimeline]:
    """Count the layers of a pipeline's stages, which are alike on all of them."""
    layers = count_layers(seen)
    again = recomputed_share(seen)
    for line in lines:
        known = tuple(layers[stage] for stage in line.stages if stage in layers)
        yield replace(line, layers=known, recomputed_share=again, parallelism=divided)


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


def _stages_unknown(chain: Chain) -> Gap:
    return Gap(
        code=Code.STAGES_UNKNOWN,
        message=f"ranks {show_ranks(chain.ranks)} hold several stages each, "
        "and their passes are in no order that is known: all of a rank count as one stage",
        hint="label passes as torch does, such as record_function('PP:4F0'): stage 4, microbatch 0",
    )


def find_parts(named: Sequence[RankTrace]) -> tuple[tuple[int, ...], ...]:
    """Return the captured ranks of each part: who exchanges messages, over missing ranks too."""
    parent: dict[int, int] = {}

    def root(rank: int) -> int:
        parent.setdefault(rank, rank)
        while parent[rank] != rank:
            parent[rank] = parent[parent[rank]]
            rank = parent[rank]
        return rank

    captured = [trace.rank for trace in named if trace.rank is not None]
    for rank, peers in _talks(named):
        for peer in peers:
            parent[root(peer)] = root(rank)
    parts: dict[int, list[int]] = {}
    for rank in sorted(captured):
        parts.setdefault(root(rank), []).append(rank)
    return tuple(tuple(ranks) for ranks in parts.values())


def _talks(named: Sequence[RankTrace]) -> Iterable[tuple[int, Iterable[int]]]:
    for trace in named:
        if trace.rank is None:
            continue
        operators = trace.operators
        posts = np.isin(operators.operation, (Operation.SEND, Operation.RECEIVE))
        yield trace.rank, np.unique(operators.peer[posts & (operators.peer >= 0)]).tolist()
    for members in pipeline_groups(named):
        yield members[0], members[1:]


def all_inferred_alike(parts: Sequence[Timeline | NoChain]) -> bool:
    """Tell whether the rhythm told the steps of all pipelines, or of none."""
    return len({part.inferred for part in parts if isinstance(part, Timeline)}) <= 1


def join_parts(parts: Sequence[Timeline | NoChain], gaps: Sequence[Gap] = ()) -> Timeline:
    """Put the timelines of strangers together, pipelines numbered in the order of their ranks."""
    built = [part for part in parts if isinstance(part, Timeline)]
    if not built:
        raise _no_pipeline([part for part in parts if isinstance(part, NoChain)], gaps)
    numbers = number_pipelines(members for part in built for members in part.members.values())
    built = [renumber(part, numbers) for part in built]
    if len(built) == 1:
        return replace(built[0], gaps=(*gaps, *built[0].gaps))
    return Timeline(
        ranks=tuple(
            sorted(
                (rank for part in built for rank in part.ranks),
                key=lambda rank: (rank.pipeline, rank.position),
            )
        ),
        passes=join_columns([part.passes for part in built], by="start_ns"),
        transfers=join_columns([part.transfers for part in built], by="receive_end_ns"),
        steps=tuple(sorted({step for part in built for step in part.steps})),
        clock_uncertainty_ns=max(part.clock_uncertainty_ns for part in built),
        gaps=(*gaps, *(gap for part in built for gap in part.gaps)),
        unmatched=tuple(one for part in built for one in part.unmatched),
        inferred=any(part.inferred for part in built),
        mixed=frozenset(number for part in built for number in part.mixed),
    )


def number_pipelines(members: Iterable[tuple[int, ...]]) -> dict[tuple[int, ...], int]:
    """Give each pipeline of a whole run its number."""
    return {ranks: number for number, ranks in enumerate(sorted(members))}


def renumber(part: Timeline, numbers: Mapping[tuple[int, ...], int]) -> Timeline:
    """Return a part with its pipelines as the whole run numbers them."""
    own = {number: numbers[members] for number, members in part.members.items()}
    return replace(
        part,
        ranks=tuple(replace(rank, pipeline=own[rank.pipeline]) for rank in part.ranks),
        mixed=frozenset(own[number] for number in part.mixed),
    )


def _no_pipeline(parts: Sequence[NoChain], unknown_groups: Sequence[Gap]) -> NoPipeline:
    posts = sum(part.messages for part in parts)
    if not posts and any(part.rings for part in parts):
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


def build_run(run: Run) -> Timeline:
    """Build the timeline of whatever was read: traces of ranks, or an op table."""
    if run.ranks or not run.tables:
        return tell_memory(build_timeline(run.ranks), run.sidecars)
    return build_from_table(run.tables[0])


def build_timeline(traces: Sequence[RankTrace]) -> Timeline:
    """Turn unlabelled ranks into pipelines of named passes, each on one clock."""
    named, unknown_groups = name_peers(traces)
    by_rank = {trace.rank: trace for trace in named}
    groups = [[by_rank[rank] for rank in ranks] for ranks in find_parts(named)]
    marked = any(marks_steps(trace) for trace in named)
    built = [build_part(part, marked=marked) for part in groups]
    if not all_inferred_alike(built):
        built = [build_part(part, marked=False, may_infer=False) for part in groups]
    return join_parts(built, unknown_groups)
