"""Recognised files in → what came of each, read through an executor."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import (
    BrokenExecutor,
    Executor,
    Future,
    ProcessPoolExecutor,
    as_completed,
)
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from debubble.errors import Gap, TraceError, TraceTooLarge
from debubble.trace.columns import RankTrace
from debubble.trace.digest import read_digest
from debubble.trace.digest.place import DigestPlace
from debubble.trace.formats import Format, Recognised, recognise
from debubble.trace.kineto import read_kineto
from debubble.trace.sidecar import Sidecar
from debubble.trace.source import Limits, Source, is_url, local_copy

if TYPE_CHECKING:
    from debubble.trace.optable import OpTable

# Below this, starting worker processes takes longer than reading (4 ranks of 5 MB: 0.2 s).
_WORTH_A_POOL_BYTES = 8 * 1024 * 1024

# Op tables are held whole, some ten times their size; this is about four million passes.
_TABLE_BYTES = 256 * 1024**2

Progress = Callable[[int, int], None]


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
        return Reading(error=_too_large(known))


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
        from debubble.trace.digest.table import read_table  # noqa: PLC0415 (rare, and 20 ms)

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
    from debubble.trace.digest import keep  # noqa: PLC0415 (only where digests are kept)

    if known.format is Format.DIGEST:
        gaps = keep.copy_digest(known.file, known.rank, place, limits)
    elif reading.table is not None:
        gaps = keep.keep_table(known.file, reading.table, place)
    else:
        gaps = keep.keep_traces(known.file, reading.traces, place)
    return replace(reading, gaps=gaps)


def _too_large(known: Recognised) -> TraceTooLarge:
    return TraceTooLarge(
        "does not fit into memory",
        hint="record fewer steps, or read it on a larger machine",
        file=known.file,
        rank=known.rank,
    )


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
    executor: Executor | None,
    limits: Limits,
    on_progress: Progress | None,
    digests: DigestPlace | None = None,
) -> Iterator[Reading]:
    """Yield what comes of each file, in the files' order whatever the workers' order was."""
    report = on_progress or (lambda _done, _total: None)
    with _workers(files, executor) as pool:
        if pool is None:
            for done, known in enumerate(files, start=1):
                outcome = read_file(known, limits, digests)
                report(done, len(files))
                yield outcome
            return
        futures = [_submit(pool, known, limits, digests) for known in files]
        for done, _ in enumerate(as_completed(futures), start=1):
            report(done, len(files))
        for known, future in zip(files, futures, strict=True):
            try:
                yield future.result()
            except BrokenExecutor:
                yield Reading(error=_lost(known))


def _submit(
    pool: Executor, known: Recognised, limits: Limits, digests: DigestPlace | None
) -> Future[Reading]:
    try:
        return pool.submit(read_file, known, limits, digests)
    except BrokenExecutor as error:
        lost: Future[Reading] = Future()
        lost.set_exception(error)
        return lost


def _lost(known: Recognised) -> TraceError:
    return TraceError(
        "was not read: a worker process died, perhaps for want of memory",
        hint="read fewer files at once, or on a larger machine",
        file=known.file,
        rank=known.rank,
    )


@contextmanager
def _workers(files: Sequence[Recognised], executor: Executor | None) -> Iterator[Executor | None]:
    """Lend the executor given, or a process pool where the files are worth one, or nothing."""
    size = sum(_size(known.file) for known in files)
    if executor is not None or len(files) < 2 or size < _WORTH_A_POOL_BYTES:
        yield executor
        return
    # Forking is quickest, and safe only while no other thread may hold a lock.
    method = "fork" if threading.active_count() == 1 and os.name == "posix" else "spawn"
    workers = min(len(files), os.cpu_count() or 1)
    with ProcessPoolExecutor(workers, multiprocessing.get_context(method)) as pool:
        yield pool


def _size(file: str) -> int:
    try:
        return 0 if is_url(file) else os.path.getsize(file)  # noqa: PTH202
    except OSError:
        return 0
