"""One process of an export in → its `RankTrace`.

A `SendRecv` kernel is a pipeline's transfer or an all-to-all; only the calls that led to its launch
tell. NCCL launches inside the call, or inside the `ncclGroupEnd` that closes a group of calls:

    ├ ncclGroupStart ┤ ├ ncclSend ┤ ├ ncclRecv ┤ ├ ncclGroupEnd ── cudaLaunch ┤  one peer
    ├ ncclGroupStart ┤ ├ ncclSend ┤ ├ ncclSend ┤ … ├ ncclGroupEnd ─ cudaLaunch ┤  unknown
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from debubble.errors import Code, Gap
from debubble.trace.columns import (
    FIRST_COMMUNICATION_KIND,
    I32,
    I64,
    U8,
    UNKNOWN,
    Annotations,
    CpuOperators,
    Header,
    KernelKind,
    Kernels,
    Launches,
    Memory,
    Operation,
    Operators,
    RankTrace,
    Thread,
    build,
    fit_int32,
)
from debubble.trace.communication import find_enclosing, join_launches
from debubble.trace.nsight.tables import (
    GRAPH_NAME,
    MISSING_TIME,
    HostSpans,
    Tables,
    TimedType,
    plausible,
    take,
)
from debubble.units import show_count

_CALLS: Final = {"ncclSend": Operation.SEND, "ncclRecv": Operation.RECEIVE}
_COLLECTIVE_CALL: Final = re.compile(
    r"^nccl(?:AllReduce|AllGather|ReduceScatter|Broadcast|Bcast|Reduce|All[tT]oAll|Gather|Scatter)v?$"
)
_GROUP_START, _GROUP_END = "ncclGroupStart", "ncclGroupEnd"
# torch's own ranges: `nccl:all_to_all, op_id = 7`, `nccl:send 0->1`; not `nccl:coalesced`, which
# may be either.
_TORCH_RANGE: Final = re.compile(r"^nccl:(?!coalesced\b)(send\b|recv\b)?\w*")
_PEER_OPERATIONS: Final = (Operation.SEND, Operation.RECEIVE)

# Global ids hold the machine, the process and, in the low 24 bits, the thread.
_THREAD_BITS: Final = 24
_THREAD_MASK: Final = (1 << _THREAD_BITS) - 1
_KEPT_CALLS: Final = re.compile(r"Launch|Memcpy|Memset|Graph|Synchronize")


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One send, receive or collective as NCCL marked it: a row of the ranges."""

    row: int
    operation: Operation


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """Calls that NCCL launches together: a group, or one call alone."""

    thread: int
    start: int
    end: int
    calls: tuple[Call, ...]

    @property
    def kind(self) -> KernelKind:
        """A collective, one peer's send and/or receive, or a mix whose peers are not known."""
        counts = [sum(c.operation == o for c in self.calls) for o in _PEER_OPERATIONS]
        if self.calls and not any(counts):
            return KernelKind.COLLECTIVE
        if sum(counts) == len(self.calls) and self.calls and max(counts) == 1:
            return KernelKind.PEER
        return KernelKind.COMMUNICATION


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What is known of a process before its rows are looked at."""

    file: str
    key: int
    rows: NDArray[np.bool_]
    """Its rows of the file's device work."""
    header: Header
    thread_names: dict[int, str]
    file_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Local:
    """How this rank counts: its clock, its names, its threads."""

    base_ns: int
    names: I32
    """The index among this rank's names of each of the file's."""
    threads: I64

    def spans(self, spans: HostSpans) -> dict[str, NDArray[np.generic]]:
        """Return the columns that all host tables share."""
        return {
            "start_ns": spans.start + self.base_ns,
            "duration_ns": spans.end - spans.start,
            "name": self.names[spans.name],
            "thread": np.searchsorted(self.threads, spans.thread),
        }


def process_of(identity: I64) -> I64:
    """Return the process part of global process or thread ids."""
    return identity >> _THREAD_BITS


def read_process(part: Part, file: Tables, gaps: tuple[Gap, ...]) -> RankTrace:
    """Cut one process out of the whole file's rows and join them."""
    mine = replace(
        file,
        work=take(file.work, part.rows),
        calls=take(file.calls, process_of(file.calls.thread) == part.key),
        ranges=take(file.ranges, process_of(file.ranges.thread) == part.key),
    )
    unclosed = mine.ranges.end == MISSING_TIME
    kept_names = np.array([bool(_KEPT_CALLS.search(n)) for n in file.names], dtype=np.bool_)
    asked = replace(
        mine,
        calls=take(mine.calls, kept_names[mine.calls.name]),
        ranges=take(mine.ranges, ~unclosed),
    )
    kept = replace(
        asked,
        work=_in_order(asked.work),
        calls=_in_order(asked.calls),
        ranges=_in_order(asked.ranges),
    )
    gaps += _count_gaps(part, kept, int(np.sum(unclosed)), len(asked) - len(kept))
    return _join(part, kept, len(mine), gaps)


