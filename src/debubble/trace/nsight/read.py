"""Nsight Systems exports (`nsys export --type sqlite`): one `RankTrace` per process with kernels.

One file may hold all ranks of a node. Its tables are read once, then cut by process. A `SendRecv`
kernel is a pipeline's transfer or an all-to-all; only the calls that led to its launch tell, by the
ranges that NCCL marks them with. NCCL launches inside the call, or inside the `ncclGroupEnd` that
closes a group of calls:

    ├ ncclGroupStart ┤ ├ ncclSend ┤ ├ ncclRecv ┤ ├ ncclGroupEnd ── cudaLaunch ┤  one peer
    ├ ncclGroupStart ┤ ├ ncclSend ┤ ├ ncclSend ┤ … ├ ncclGroupEnd ─ cudaLaunch ┤  unknown
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from debubble.errors import Code, Gap, NotATrace, TraceError
from debubble.trace.columns import (
    FIRST_COMMUNICATION_KIND,
    I32,
    LAST_NS,
    U8,
    UNKNOWN,
    Annotations,
    CpuOperators,
    Device,
    Header,
    Interner,
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
from debubble.trace.communication import (
    classify_kernel_name,
    find_enclosing,
    join_launches,
    queues_or_waits,
)
from debubble.trace.nsight.export import MISSING_TIME, Export
from debubble.units import show_count

KERNELS, GRAPHS = "CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
COPIES, MEMSETS = "CUPTI_ACTIVITY_KIND_MEMCPY", "CUPTI_ACTIVITY_KIND_MEMSET"
CALLS, RANGES = "CUPTI_ACTIVITY_KIND_RUNTIME", "NVTX_EVENTS"

_EXPORT_HINT = (
    "export the report with `nsys export --type sqlite report.nsys-rep` and give that file"
)
# Any of these beside StringIds makes a database an export, whatever was traced.
_MARKS = re.compile(r"^(?:CUPTI_ACTIVITY_KIND_|NVTX_EVENTS$|TARGET_INFO_|META_DATA_CAPTURE$)")
_RANK = re.compile(r'^RANK="?(\d{1,6})"?$')
_CALLS = {"ncclSend": Operation.SEND, "ncclRecv": Operation.RECEIVE}
_COLLECTIVE_CALL = re.compile(
    r"^nccl(?:AllReduce|AllGather|ReduceScatter|Broadcast|Bcast|Reduce|All[tT]oAll|Gather|Scatter)v?$"
)
_GROUP_START, _GROUP_END = "ncclGroupStart", "ncclGroupEnd"
# torch's own ranges: `nccl:all_to_all, op_id = 7`, `nccl:send 0->1`; not `nccl:coalesced`, which
# may be either.
_TORCH_RANGE = re.compile(r"^nccl:(?!coalesced\b)(send\b|recv\b)?\w*")
_PUSH_POP_RANGE, _START_END_RANGE = 59, 60
_PEER_COPY = 10
_COPY_LABELS = {
    1: "Host-to-Device",
    2: "Device-to-Host",
    8: "Device-to-Device",
    9: "Host-to-Host",
    _PEER_COPY: "Peer-to-Peer",
}
_GRAPH_NAME = "CUDA graph"

# Global ids hold the machine, the process and, in the low 24 bits, the thread; the upper half of a
# graph node's id is the id of its graph.
_THREAD_BITS, _NODE_BITS = 24, 32
_LOW_BITS = (1 << _THREAD_BITS) - 1
# No name is so long; a text of a broken file may be a gigabyte.
_LONGEST_VALUE = 16 * 1024 * 1024
# Columns of a table, by name; all have a `start` and an `end`, in nanoseconds of the capture.
Columns = dict[str, NDArray[Any]]


class Tables(NamedTuple):
    """All that is kept of a file, or of one process in it."""

    work: Columns
    """Kernels, whole graphs, copies and memsets."""
    calls: Columns
    ranges: Columns

    @property
    def events(self) -> int:
        """Rows of all tables."""
        return sum(len(rows["start"]) for rows in self)


def read_nsight(path: str) -> tuple[RankTrace, ...]:
    """Read an export on this machine's disk; nothing is written, neither to it nor beside it."""
    uri = f"{Path(path).absolute().as_uri()}?mode=ro&immutable=1"
    try:
        with closing(sqlite3.connect(uri, uri=True)) as connection:
            connection.text_factory = lambda raw: raw.decode("utf-8", "replace")
            connection.execute("PRAGMA trusted_schema = OFF")
            connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _LONGEST_VALUE)
            return tuple(_read_processes(Export(connection, path), path))
    except (sqlite3.Error, UnicodeDecodeError) as error:  # its messages may quote broken names
        message = f"the database cannot be read: {error}"
        raise TraceError(message, file=path, hint=f"{_EXPORT_HINT} again") from error


