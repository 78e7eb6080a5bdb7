"""What the user pointed at in → all its ranks read, through an executor, with every gap named."""

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

from debubble.errors import Code, Gap, RunNotFound, TraceError, TraceTooLarge, as_gap
from debubble.trace.captures import Capture, choose_capture, group_captures
from debubble.trace.columns import Operation, RankTrace
from debubble.trace.files import expand
from debubble.trace.formats import Format, Recognised, rank_from_name, recognise
from debubble.trace.kineto import read_kineto
from debubble.trace.sidecar import Sidecar, is_sidecar, read_sidecar
from debubble.trace.source import DEFAULT_LIMITS, Limits, Source, is_url, local_copy
from debubble.units import counted

if TYPE_CHECKING:
    from debubble.trace.optable import OpTable

# Below this, starting worker processes takes longer than reading (4 ranks of 5 MB: 0.2 s).
_WORTH_A_POOL_BYTES = 8 * 1024 * 1024

# Op tables are held whole, some ten times their size; this is about four million passes.
_TABLE_BYTES = 256 * 1024**2

# Thousands of names make no message clearer.
_FILES_SHOWN = 20

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What came of one file: the traces in it, or a table, or the reason why not."""

    traces: tuple[RankTrace, ...] = ()
    table: OpTable | None = None
    error: TraceError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The files of one capture, before they are read."""

    capture: Capture
    captures: tuple[Capture, ...]
    left_alone: tuple[str, ...]
    """JSON beside the traces that is something else."""
    gaps: tuple[Gap, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One capture, read. `ranks` is sorted; op tables hold all their ranks themselves."""

    found: Found
    ranks: tuple[RankTrace, ...]
    tables: tuple[OpTable, ...]
    world_size: int | None
    missing_ranks: tuple[int, ...]
    gaps: tuple[Gap, ...]
    sidecars: tuple[Sidecar, ...] = ()
    """What the ranks said of themselves, where they did."""


def find_run(
    places: Sequence[str], *, capture: str | None = None, limits: Limits = DEFAULT_LIMITS
) -> Found:
    """Find the traces the user means; the newest complete capture where there are several."""
    files, named = expand(places)
    traces, left_alone, gaps = [], [], []
    for file in files:
        if is_sidecar(file) and len(files) > 1:
            continue
        try:
            known = recognise(file, limits)
        except TraceError as error:
            if named or named_like_a_trace(file) or os.path.isdir(file):  # noqa: PTH112
                gaps.append(_unreadable(error))
            continue
        if known.is_trace:
            traces.append(known)
        elif known.why_not and (named or _is_garbage_trace(known)):
            gaps.append(_unreadable(known.why_not))
        elif known.format is Format.OTHER_JSON:
            left_alone.append(file)
    if not traces:
        raise _nothing_found(places, gaps, left_alone)
    captures = group_captures(traces, named=named)
    chosen, more = choose_capture(captures, capture)
    return Found(
        capture=chosen,
        captures=captures,
        left_alone=tuple(left_alone),
        gaps=tuple(gaps + more),
    )


def read_run(
    found: Found,
    *,
    executor: Executor | None = None,
    limits: Limits = DEFAULT_LIMITS,
    rank: int | None = None,
    on_progress: Progress | None = None,
) -> Run:
    """Read every file of a capture; a file that cannot be read becomes a gap, the others go on."""
    gaps = [*found.gaps, *(_duplicate(rank, files) for rank, files in found.capture.duplicates)]
    ranks: list[RankTrace] = []
    tables: list[OpTable] = []
    for reading in _read_all(found.capture.files, executor, limits, on_progress):
        if reading.error:
            gaps.append(_unreadable(reading.error))
        if reading.table is not None:
            tables.append(reading.table)
        ranks += reading.traces
    ranks, more = _settle_ranks(ranks, rank)
    gaps += [gap for trace in ranks for gap in trace.gaps]
    gaps += [gap for table in tables for gap in table.gaps]
    gaps += more
    sidecars, more = _read_sidecars(ranks)
    gaps += more
    if not ranks and not tables:
        raise _nothing_found([found.capture.name], gaps, ())
    world_size = max((t.header.world_size or 0 for t in ranks), default=0) or None
    missing = missing_ranks(ranks)
    if missing:
        gaps.append(_missing(missing, ranks))
    return Run(
        found=found,
        ranks=tuple(ranks),
        tables=tuple(tables),
        world_size=world_size,
        missing_ranks=missing,
        gaps=tuple(gaps),
        sidecars=sidecars,
    )


def _read_sidecars(ranks: Sequence[RankTrace]) -> tuple[tuple[Sidecar, ...], list[Gap]]:
    """Read what lies beside the traces; what another rank wrote is no witness."""
    sidecars: list[Sidecar] = []
    gaps: list[Gap] = []
    for trace in ranks:
        said, gap = read_sidecar(trace.file)
        if gap is not None:
            gaps.append(replace(gap, rank=trace.rank))
        if said is None:
            continue
        if said.rank is not None and said.rank != trace.rank:
            gaps.append(_of_another_rank(said, trace))
            continue
        sidecars.append(replace(said, rank=trace.rank))
    return tuple(sidecars), gaps


def _of_another_rank(said: Sidecar, trace: RankTrace) -> Gap:
    return Gap(
        code=Code.SIDECAR_DIFFERS,
        message=f"was written by rank {said.rank}, beside the trace of another: it is not used",
        hint="put each sidecar beside its own trace",
        file=said.file,
        rank=trace.rank,
    )


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


def missing_ranks(ranks: Sequence[RankTrace]) -> tuple[int, ...]:
    """Return the ranks that the captured ones talked to, point to point, and that are not there.

    So one whole pipeline out of a larger world is complete. Where no rank sends or receives, or the
    job has no group but that of all ranks, every rank of the world is expected.
    """
    captured = {trace.rank for trace in ranks}
    worlds = [trace.header.world_size or 0 for trace in ranks]
    expected: set[int] = set()
    talks = False
    for trace in ranks:
        operators = trace.operators
        pairs = (operators.operation == Operation.SEND) | (operators.operation == Operation.RECEIVE)
        talks |= bool((pairs & (operators.local_peer >= 0)).any())
        expected.update(operators.peer[pairs & (operators.peer >= 0)].tolist())
        for group in set(operators.group[pairs].tolist()):
            members = trace.groups[group].ranks if group >= 0 else ()
            alone = {one.ranks for one in trace.header.groups} == {members}
            if alone or len(members) < (trace.header.world_size or 0):
                expected.update(members)
    if not talks:
        expected = set(range(max(worlds, default=0)))
    return tuple(sorted(expected - captured))


def _read_all(
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


def _settle_ranks(
    traces: Sequence[RankTrace], given: int | None
) -> tuple[list[RankTrace], list[Gap]]:
    """Give every trace its rank, sort them, and leave out what cannot be placed."""
    gaps: list[Gap] = []
    by_rank: dict[int, list[RankTrace]] = {}
    for trace in traces:
        rank = trace.rank if trace.rank is not None else rank_from_name(trace.file)
        if rank is None and len(traces) == 1:
            rank = given
        if rank is None:
            gaps.append(_no_rank(trace))
        else:
            by_rank.setdefault(rank, []).append(replace(trace, rank=rank))
    settled = []
    for rank, same in sorted(by_rank.items()):
        if len(same) > 1:
            gaps.append(_duplicate(rank, tuple(trace.file for trace in same)))
        else:
            settled += same
    with_kernels = [trace for trace in settled if len(trace.kernels)]
    for trace in settled if with_kernels else ():
        known = any(gap.code in {Code.NO_KERNELS, Code.FOREIGN_DEVICE} for gap in trace.gaps)
        if not len(trace.kernels) and not known:
            gaps.append(_no_kernels(trace))
    return settled, gaps


def named_like_a_trace(file: str) -> bool:
    """Tell a file that should be a trace by its name, whatever is in it."""
    name = file.lower()
    return any(word in name for word in (".json", ".gz", "trace", ".sqlite", ".parquet", ".csv"))


def _is_garbage_trace(known: Recognised) -> bool:
    """Tell a file that is not JSON at all, though its name says so."""
    return known.format is Format.OTHER and named_like_a_trace(known.file)


def _unreadable(error: TraceError) -> Gap:
    gap = as_gap(error, code=Code.UNREADABLE)
    return gap if gap.rank is not None else replace(gap, rank=rank_from_name(gap.file))


def _nothing_found(
    places: Sequence[str], gaps: Sequence[Gap], left_alone: Sequence[str]
) -> RunNotFound:
    if gaps:
        more = f" (and {counted(len(gaps) - 1, 'more problem')})" if len(gaps) > 1 else ""
        return RunNotFound(f"{gaps[0]}{more}", hint=gaps[0].hint)
    seen = f"; {counted(len(left_alone), 'JSON file')} there, none of them a trace"
    return RunNotFound(
        f"no traces in {', '.join(places)}{seen if left_alone else ''}",
        hint="give torch.profiler's Chrome traces, `nsys export --type sqlite` files, or op tables",
    )


def _duplicate(rank: int, files: Sequence[str]) -> Gap:
    return Gap(
        code=Code.DUPLICATE_RANK,
        message=f"{counted(len(files), 'file')} of the same rank, none of them read: "
        + ", ".join(files[:_FILES_SHOWN])
        + (", …" if len(files) > _FILES_SHOWN else ""),
        hint="keep one of them, or give the files one by one",
        file=files[0],
        rank=rank,
    )


def _no_rank(trace: RankTrace) -> Gap:
    return Gap(
        code=Code.NO_RANK,
        message="no rank: neither distributedInfo nor the file name tells it",
        hint="rename it to rank<N>.json.gz, or give it alone with --rank N",
        file=trace.file,
    )


def _no_kernels(trace: RankTrace) -> Gap:
    return Gap(
        code=Code.NO_KERNELS,
        message="no device kernels in it, though other ranks have some",
        hint="record with activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA] on every rank",
        file=trace.file,
        rank=trace.rank,
    )


def _missing(missing: Sequence[int], ranks: Sequence[RankTrace]) -> Gap:
    names = f"{'rank' if len(missing) == 1 else 'ranks'} {show_ranks(missing)}"
    talk = any((trace.operators.local_peer >= 0).any() for trace in ranks)
    why = "which these ranks exchange data with" if talk else "which the same job ran"
    return Gap(
        code=Code.MISSING_RANKS,
        message=f"no trace of {names}, {why}",
        hint="capture all ranks of at least one pipeline",
    )


def show_ranks(ranks: Sequence[int]) -> str:
    """Write ranks briefly: `0-3, 7`."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in spans)
