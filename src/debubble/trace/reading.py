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

from debubble.errors import TraceError, TraceTooLarge
from debubble.trace.columns import RankTrace
from debubble.trace.formats import Format, Recognised
from debubble.trace.kineto import read_kineto
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
        return Reading(error=_too_large(known))


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
) -> Iterator[Reading]:
    """Yield what comes of each file, in the files' order whatever the workers' order was."""
    report = on_progress or (lambda _done, _total: None)
    with _workers(files, executor) as pool:
        if pool is None:
            for done, known in enumerate(files, start=1):
                outcome = read_file(known, limits)
                report(done, len(files))
                yield outcome
            return
        futures = [_submit(pool, known, limits) for known in files]
        for done, _ in enumerate(as_completed(futures), start=1):
            report(done, len(files))
        for known, future in zip(files, futures, strict=True):
            try:
                yield future.result()
            except BrokenExecutor:
                yield Reading(error=_lost(known))


def _submit(pool: Executor, known: Recognised, limits: Limits) -> Future[Reading]:
    try:
        return pool.submit(read_file, known, limits)
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