def _join(part: Part, tables: Tables, events: int, gaps: tuple[Gap, ...]) -> RankTrace:
    work, calls, ranges = tables.work, tables.calls, tables.ranges
    used = np.unique(np.concatenate((work.name, calls.name, ranges.name)))
    names = np.full(len(tables.names), UNKNOWN, dtype=np.int32)
    names[used] = np.arange(len(used), dtype=np.int32)
    threads = np.unique(np.concatenate((calls.thread, ranges.thread)))
    local = _Local(base_ns=part.header.base_time_ns, names=names, threads=threads)
    # Correlation 0 is nobody's.
    asked = np.where(work.correlation > 0, work.correlation, UNKNOWN)
    launch = join_launches(asked, calls.correlation)
    exchanges = _find_exchanges(ranges, tables.names)
    kind, exchange = _tell_kinds(tables, launch, exchanges)
    return RankTrace(
        file=part.file,
        format="nsight",
        header=part.header,
        names=tuple(tables.names[index] for index in used.tolist()),
        threads=tuple(
            Thread(identity=str(t & _THREAD_MASK), name=part.thread_names.get(t, ""))
            for t in threads.tolist()
        ),
        kernels=build(
            Kernels,
            len(work),
            start_ns=work.start + local.base_ns,
            duration_ns=work.end - work.start,
            name=local.names[work.name],
            kind=kind,
            device=fit_int32(work.device),
            stream=fit_int32(work.stream),
            correlation=work.correlation,
            graph=work.graph,
            launch=launch,
        ),
        launches=build(Launches, len(calls), correlation=calls.correlation, **local.spans(calls)),
        operators=_operators(ranges, local, exchanges, exchange, kind),
        annotations=build(Annotations, len(ranges), **local.spans(ranges)),
        memory=build(Memory, 0),
        cpu_operators=build(CpuOperators, 0),
        events=events,
        inflated_bytes=part.file_bytes,
        rank=part.header.rank,
        gaps=gaps,
    )


def _in_order(table: TimedType) -> TimedType:
    """Sort by start, without the rows whose times cannot be."""
    good = np.flatnonzero(plausible(table))
    return take(table, good[np.lexsort((table.end[good], table.start[good]))])


def _find_exchanges(ranges: HostSpans, names: tuple[str, ...]) -> tuple[Exchange, ...]:
    """Collect NCCL's calls, group by group, in the order of each thread."""
    marks = {*_CALLS, _GROUP_START, _GROUP_END}
    told = np.array([n in marks or bool(_COLLECTIVE_CALL.match(n)) for n in names], dtype=np.bool_)
    calls = np.flatnonzero(told[ranges.name])
    order = calls[np.lexsort((-ranges.end[calls], ranges.start[calls], ranges.thread[calls]))]
    found: list[Exchange] = []
    borders = np.flatnonzero(np.diff(ranges.thread[order])) + 1
    for rows in np.split(order, borders):
        found += _exchanges_of_thread(ranges, names, rows.tolist())
    return tuple(found)


def _exchanges_of_thread(
    ranges: HostSpans, names: tuple[str, ...], rows: list[int]
) -> list[Exchange]:
    found: list[Exchange] = []
    calls: list[Call] = []
    depth, group_start, inside_until = 0, 0, None
    for row in rows:
        name, start, end = names[ranges.name[row]], int(ranges.start[row]), int(ranges.end[row])
        if inside_until is not None and start < inside_until:
            continue  # NCCL's own calls inside a collective
        thread = int(ranges.thread[row])
        if name == _GROUP_START:
            if depth == 0:
                calls, group_start = [], start
            depth += 1
        elif name == _GROUP_END:
            depth -= 1
            if depth == 0:
                found.append(
                    Exchange(thread=thread, start=group_start, end=end, calls=tuple(calls))
                )
            depth = max(depth, 0)  # the capture began inside a group
        else:
            call = Call(row=row, operation=_CALLS.get(name, Operation.COLLECTIVE))
            inside_until = end
            if depth:
                calls.append(call)
            else:
                found.append(Exchange(thread=thread, start=start, end=end, calls=(call,)))
    return found


