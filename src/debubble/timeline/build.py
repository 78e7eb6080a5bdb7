"""A run, read, in → its `Timeline`: ranks in parts that exchange messages, each built by itself.

Replicas only meet in collectives: each pipeline has its own messages, steps and clock. So a part
can be built wherever its ranks are, and a run of thousands is a run of many small ones. Two ranks
and thousands go one way:

    ranks ─ order_parts ─► parts ─ build_alike(load_part, here or in workers) ─► join_parts
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from debubble.errors import Code, Gap, NoPipeline
from debubble.timeline.chain import choose_groups, pipeline_groups, rank_of, translate_peers
from debubble.timeline.figures import PipelineFigures
from debubble.timeline.from_table import build_from_table
from debubble.timeline.infer import NoPipelineHere, build_part
from debubble.timeline.job import tell_memory
from debubble.timeline.meetings import meet_in_stages
from debubble.timeline.model import Timeline, join_columns
from debubble.timeline.steps import marks_steps
from debubble.trace.columns import KernelKind, Operation, RankTrace
from debubble.trace.format import TraceFile
from debubble.trace.run import Run
from debubble.trace.sidecar import Sidecar
from debubble.trace.source import DEFAULT_LIMITS, Limits
from debubble.units import counted, show_ranks


class RankSource(Protocol):
    """Where a rank lies between being read and being built."""

    @property
    def rank(self) -> int:
        """Which it is, as the run has settled it."""
        ...

    def load(self, limits: Limits) -> RankTrace:
        """Return all of it."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldRank:
    """A rank that is held in memory."""

    trace: RankTrace

    @property
    def rank(self) -> int:
        """Which it is."""
        return rank_of(self.trace)

    def load(self, limits: Limits) -> RankTrace:  # noqa: ARG002 (it was read within them)
        """Return it."""
        return self.trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Part(TraceFile):
    """Ranks that exchange messages, as whoever builds them is handed them."""

    sources: tuple[RankSource, ...]
    members: Mapping[int, tuple[int, ...]]
    """Of ranks whose peers are counted inside a group: who is in it."""
    sidecars: tuple[Sidecar, ...] = ()
    in_flight: int | None = None
    """Of a stream: how many batches are said to be in flight."""
    marked: bool = True
    """Some rank of the run, of this part or not, marks steps."""
    may_infer: bool = True

    @property
    def ranks(self) -> frozenset[int]:
        """Which they are."""
        return frozenset(source.rank for source in self.sources)


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltPart:
    """What came of a part."""

    timeline: Timeline | NoPipelineHere
    traces: tuple[RankTrace, ...] = ()
    figures: tuple[PipelineFigures, ...] = ()
    """Of its pipelines, where they were measured."""


Build = Callable[[Sequence[Part]], list[tuple[Part, BuiltPart]]]
"""Builds parts, somewhere; those that could not be built are left out."""


def build_run(run: Run, in_flight: int | None = None) -> Timeline:
    """Build the timeline of whatever was read: traces of ranks, or an op table.

    `in_flight`: how many batches of a stream are said to be, where messages leave that open.
    """
    if run.tables and not run.ranks:
        return build_from_table(run.tables[0])
    refuse_unread_devices(run.ranks)
    return build_timeline(run.ranks, in_flight, run.sidecars)


def build_timeline(
    traces: Sequence[RankTrace], in_flight: int | None = None, sidecars: Sequence[Sidecar] = ()
) -> Timeline:
    """Turn unlabelled ranks into pipelines of named passes, each on one clock."""
    sources = {rank_of(trace): HeldRank(trace=trace) for trace in traces}
    marked = any(marks_steps(trace) for trace in traces)
    parts, gaps = order_parts(traces, sources, sidecars, marked=marked, in_flight=in_flight)
    built = build_alike(
        parts, lambda every: [(part, load_part(part, DEFAULT_LIMITS)) for part in every]
    )
    whole = join_parts([part.timeline for _, part in built], gaps)
    return meet_in_stages(whole, [trace for _, part in built for trace in part.traces])


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


def order_parts(
    traces: Sequence[RankTrace],
    sources: Mapping[int, RankSource],
    sidecars: Sequence[Sidecar],
    *,
    marked: bool,
    in_flight: int | None,
) -> tuple[list[Part], tuple[Gap, ...]]:
    """Tell which ranks exchange messages, of whole traces or of a row a peer."""
    members, gaps = choose_groups(traces)
    named = [translate_peers(trace, members.get(rank_of(trace))) for trace in traces]
    said = {sidecar.rank: sidecar for sidecar in sidecars}
    parts = [
        Part(
            file=f"ranks {show_ranks(ranks)}",
            format="part",
            sources=tuple(sources[rank] for rank in ranks),
            members={rank: members[rank] for rank in ranks if rank in members},
            sidecars=tuple(said[rank] for rank in ranks if rank in said),
            in_flight=in_flight,
            marked=marked,
        )
        for ranks in find_parts(named)
    ]
    return parts, gaps


def load_part(part: Part, limits: Limits) -> BuiltPart:
    """Build a part from its ranks."""
    traces = tuple(
        translate_peers(source.load(limits), part.members.get(source.rank))
        for source in part.sources
    )
    built = build_part(
        traces, marked=part.marked, may_infer=part.may_infer, in_flight=part.in_flight
    )
    if isinstance(built, Timeline):
        built = tell_memory(built, part.sidecars)
    return BuiltPart(timeline=built, traces=traces)


def build_alike(parts: Sequence[Part], build: Build) -> list[tuple[Part, BuiltPart]]:
    """Build all parts; once more without steps, where the rhythm told those of some parts alone."""
    built = build(parts)
    timelines = [part.timeline for _, part in built if isinstance(part.timeline, Timeline)]
    if len({timeline.inferred for timeline in timelines}) <= 1:
        return built
    return build([replace(part, marked=False, may_infer=False) for part, _ in built])


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


def join_parts(parts: Sequence[Timeline | NoPipelineHere], gaps: Sequence[Gap] = ()) -> Timeline:
    """Put the timelines of strangers together, pipelines numbered in the order of their ranks."""
    built = [part for part in parts if isinstance(part, Timeline)]
    if not built:
        raise _no_pipeline([part for part in parts if isinstance(part, NoPipelineHere)], gaps)
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


def _no_pipeline(parts: Sequence[NoPipelineHere], unknown_groups: Sequence[Gap]) -> NoPipeline:
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
        f"no pipeline: the peers of all {counted(posts, 'message')} are unknown",
        hint=unknown_groups[0].hint if unknown_groups else "record with record_shapes=True",
    )