def _read_processes(export: Export, path: str) -> Iterator[RankTrace]:
    if not export.has("StringIds", "id", "value") or not any(map(_MARKS.match, export.columns)):
        message = "a SQLite database, but no export of Nsight Systems"
        raise NotATrace(message, file=path, hint=_EXPORT_HINT)
    if not export.count(KERNELS) and not export.count(GRAPHS):
        hint = "profile with `nsys profile -t cuda,nvtx`"
        raise TraceError("the export holds no CUDA kernels", file=path, hint=hint)
    names: Interner[str] = Interner()
    tables = Tables(
        work=_read_work(export, names),
        calls=_read_calls(export, names),
        ranges=_read_ranges(export, names),
    )
    devices_of = _devices_of_processes(export, tables.work)
    gaps = []
    ranks: list[int | None] = list(range(len(devices_of)))
    if len(devices_of) == 1:
        # RANK alone is read of the recorded environment: it holds secrets.
        told = export.values("META_DATA_CAPTURE", "PROCESS_*:ENVIRONMENT_VARIABLE", "RANK=*")
        found = {match[1] for value in told if (match := _RANK.match(value))}
        ranks = [int(found.pop()) if len(found) == 1 else None]
    else:
        who = ", ".join(
            f"process {key & _LOW_BITS} (device {min(devices)}) is rank {rank}"
            for rank, (key, devices) in enumerate(devices_of.items())
        )
        message = f"the export does not tell the ranks of its processes; by device: {who}"
        hint = "profile each rank into a file of its own: `nsys profile -o report_rank%q{RANK}`"
        gaps.append(Gap(code=Code.RANK_ASSUMED, message=message, file=path, hint=hint))
    # In UTC: what joins the clocks of several files.
    epochs = export.integers("TARGET_INFO_SESSION_START_TIME", "utcEpochNs")[0]
    base_ns = int(epochs[0]) if len(epochs) and 0 < epochs[0] < LAST_NS else 0
    if not base_ns:
        message = "the export does not say when the capture began: its times start at zero"
        hint = "export with a newer nsys"
        gaps.append(Gap(code=Code.NO_CLOCK, message=message, file=path, hint=hint))
    threads = _read_thread_names(export)
    versions = export.values("META_DATA_EXPORT", "EXPORT_PRODUCT_VERSION")[:1]
    for rank, (key, devices) in zip(ranks, devices_of.items(), strict=True):
        header = Header(
            rank=rank,
            devices=tuple(replace(device, index=index) for index, device in devices.items()),
            host="".join(export.values("TARGET_INFO_SYSTEM_ENV", "Hostname")[:1]),
            base_time_ns=base_ns,
            versions=tuple(("nsight", version) for version in versions),
        )
        process = Tables(
            work=_take(tables.work, tables.work["process"] == key),
            calls=_take(tables.calls, tables.calls["thread"] >> _THREAD_BITS == key),
            ranges=_take(tables.ranges, tables.ranges["thread"] >> _THREAD_BITS == key),
        )
        trace = _read_process(path, process, header, names.all(), threads)
        yield replace(trace, gaps=(*gaps, *trace.gaps))
        gaps = []  # what concerns the whole file is said once


def _read_work(export: Export, names: Interner[str]) -> Columns:
    """Read everything that ran on a device."""
    columns = ("start", "end", "globalPid", "deviceId", "streamId", "correlationId")
    parts = []
    for table in (KERNELS, GRAPHS, COPIES, MEMSETS):
        start, end, process, device, stream, correlation, graph, node = export.integers(
            table, *columns, "graphId", "graphNodeId"
        )
        if table == KERNELS and len(start):
            spellings = ("demangledName", "shortName", "mangledName")
            column = next((c for c in spellings if export.has(table, c)), spellings[0])
            name = _look_up(export, names, table, column)
        elif table == COPIES and len(start):
            name = _name_copies(export, names)
        else:
            name = np.full(len(start), names[_GRAPH_NAME if table == GRAPHS else "Memset"])
        parts.append(
            {
                "start": start,
                "end": end,
                "is_kernel": np.full(len(start), table in {KERNELS, GRAPHS}),
                "process": process >> _THREAD_BITS,
                "device": device,
                "stream": stream,
                "correlation": correlation,
                "graph": np.where(
                    graph > 0, graph, np.where(node > 0, node >> _NODE_BITS, UNKNOWN)
                ),
                "name": name,
            }
        )
    return {column: np.concatenate([part[column] for part in parts]) for column in parts[0]}


