"""The files of a run of many ranks in → every part of it measured, with no two parts held at once.

    file ─ scout_file ─┬─► a few rows a rank: who talks to whom ─ order_parts ─► parts
                       └─► its digest, in one temporary file ──── measure_part ─► their figures

Who talks to whom, which groups there are, whether steps are marked: that is all the whole run must
know. So a thousand ranks are told apart on a machine that could not hold ten of them; the ranks
themselves go into digests, and each part (ranks that talk to each other) is built from those by a
worker of this machine. Imported only for runs that are not held whole.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import IO, TypeVar

import numpy as np

from debubble.errors import EngineError, Gap, TraceError
from debubble.fleet.survey import Question, measure_asked
from debubble.timeline.build import NoPipelineHere, build_part, find_parts
from debubble.timeline.chain import choose_groups, rank_of, translate_peers
from debubble.timeline.figures import PipelineFigures
from debubble.timeline.job import tell_memory
from debubble.timeline.model import RankTimeline, Timeline, no_intervals
from debubble.timeline.steps import marks_steps
from debubble.trace.columns import (
    UNKNOWN,
    Group,
    Operation,
    Operators,
    RankSummary,
    RankTrace,
    Table,
    summarise,
)
from debubble.trace.digest import pack_digest, read_digest, unpack_digest
from debubble.trace.digest.archive import NAME as DIGEST
from debubble.trace.digest.content import DigestPlace
from debubble.trace.engine import Engine, LocalEngine, Progress, map_files
from debubble.trace.format import Reading, Sidecar, TraceFile
from debubble.trace.run import Run, RunFiles, read_file, settle_run, unreadable
from debubble.trace.source import Limits
from debubble.units import show_ranks

# Digests lie on this machine, so parts are built on it, whoever read the ranks.
_HERE = LocalEngine(worth_bytes=0)

_NO_ROWS = np.zeros(0, dtype=np.intp)
_TableType = TypeVar("_TableType", bound=Table)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRank:
    """Where the digest of a rank lies."""

    file: str
    rank: int
    """As the run has settled it, whatever the digest says."""
    offset: int = 0
    size: int | None = None
    """None: the file is that digest and nothing else."""

    def read(self, limits: Limits) -> RankTrace:
        """Read the rank again."""
        if self.size is None:
            trace, _ = read_digest(self.file, limits)
        else:
            with Path(self.file).open("rb") as spool:
                spool.seek(self.offset)
                trace, _ = unpack_digest(spool.read(self.size), self.file, limits)
        return replace(trace, rank=self.rank)


class Spool:
    """A file of digests, one behind the other."""

    def __init__(self, file: IO[bytes], name: str) -> None:
        self._file = file
        self._name = name
        self._end = 0

    def put(self, digest: bytes, rank: int) -> StoredRank:
        """Add one, at once there for others to read."""
        left = memoryview(digest)
        try:
            while left:
                left = left[self._file.write(left) :]
        except OSError as error:
            raise _no_space(error) from error
        stored = StoredRank(file=self._name, rank=rank, offset=self._end, size=len(digest))
        self._end += len(digest)
        return stored


@contextmanager
def spooling() -> Iterator[Spool]:
    """Lend a spool that workers of this machine can read; it is gone afterwards."""
    try:
        file = tempfile.NamedTemporaryFile(prefix="debubble-ranks-", buffering=0)  # noqa: SIM115
    except OSError as error:
        raise _no_space(error) from error
    with file:
        yield Spool(file, file.name)


def _no_space(error: OSError) -> EngineError:
    return EngineError(
        f"the ranks cannot be kept in {tempfile.gettempdir()} meanwhile: {error.strerror}",
        hint="make room there, or set TMPDIR to another folder",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Scout:
    """What the run must know of one rank beside its light trace."""

    summary: RankSummary
    marked: bool
    digest: bytes | None
    """None where the file is one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoutReport:
    """What came of one file."""

    reading: Reading
    """With light ranks."""
    scouts: tuple[Scout, ...] = ()
    """One for each of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """A run of many ranks."""

    run: Run
    """With light ranks."""
    stored: dict[int, StoredRank]
    """Where each rank lies."""
    marked: bool
    """Some rank marks steps."""


def read_fleet(  # noqa: PLR0913 (one argument a question)
    found: RunFiles,
    spool: Spool | None,
    *,
    engine: Engine,
    limits: Limits,
    rank: int | None,
    on_progress: Progress | None,
    digests: DigestPlace | None,
) -> Fleet:
    """Scout every file, wherever the engine's workers are; without a spool, for summaries alone."""
    interning = _Interning()
    readings: list[Reading] = []
    seen: dict[tuple[str, int | None], tuple[Scout, StoredRank | None]] = {}
    task = partial(scout_file, digests=digests)
    scouting = map_files(task, found.capture.files, engine, limits, on_progress, ordered=True)
    with closing(scouting):
        for known, outcome in scouting:
            if isinstance(outcome, TraceError):
                readings.append(Reading(error=outcome))
                continue
            traces = tuple(interning.intern(trace) for trace in outcome.reading.traces)
            readings.append(replace(outcome.reading, traces=traces))
            for trace, scout in zip(traces, outcome.scouts, strict=True):
                stored = None
                if spool is not None and scout.digest is None:
                    stored = StoredRank(file=known.file, rank=UNKNOWN)
                elif spool is not None and scout.digest is not None:
                    stored = spool.put(scout.digest, UNKNOWN)
                seen[trace.file, trace.rank] = replace(scout, digest=None), stored
    run = settle_run(found, readings, rank)
    marked, all_stored, summaries = False, {}, []
    for trace in run.ranks:
        number = rank_of(trace)
        scout, stored = seen.get((trace.file, trace.rank)) or seen[trace.file, None]
        marked |= scout.marked
        summaries.append(replace(scout.summary, rank=number))
        if stored is not None:
            all_stored[number] = replace(stored, rank=number)
    return Fleet(run=replace(run, summaries=tuple(summaries)), stored=all_stored, marked=marked)