def _tell_kinds(tables: Tables, launch: I32, exchanges: tuple[Exchange, ...]) -> tuple[U8, I32]:
    """Return what each row is for, and the NCCL exchange that launched it; -1 for none."""
    kind = tables.work.kind.copy()
    exchange = np.full(len(kind), UNKNOWN, dtype=np.int32)
    communicates = tables.work.is_kernel & (kind >= FIRST_COMMUNICATION_KIND)
    asked = np.flatnonzero(communicates & (launch != UNKNOWN))
    thread = tables.calls.thread[launch[asked]]
    start = tables.calls.start[launch[asked]]
    exchange[asked] = find_enclosing(
        start,
        thread,
        np.array([e.start for e in exchanges], dtype=np.int64),
        np.array([e.end for e in exchanges], dtype=np.int64),
        np.array([e.thread for e in exchanges], dtype=np.int64),
    )
    told = np.array([e.kind for e in exchanges] + [KernelKind.COMMUNICATION], dtype=np.uint8)
    named = _name_kinds(tables.ranges, tables.names, thread, start)
    named = np.where(named == KernelKind.COMMUNICATION, told[exchange[asked]], named)
    kind[asked] = np.where(kind[asked] == KernelKind.COMMUNICATION, named, kind[asked])
    return kind, exchange


def _name_kinds(ranges: HostSpans, names: tuple[str, ...], thread: I64, start: I64) -> U8:
    """Return the kind of each launch as torch's range around it names it; else COMMUNICATION."""
    kinds = np.array([_torch_kind(name) for name in names], dtype=np.uint8)
    rows = np.flatnonzero(kinds[ranges.name] != KernelKind.COMMUNICATION)
    inside = find_enclosing(
        start, thread, ranges.start[rows], ranges.end[rows], ranges.thread[rows]
    )
    told = np.append(kinds[ranges.name[rows]], np.uint8(KernelKind.COMMUNICATION))
    return told[inside]


def _torch_kind(name: str) -> KernelKind:
    match = _TORCH_RANGE.match(name)
    if match is None:
        return KernelKind.COMMUNICATION
    return KernelKind.PEER if match[1] else KernelKind.COLLECTIVE


def _operators(
    ranges: HostSpans, local: _Local, exchanges: tuple[Exchange, ...], exchange: I32, kind: U8
) -> Operators:
    """Make NCCL's calls operators; each points to the first kernel that its exchange launched.

    The sends of an all-to-all are no sends: they do what the kernel does.
    """
    first_kernel = np.full(len(exchanges), UNKNOWN, dtype=np.int32)
    launched = np.flatnonzero(exchange != UNKNOWN)[::-1]
    first_kernel[exchange[launched]] = launched
    told = np.array([e.kind for e in exchanges], dtype=np.uint8)
    carried = first_kernel != UNKNOWN
    told[carried] = kind[first_kernel[carried]]
    # By row is by start: the ranges are sorted.
    calls = sorted(
        (call.row, call.operation, index)
        for index, together in enumerate(exchanges)
        for call in together.calls
    )
    rows, operations, groups = np.array(calls, dtype=np.int64).reshape(-1, 3).T
    operations = np.where(told[groups] == KernelKind.COLLECTIVE, Operation.COLLECTIVE, operations)
    operations = np.where(told[groups] == KernelKind.COMMUNICATION, Operation.OTHER, operations)
    return build(
        Operators,
        len(rows),
        operation=operations,
        kernel=first_kernel[groups],
        **local.spans(take(ranges, rows)),
    )


def _count_gaps(part: Part, kept: Tables, unclosed: int, bad_times: int) -> tuple[Gap, ...]:
    is_graph = np.array([name == GRAPH_NAME for name in kept.names], dtype=np.bool_)
    graphs = int(np.sum(is_graph[kept.work.name] & kept.work.is_kernel))
    told = {
        Code.OPEN_RANGES: (unclosed, "NVTX ranges without an end, left out", ""),
        Code.BAD_TIMES: (bad_times, "events that end before their start, left out", ""),
        Code.CLOSED_GRAPHS: (
            graphs,
            "CUDA graphs traced as a whole, so that communication inside counts as compute",
            "profile with `nsys profile --cuda-graph-trace=node`",
        ),
    }
    return tuple(
        Gap(
            code=code,
            message=f"{message}: {show_count(count)}",
            hint=hint,
            file=part.file,
            rank=part.header.rank,
        )
        for code, (count, message, hint) in told.items()
        if count
    )