def _name_copies(export: Export, names: Interner[str]) -> I32:
    """Name copies by their kind; between devices they are a peer's."""
    copied, source, target = export.integers(COPIES, "copyKind", "srcDeviceId", "dstDeviceId")
    between = (source >= 0) & (target >= 0) & (source != target)
    copied = np.where(between, _PEER_COPY, copied)
    name = {
        kind: names[f"Memcpy {_COPY_LABELS.get(kind, 'Unknown')}"] for kind in set(copied.tolist())
    }
    return np.array([name[kind] for kind in copied.tolist()], dtype=np.int32)


def _read_calls(export: Export, names: Interner[str]) -> Columns:
    """Read the CUDA calls of the host."""
    columns = export.integers(CALLS, "start", "end", "globalTid", "correlationId")
    rows = dict(zip(("start", "end", "thread", "correlation"), columns, strict=True))
    return rows | {"name": _look_up(export, names, CALLS, "nameId")}


def _read_ranges(export: Export, names: Interner[str]) -> Columns:
    """Read the NVTX ranges, also those that were never closed; no marks, no domains."""
    start, end, kind, thread = export.integers(RANGES, "start", "end", "eventType", "globalTid")
    inline = np.array([names[text] for text in export.texts(RANGES, "text")], dtype=np.int32)
    name = np.where(inline == names[""], _look_up(export, names, RANGES, "textId"), inline)
    ranges = {"start": start, "end": end, "thread": thread, "name": name}
    return _take(ranges, np.isin(kind, (_PUSH_POP_RANGE, _START_END_RANGE)))


def _look_up(export: Export, names: Interner[str], table: str, column: str) -> I32:
    """Return the numbers of the names that a column of string ids means."""
    texts = export.strings(table, column)
    ids, row = np.unique(export.integers(table, column)[0], return_inverse=True)
    numbers = [names[texts.get(identity, "")] for identity in ids.tolist()]
    return np.array(numbers, dtype=np.int32)[row.reshape(-1)]


def _devices_of_processes(export: Export, work: Columns) -> dict[int, dict[int, Device]]:
    """Return the devices of each process with kernels, by index as it counts them.

    In order of their first devices as the host counts them, then of the processes.
    """
    used = set(zip(work["process"].tolist(), work["device"].tolist(), strict=True))
    kernels = set(work["process"][work["is_kernel"]].tolist())
    ids, memory, multiprocessors = export.integers(
        "TARGET_INFO_GPU", "id", "totalMemory", "smCount"
    )
    labels = export.texts("TARGET_INFO_GPU", "name")
    described = {
        index: Device(
            index=index,
            name=name,
            memory_bytes=size if size > 0 else None,
            multiprocessors=count if count > 0 else None,
        )
        for index, size, count, name in zip(
            ids.tolist(), memory.tolist(), multiprocessors.tolist(), labels, strict=True
        )
    }
    gpus, cudas, pids = export.integers("TARGET_INFO_CUDA_DEVICE", "gpuId", "cudaId", "pid")
    host_index = {
        (pid, cuda): gpu
        for gpu, cuda, pid in zip(gpus.tolist(), cudas.tolist(), pids.tolist(), strict=True)
    }
    devices: dict[int, dict[int, Device]] = {}
    for key, index in sorted(used):
        if key in kernels:
            on_host = host_index.get((key & _LOW_BITS, index), index)
            device = described.get(on_host, Device(index=on_host, name=""))
            devices.setdefault(key, {})[index] = device
    by_device = sorted(devices, key=lambda key: (next(iter(devices[key].values())).index, key))
    return {key: devices[key] for key in by_device}


def _read_thread_names(export: Export) -> dict[int, str]:
    """Read the names of threads by global id; the strongest where one has several."""
    ids, priority, thread = export.integers("ThreadNames", "nameId", "priority", "globalTid")
    texts = export.strings("ThreadNames", "nameId")
    order = np.argsort(priority, kind="stable")
    return {int(thread[row]): texts.get(int(ids[row]), "") for row in order.tolist()}


def _take(rows: Columns, wanted: NDArray[np.bool_] | NDArray[np.intp]) -> Columns:
    return {column: values[wanted] for column, values in rows.items()}


def _in_order(rows: Columns) -> Columns:
    """Sort by start, without the rows whose times cannot be."""
    start, end = rows["start"], rows["end"]
    good = np.flatnonzero((start > -LAST_NS) & (start < LAST_NS) & (end >= start) & (end < LAST_NS))
    return _take(rows, good[np.lexsort((end[good], start[good]))])