def scout_file(known: TraceFile, limits: Limits, digests: DigestPlace | None = None) -> ScoutReport:
    """Read a file and send back little; the rest comes as digests."""
    reading = read_file(known, limits, digests)
    is_digest = known.head is not None
    scouts = tuple(
        Scout(
            summary=summarise(trace),
            marked=marks_steps(trace),
            digest=None if is_digest else pack_digest(trace, None),
        )
        for trace in reading.traces
    )
    light = tuple(lighten(trace) for trace in reading.traces)
    return ScoutReport(reading=replace(reading, traces=light), scouts=scouts)


def lighten(trace: RankTrace) -> RankTrace:
    """Keep of each table its first row, so that one sees that it has any; of messages who with.

    All messages are kept where a peer is not known: how many those are is told.
    """
    return replace(
        trace,
        names=(),
        threads=(),
        kernels=_first(trace.kernels),
        launches=_first(trace.launches),
        operators=_one_message_a_peer(trace.operators),
        annotations=_first(trace.annotations),
        memory=_first(trace.memory),
        cpu_operators=_first(trace.cpu_operators),
    )


def _one_message_a_peer(operators: Operators) -> Operators:
    posts = np.isin(operators.operation, (Operation.SEND, Operation.RECEIVE))
    unnamed = posts & (operators.peer < 0) & (operators.local_peer >= 0)
    if unnamed.any():
        return _rows(operators, np.flatnonzero(posts))
    keys = np.stack(
        [
            getattr(operators, name)[posts].astype(np.int64)
            for name in ("operation", "peer", "local_peer", "group")
        ]
    )
    _, first = np.unique(keys, axis=1, return_index=True)
    return _rows(operators, np.flatnonzero(posts)[np.sort(first)])


def _first(table: _TableType) -> _TableType:
    return _rows(table, np.arange(min(1, len(table))))


def _rows(table: _TableType, rows: np.ndarray[tuple[int], np.dtype[np.intp]]) -> _TableType:
    columns = {column.name: getattr(table, column.name)[rows] for column in fields(table)}
    return type(table)(**columns)


