"""Recognised files in → what came of each, read through an engine."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from debubble.errors import TraceError
from debubble.trace.columns import RankTrace
from debubble.trace.engine import Engine
from debubble.trace.formats import Format, Recognised
from debubble.trace.kineto import read_kineto
from debubble.trace.mapping import Progress, map_files, too_large
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


def read_file(known: Recognised, limits: Limits) -> Reading:
    """Read one file of any format; errors are returned, so that they come back from workers."""
    try:
        if known.format is Format.NSIGHT:
            return Reading(traces=_read_nsight(known.file))
        if known.format is Format.OP_TABLE:
            return Reading(table=_read_op_table(known.file, limits))
        return Reading(traces=(read_kineto(known.file, limits),))
    except TraceError as error:
        if error.rank is None:
            error.rank = known.rank
        return Reading(error=error)
    except MemoryError:
        return Reading(error=too_large(known))


def _read_nsight(file: str) -> tuple[RankTrace, ...]:
    from debubble.trace.nsight import read_nsight  # noqa: PLC0415 (rare, and 30 ms)

    with local_copy(file) as path:
        return tuple(replace(trace, file=file) for trace in read_nsight(path))


def _read_op_table(file: str, limits: Limits) -> OpTable:
    from debubble.trace.optable import read_op_table  # noqa: PLC0415 (rare, and 20 ms)

    held = replace(limits, inflated_bytes=min(limits.inflated_bytes, _TABLE_BYTES))
    return read_op_table(file, data=b"".join(Source(file, held).pieces()))


def read_all(
    files: Sequence[Recognised], engine: Engine, limits: Limits, on_progress: Progress | None
) -> Generator[Reading]:
    """Yield what comes of each file, in the files' order whatever the workers' order was."""
    outcomes = map_files(read_file, files, engine, limits, on_progress, ordered=True)
    with closing(outcomes):
        for _, outcome in outcomes:
            yield Reading(error=outcome) if isinstance(outcome, TraceError) else outcome