def _read_process(
    path: str,
    tables: Tables,
    header: Header,
    names: Sequence[str],
    thread_names: Mapping[int, str],
) -> RankTrace:
    """Sort and join the rows of one process."""
    queues = np.array([queues_or_waits(name) for name in names], dtype=bool)
    closed = tables.ranges["end"] != MISSING_TIME
    timed = Tables(
        work=tables.work,
        calls=_take(tables.calls, queues[tables.calls["name"]]),
        ranges=_take(tables.ranges, closed),
    )
    work, calls, ranges = ordered = Tables(*map(_in_order, timed))
    used = _renumber("name", *ordered)
    threads = _renumber("thread", calls, ranges)
    rank_names = tuple(names[index] for index in used)
    # Correlation 0 is nobody's.
    correlation = np.where(work["correlation"] > 0, work["correlation"], UNKNOWN)
    launch = join_launches(correlation, calls["correlation"])
    exchanged = _find_exchanges(ranges, rank_names)
    kind, exchange = _tell_kinds(ordered, launch, exchanged[0], rank_names)
    base_ns = header.base_time_ns
    counts = {
        Code.OPEN_RANGES: (int(np.sum(~closed)), "NVTX ranges without an end, left out", ""),
        Code.BAD_TIMES: (
            timed.events - ordered.events,
            "events that end before their start, left out",
            "",
        ),
        Code.CLOSED_GRAPHS: (
            sum(rank_names[name] == _GRAPH_NAME for name in work["name"].tolist()),
            "CUDA graphs traced as a whole, so that communication inside counts as compute",
            "profile with `nsys profile --cuda-graph-trace=node`",
        ),
    }
    return RankTrace(
        file=path,
        format="nsight",
        header=header,
        names=rank_names,
        threads=tuple(
            Thread(identity=str(thread & _LOW_BITS), name=thread_names.get(thread, ""))
            for thread in threads
        ),
        kernels=build(
            Kernels,
            len(kind),
            **_spans(work, base_ns),
            kind=kind,
            device=fit_int32(work["device"]),
            stream=fit_int32(work["stream"]),
            correlation=work["correlation"],
            graph=work["graph"],
            launch=launch,
        ),
        launches=build(
            Launches,
            len(calls["start"]),
            **_spans(calls, base_ns),
            thread=calls["thread"],
            correlation=calls["correlation"],
        ),
        operators=_operators(ranges, base_ns, exchanged, exchange, kind),
        annotations=build(
            Annotations,
            len(ranges["start"]),
            **_spans(ranges, base_ns),
            thread=ranges["thread"],
        ),
        memory=build(Memory, 0),
        cpu_operators=build(CpuOperators, 0),
        events=tables.events,
        inflated_bytes=Path(path).stat().st_size,
        rank=header.rank,
        gaps=tuple(
            Gap(
                code=code,
                message=f"{message}: {show_count(count)}",
                hint=hint,
                file=path,
                rank=header.rank,
            )
            for code, (count, message, hint) in counts.items()
            if count
        ),
    )


def _renumber(column: str, *tables: Columns) -> list[int]:
    """Count the values of a column from 0 in all tables; return them, by number."""
    values = np.unique(np.concatenate([rows[column] for rows in tables]))
    for rows in tables:
        rows[column] = np.searchsorted(values, rows[column])
    return [int(value) for value in values]


def _spans(rows: Columns, base_ns: int) -> Columns:
    """Return the columns that all tables share."""
    start_ns = rows["start"] + base_ns
    return {"start_ns": start_ns, "duration_ns": rows["end"] - rows["start"], "name": rows["name"]}