class _Interning:
    """Keeps what thousands of ranks say alike only once: the members of their groups above all."""

    def __init__(self) -> None:
        self._groups: dict[Group, Group] = {}
        self._tuples: dict[tuple[Group, ...], tuple[Group, ...]] = {}

    def intern(self, trace: RankTrace) -> RankTrace:
        """Return the same rank with shared groups."""
        header = replace(trace.header, groups=self._shared(trace.header.groups))
        return replace(trace, header=header, groups=self._shared(trace.groups))

    def _shared(self, groups: tuple[Group, ...]) -> tuple[Group, ...]:
        shared = tuple(self._groups.setdefault(group, group) for group in groups)
        return self._tuples.setdefault(shared, shared)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartOrder(TraceFile):
    """A part of a run to be measured, as a worker is handed it."""

    stored: tuple[StoredRank, ...]
    members: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """Ranks whose peers are counted inside a group, and who is in it."""
    sidecars: tuple[Sidecar, ...] = ()
    marked: bool = True
    may_infer: bool = True
    question: Question = field(default_factory=Question)

    @property
    def ranks(self) -> frozenset[int]:
        """Whose digests they are."""
        return frozenset(stored.rank for stored in self.stored)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartFigures:
    """What comes back of it."""

    timeline: Timeline | NoPipelineHere
    """Without its passes, transfers and intervals."""
    figures: tuple[PipelineFigures, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class WholePart:
    """A part with everything in it."""

    traces: tuple[RankTrace, ...]
    timeline: Timeline | NoPipelineHere


def order_parts(fleet: Fleet, question: Question) -> tuple[list[PartOrder], tuple[Gap, ...]]:
    """Tell which ranks talk to each other, and order each such part to be measured."""
    members, gaps = choose_groups(fleet.run.ranks)
    named = [translate_peers(trace, members.get(rank_of(trace))) for trace in fleet.run.ranks]
    sidecars = {sidecar.rank: sidecar for sidecar in fleet.run.sidecars}
    orders = [
        PartOrder(
            file=f"ranks {show_ranks(ranks)}",
            format=DIGEST,
            stored=tuple(fleet.stored[rank] for rank in ranks),
            members=tuple((rank, members[rank]) for rank in ranks if rank in members),
            sidecars=tuple(sidecars[rank] for rank in ranks if rank in sidecars),
            marked=fleet.marked,
            question=question,
        )
        for ranks in find_parts(named)
    ]
    return orders, gaps


def measure_parts(
    orders: Sequence[PartOrder], limits: Limits, on_progress: Progress | None
) -> tuple[list[tuple[PartOrder, PartFigures]], list[Gap]]:
    """Measure all parts on this machine's processors; name those that could not be."""
    measured, lost = [], []
    measuring = map_files(measure_part, orders, _HERE, limits, on_progress, ordered=True)
    with closing(measuring):
        for order, outcome in measuring:
            if isinstance(outcome, TraceError):
                lost.append(unreadable(outcome))
            else:
                measured.append((order, outcome))
    return measured, lost


def measure_part(order: PartOrder, limits: Limits) -> PartFigures:
    """Measure all pipelines of a part, and send back their figures alone."""
    built = load_part(order, limits).timeline
    if isinstance(built, NoPipelineHere):
        return PartFigures(timeline=built)
    figures = measure_asked(built, built.pipelines, order.sidecars, order.question)
    slim = replace(
        built,
        ranks=_without_intervals(built.ranks),
        passes=built.passes.where(_NO_ROWS),
        transfers=built.transfers.where(_NO_ROWS),
    )
    return PartFigures(
        timeline=slim,
        figures=tuple(
            replace(pipeline, ranks=_without_intervals(pipeline.ranks)) for pipeline in figures
        ),
    )


def load_part(order: PartOrder, limits: Limits) -> WholePart:
    """Build a part from its digests."""
    members = dict(order.members)
    traces = tuple(
        translate_peers(stored.read(limits), members.get(stored.rank)) for stored in order.stored
    )
    built = build_part(
        traces,
        marked=order.marked,
        may_infer=order.may_infer,
        in_flight=order.question.in_flight,
    )
    if isinstance(built, Timeline):
        built = tell_memory(built, order.sidecars)
    return WholePart(traces=traces, timeline=built)


def _without_intervals(ranks: Sequence[RankTimeline]) -> tuple[RankTimeline, ...]:
    nothing = no_intervals()
    return tuple(
        replace(
            rank,
            busy=nothing,
            occupied=nothing,
            apparent=nothing,
            unissued=nothing,
            outside=(),
            side_work=(),
        )
        for rank in ranks
    )


def settle_figures(
    figures: Sequence[PipelineFigures],
    numbers: Mapping[tuple[int, ...], int],
    groups: Mapping[int, tuple[Group, ...]],
) -> list[PipelineFigures]:
    """Return figures of a part with the whole run's numbers, and groups that its ranks share."""
    settled = []
    for pipeline in figures:
        number = numbers[pipeline.ranks[0].members]
        ranks = tuple(
            replace(
                rank,
                pipeline=number,
                collectives=rank.collectives
                and replace(rank.collectives, groups=groups[rank.rank]),
            )
            for rank in pipeline.ranks
        )
        settled.append(replace(pipeline, pipeline=number, ranks=ranks))
    return settled
