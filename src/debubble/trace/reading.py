"""A recognised file of any format in → the traces or the table in it, and its digests kept."""

from __future__ import annotations

from dataclasses import dataclass, replace

from debubble.errors import Gap, TraceError
from debubble.trace.captures import Format, TraceFile, recognise
from debubble.trace.columns import RankTrace
from debubble.trace.digest import read_digest
from debubble.trace.digest.content import copy_digest, keep_table, keep_traces, read_table
from debubble.trace.digest.place import DigestPlace
from debubble.trace.engine import too_large
from debubble.trace.kineto import read_kineto
from debubble.trace.optable import OpTable, read_op_table
from debubble.trace.sidecar import Sidecar
from debubble.trace.source import Limits, Source, local_copy

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


def read_file(known: TraceFile, limits: Limits, digests: DigestPlace | None = None) -> Reading:
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


def _read(known: TraceFile, limits: Limits) -> Reading:
    if known.format is Format.DIGEST and known.head is not None and known.head.table:
        return Reading(table=read_table(known.file, limits))
    if known.format is Format.DIGEST:
        trace, sidecar = read_digest(known.file, limits)
        return Reading(traces=(replace(trace, rank=known.rank),), sidecar=sidecar)
    if known.format is Format.NSIGHT:
        from debubble.trace.nsight import read_nsight  # noqa: PLC0415 (rare, and 30 ms)

        with local_copy(known.file) as path:
            traces = tuple(replace(trace, file=known.file) for trace in read_nsight(path))
        return Reading(traces=traces)
    if known.format is Format.OP_TABLE:
        held = replace(limits, inflated_bytes=min(limits.inflated_bytes, _TABLE_BYTES))
        data = b"".join(Source(known.file, held).pieces())
        return Reading(table=read_op_table(known.file, data=data))
    return Reading(traces=(read_kineto(known.file, limits),))


def _read_instead(known: TraceFile, limits: Limits, digests: DigestPlace | None) -> Reading:
    """Read the trace that a damaged digest lies beside; of several ranks, the digest's alone."""
    try:
        reading = read_file(recognise(known.instead, limits), limits, digests)
    except TraceError as error:
        return Reading(error=error)
    if known.head is None or known.head.parts == 1:
        return reading
    return replace(reading, traces=tuple(t for t in reading.traces if t.rank == known.rank))


def _keep(known: TraceFile, reading: Reading, place: DigestPlace, limits: Limits) -> Reading:
    if known.format is Format.DIGEST:
        gaps = copy_digest(known.file, known.rank, place, limits)
    elif reading.table is not None:
        gaps = keep_table(known.file, reading.table, place)
    else:
        gaps = keep_traces(known.file, reading.traces, place)
    return replace(reading, gaps=gaps)