def _find_exchanges(ranges: Columns, names: Sequence[str]) -> tuple[Columns, Columns]:
    """Return what NCCL launches together, a group of calls or one alone, and all the calls.

    Of a call, `row` is its range and `exchange` what it is of, in the order of the ranges.
    """
    marks = {*_CALLS, _GROUP_START, _GROUP_END}
    marked = np.array([n in marks or bool(_COLLECTIVE_CALL.match(n)) for n in names], dtype=bool)
    rows = np.flatnonzero(marked[ranges["name"]])
    start, end, thread = (ranges[column][rows] for column in ("start", "end", "thread"))
    exchanges: list[tuple[int, int, int, KernelKind]] = []
    calls: list[tuple[int, Operation, int]] = []
    group: list[tuple[int, Operation]] = []
    caller, depth, group_start, inside_until = UNKNOWN, 0, 0, None
    for at in np.lexsort((-end, start, thread)).tolist():
        row, begins, ends = int(rows[at]), int(start[at]), int(end[at])
        if thread[at] != caller:
            caller, depth, inside_until = int(thread[at]), 0, None
        name = names[ranges["name"][row]]
        if inside_until is not None and begins < inside_until:
            continue  # NCCL's own calls inside a collective
        if name == _GROUP_START:
            if depth == 0:
                group, group_start = [], begins
            depth += 1
            continue
        if name == _GROUP_END:
            depth -= 1
        else:
            inside_until = ends
            group = group if depth else []
            group_start = group_start if depth else begins
            group.append((row, _CALLS.get(name, Operation.COLLECTIVE)))
        if depth == 0:
            calls += [(call, operation, len(exchanges)) for call, operation in group]
            exchanges.append((group_start, ends, caller, _exchanged([o for _, o in group])))
        depth = max(depth, 0)  # the capture may have begun inside a group
    return _columns(exchanges, "start", "end", "thread", "kind"), _columns(
        sorted(calls), "row", "operation", "exchange"
    )


def _columns(rows: Sequence[tuple[int, ...]], *names: str) -> Columns:
    table = np.array(rows, dtype=np.int64).reshape(-1, len(names))
    return dict(zip(names, table.T, strict=True))


def _exchanged(operations: Sequence[Operation]) -> KernelKind:
    """Tell a collective, one peer's send and/or receive, or a mix whose peers are not known."""
    if set(operations) == {Operation.COLLECTIVE}:
        return KernelKind.COLLECTIVE
    alone = len(set(operations)) == len(operations) > 0
    peer = alone and Operation.COLLECTIVE not in operations
    return KernelKind.PEER if peer else KernelKind.COMMUNICATION


def _tell_kinds(
    tables: Tables, launch: I32, exchanges: Columns, names: Sequence[str]
) -> tuple[U8, I32]:
    """Return what each row is for, and the NCCL exchange that launched it; -1 for none.

    What a name leaves open torch's range around the launch tells, else the exchange.
    """
    work, calls, ranges = tables
    kind = np.array([classify_kernel_name(name) for name in names], dtype=np.uint8)[work["name"]]
    exchange = np.full(len(kind), UNKNOWN, dtype=np.int32)
    launched = np.flatnonzero((kind >= FIRST_COMMUNICATION_KIND) & (launch != UNKNOWN))
    called = [calls[column][launch[launched]] for column in ("start", "thread")]
    bounds = ("start", "end", "thread")
    exchange[launched] = find_enclosing(*called, *(exchanges[column] for column in bounds))
    torch_kind = np.array([_torch_kind(name) for name in names], dtype=np.uint8)[ranges["name"]]
    rows = np.flatnonzero(torch_kind != KernelKind.COMMUNICATION)
    inside = find_enclosing(*called, *(ranges[column][rows] for column in bounds))
    by_range = np.append(torch_kind[rows], KernelKind.COMMUNICATION)[inside]
    by_exchange = np.append(exchanges["kind"], KernelKind.COMMUNICATION)[exchange[launched]]
    for told in (by_range, by_exchange):
        is_open = kind[launched] == KernelKind.COMMUNICATION
        kind[launched] = np.where(is_open, told, kind[launched])
    return kind, exchange


def _torch_kind(name: str) -> KernelKind:
    match = _TORCH_RANGE.match(name)
    if match is None:
        return KernelKind.COMMUNICATION
    return KernelKind.PEER if match[1] else KernelKind.COLLECTIVE


def _operators(
    ranges: Columns, base_ns: int, exchanged: tuple[Columns, Columns], exchange: I32, kind: U8
) -> Operators:
    """Make NCCL's calls operators; each points to the first kernel that its exchange launched.

    The sends of an all-to-all are no sends: they do what the kernel does.
    """
    exchanges, calls = exchanged
    first_kernel = np.full(len(exchanges["kind"]), UNKNOWN, dtype=np.int32)
    launched = np.flatnonzero(exchange != UNKNOWN)[::-1]
    first_kernel[exchange[launched]] = launched
    does = np.where(first_kernel < 0, exchanges["kind"], np.append(kind, 0)[first_kernel])
    does = does[calls["exchange"]]
    operation = np.where(does == KernelKind.COLLECTIVE, Operation.COLLECTIVE, calls["operation"])
    called = _take(ranges, calls["row"])
    return build(
        Operators,
        len(does),
        **_spans(called, base_ns),
        thread=called["thread"],
        operation=np.where(does == KernelKind.COMMUNICATION, Operation.OTHER, operation),
        kernel=first_kernel[calls["exchange"]],
    )
