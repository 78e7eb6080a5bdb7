"""The files of a run of many ranks in → its ranks, each where it takes no memory until it is built.

    file ─ scout_file ─┬─► a few rows a rank: who talks to whom     all that the whole run must know
                       └─► its digest, in one temporary file        read again where it is built

So a thousand ranks are told apart on a machine that could not hold ten of them. Imported only for
runs that are not held whole.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, TypeVar

import msgspec
import numpy as np

from debubble.errors import EngineError, TraceError
from debubble.timeline.build import Loader
from debubble.timeline.fleet.survey import Means, RanksRead
from debubble.timeline.steps import marks_steps
from debubble.timeline.transfers import rank_of
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
from debubble.trace.digest import DigestPlace, pack_digest, unpack_digest
from debubble.trace.engine import map_files
from debubble.trace.format import Reading, TraceFile
from debubble.trace.run import RunFiles, read_file, settle_run
from debubble.trace.source import Limits, inflate

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

    def load(self, limits: Limits) -> RankTrace:
        """Read the rank again."""
        if self.size is None:
            data = inflate(self.file, limits)
        else:
            with Path(self.file).open("rb") as spool:
                spool.seek(self.offset)
                data = spool.read(self.size)
        traces = unpack_digest(data, self.file, limits)
        for trace in traces:
            if isinstance(trace, RankTrace) and (len(traces) == 1 or trace.rank == self.rank):
                return replace(trace, rank=self.rank)
        raise TraceError(f"is no longer a digest of rank {self.rank}", file=self.file)


class Spool:
    """A file of digests, one behind the other."""

    def __init__(self, file: IO[bytes], name: str) -> None:
        self._file = file
        self._name = name
        self._end = 0

    def put(self, digest: bytes, rank: int) -> StoredRank:
        """Add one, at once there for others to read."""
        try:
            self._file.write(digest)
            self._file.flush()
        except OSError as error:
            raise _no_space(error) from error
        stored = StoredRank(file=self._name, rank=rank, offset=self._end, size=len(digest))
        self._end += len(digest)
        return stored


@contextmanager
def spooling() -> Iterator[Spool]:
    """Lend a spool that workers of this machine can read; it is gone afterwards."""
    try:
        file = tempfile.NamedTemporaryFile(prefix="debubble-ranks-")  # noqa: SIM115
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


def read_spooled(found: RunFiles, means: Means, spool: Spool | None) -> RanksRead:
    """Scout every file, wherever the workers are; without a spool, for summaries alone."""
    interning = _Interning()
    readings: list[Reading] = []
    seen: dict[tuple[str, int | None], tuple[Scout, StoredRank | None]] = {}
    scouting = map_files(
        partial(scout_file, digests=means.digests),
        found.capture.files,
        means.engine,
        means.limits,
        means.on_progress,
    )
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
    run = settle_run(found, readings, means.rank)
    marked, summaries = False, []
    loaders: dict[int, Loader] = {}
    for trace in run.ranks:
        number = rank_of(trace)
        scout, stored = seen.get((trace.file, trace.rank)) or seen[trace.file, None]
        marked |= scout.marked
        summaries.append(msgspec.structs.replace(scout.summary, rank=number))
        if stored is not None:
            loaders[number] = replace(stored, rank=number).load
    run = replace(run, summaries=tuple(summaries))
    return RanksRead(run=run, loaders=loaders, marked=marked, held=False)


def scout_file(known: TraceFile, limits: Limits, digests: DigestPlace | None = None) -> ScoutReport:
    """Read a file and send back little; the rest comes as digests."""
    reading = read_file(known, limits, digests)
    scouts = tuple(
        Scout(
            summary=summarise(trace),
            marked=marks_steps(trace),
            digest=None if known.digest_of else pack_digest(trace),
        )
        for trace in reading.traces
    )
    light = tuple(lighten(trace) for trace in reading.traces)
    return ScoutReport(reading=replace(reading, traces=light), scouts=scouts)


def lighten(trace: RankTrace) -> RankTrace:
    """Keep a row of each kind of kernel, of each other table the first; of messages who with.

    All messages are kept where a peer is not known: how many those are is told.
    """
    return replace(
        trace,
        names=(),
        threads=(),
        kernels=trace.kernels.take(np.unique(trace.kernels.kind, return_index=True)[1]),
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
        return operators.take(np.flatnonzero(posts))
    keys = np.stack(
        [
            getattr(operators, name)[posts].astype(np.int64)
            for name in ("operation", "peer", "local_peer", "group")
        ]
    )
    _, first = np.unique(keys, axis=1, return_index=True)
    kept = np.flatnonzero(posts)[np.sort(first)]
    return operators.take(kept if len(kept) else np.arange(min(1, len(operators))))


def _first(table: _TableType) -> _TableType:
    return table.take(np.arange(min(1, len(table))))


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
