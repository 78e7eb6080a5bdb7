"""Recognised files in → what came of each, read through an executor."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from debubble.errors import Gap, TraceError
from debubble.trace.columns import RankTrace
from debubble.trace.digest import read_digest
from debubble.trace.digest.place import DigestPlace
from debubble.trace.engine import Engine, Progress, map_files, too_large
from debubble.trace.formats import Format, Recognised, recognise
from debubble.trace.kineto import read_kineto
from debubble.trace.sidecar import Sidecar
from debubble.trace.source import Limits, Source, local_copy

if TYPE_CHECKING:
    from debubble.trace.optable import OpTable

# Op tables are held whole, some ten times their size; this is about four million passes.
_TABLE_BYTES = 256 * 1024**2


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What came of one file: the traces in it, or a table, or the reason why not."""

    traces: tuple[RankTrace, ...] = ()
    table: OpTable | None = None
    error: TraceError | None = None
    beside: str = ""
    """The trace that a sidecar would lie beside."""
    sidecar: Sidecar | None = None
    """What a digest kept of the sidecar."""
    gaps: tuple[Gap, ...] = ()


def read_file(known: Recognised, limits: Limits, digests: DigestPlace | None = None) -> Reading:
    """Read one file of any format, and keep its digests where there is a place for them.

    Errors are returned, so that they come back from workers.
    """
    try:
        reading = replace(_read(known, limits), beside=known.named)
        return reading if digests is None else _keep(known, reading, digests, limits)
    except TraceError as error:
        if error.rank is None:
            error.rank = known.rank
        if known.instead:
            return replace(_read_instead(known, limits, digests), error=error)
        return Reading(error=error)
    except MemoryError:
        return Reading(error=too_large(known))


def _read(known: Recognised, limits: Limits) -> Reading:
    if known.format is Format.DIGEST:
        return _read_digest(known, limits)
    if known.format is Format.NSIGHT:
        return Reading(traces=_read_nsight(known.file))
    if known.format is Format.OP_TABLE:
        return Reading(table=_read_op_table(known.file, limits))
    return Reading(traces=(read_kineto(known.file, limits),))


def _read_digest(known: Recognised, limits: Limits) -> Reading:
    if known.head is not None and known.head.table:
        from debubble.trace.digest.content import read_table  # noqa: PLC0415 (rare, and 20 ms)

        return Reading(table=read_table(known.file, limits))
    trace, sidecar = read_digest(known.file, limits)
    return Reading(traces=(replace(trace, rank=known.rank),), sidecar=sidecar)


def _read_instead(known: Recognised, limits: Limits, digests: DigestPlace | None) -> Reading:
    """Read the trace that a damaged digest lies beside; of several ranks, the digest's alone."""
    try:
        reading = read_file(recognise(known.instead, limits), limits, digests)
    except TraceError as error:
        return Reading(error=error)
    if known.head is None or known.head.parts == 1:
        return reading
    return replace(reading, traces=tuple(t for t in reading.traces if t.rank == known.rank))


def _keep(known: Recognised, reading: Reading, place: DigestPlace, limits: Limits) -> Reading:
    from debubble.trace.digest import content  # noqa: PLC0415 (only where digests are kept)

    if known.format is Format.DIGEST:
        gaps = content.copy_digest(known.file, known.rank, place, limits)
    elif reading.table is not None:
        gaps = content.keep_table(known.file, reading.table, place)
    else:
        gaps = content.keep_traces(known.file, reading.traces, place)
    return replace(reading, gaps=gaps)


def _read_nsight(file: str) -> tuple[RankTrace, ...]:
    from debubble.trace.nsight import read_nsight  # noqa: PLC0415 (rare, and 30 ms)

    with local_copy(file) as path:
        return tuple(replace(trace, file=file) for trace in read_nsight(path))


def _read_op_table(file: str, limits: Limits) -> OpTable:
    from debubble.trace.optable import read_op_table  # noqa: PLC0415 (rare, and 20 ms)

    held = replace(limits, inflated_bytes=min(limits.inflated_bytes, _TABLE_BYTES))
    return read_op_table(file, data=b"".join(Source(file, held).pieces()))


def read_all(
    files: Sequence[Recognised],
    engine: Engine,
    limits: Limits,
    on_progress: Progress | None,
    digests: DigestPlace | None = None,
) -> Generator[Reading]:
    """Yield what comes of each file, in the files' order whatever the workers' order was."""
    task = partial(read_file, digests=digests)
    outcomes = map_files(task, files, engine, limits, on_progress, ordered=True)
    with closing(outcomes):
        for _, outcome in outcomes:
            yield Reading(error=outcome) if isinstance(outcome, TraceError) else outcome
