"""An Nsight Systems SQLite export in → its tables as columns.

Times are nanoseconds after the capture's start, ids are Nsight's own; `process.py` makes ranks of
them. Only strings that are asked for are read: those of an export also hold the job's output.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from dataclasses import dataclass, fields
from itertools import chain
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from debubble.errors import TraceError
from debubble.trace.columns import I32, I64, U8, UNKNOWN, KernelKind
from debubble.trace.communication import classify_kernel_name

STRINGS: Final = "StringIds"
KERNELS: Final = "CUPTI_ACTIVITY_KIND_KERNEL"
COPIES: Final = "CUPTI_ACTIVITY_KIND_MEMCPY"
MEMSETS: Final = "CUPTI_ACTIVITY_KIND_MEMSET"
GRAPHS: Final = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
CALLS: Final = "CUPTI_ACTIVITY_KIND_RUNTIME"
RANGES: Final = "NVTX_EVENTS"

# 126 years either way: beyond it a stamp is rubbish and its differences would overflow.
_LAST_TIME: Final = 4 * 10**18

_PUSH_POP_RANGE, _START_END_RANGE = 59, 60
_PEER_TO_PEER: Final = 10
GRAPH_NAME: Final = "CUDA graph"
_COPY_LABELS: Final = {
    1: "Host-to-Device",
    2: "Device-to-Host",
    8: "Device-to-Device",
    9: "Host-to-Host",
    _PEER_TO_PEER: "Peer-to-Peer",
}
# The upper half of a graph node's id is the id of its graph.
_NODE_BITS: Final = 32

# What SQLite gives for NULL times: no real time, and the sum of two never looks like one.
MISSING_TIME: Final = -(2**63)
# SQLite before 3.32 takes no more than 999 parameters in one statement.
_IDS_PER_QUERY: Final = 500


class Export:
    """An open export: which tables and columns it has, and their contents as arrays."""

    def __init__(self, connection: sqlite3.Connection, file: str) -> None:
        self._connection = connection
        self._file = file
        tables = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        self._columns: dict[str, frozenset[str]] = {}
        for (table,) in tables.fetchall():
            quoted = str(table).replace('"', '""')
            columns = connection.execute(f'PRAGMA table_info("{quoted}")').fetchall()
            self._columns[str(table)] = frozenset(str(column[1]) for column in columns)

    def has(self, table: str, *columns: str) -> bool:
        """Tell whether the export has the table, with all these columns."""
        return self._columns.get(table, frozenset()).issuperset(columns) and table in self._columns

    @property
    def tables(self) -> frozenset[str]:
        """The names of all tables."""
        return frozenset(self._columns)

    def integers(self, table: str, *columns: str) -> tuple[I64, ...]:
        """Read columns as int64, in row order; what is missing or NULL is -1, or MISSING_TIME."""
        asked = ", ".join(self._integer(table, column) for column in columns)
        values = np.fromiter(
            chain.from_iterable(self._connection.execute(f"SELECT {asked} FROM {table}")),  # noqa: S608  # our own names
            dtype=np.int64,
        )
        return tuple(np.ascontiguousarray(part) for part in values.reshape(-1, len(columns)).T)

    def texts(self, table: str, column: str) -> list[str]:
        """Read one column as text, in row order; what is missing or NULL is empty."""
        if not self.has(table, column):
            return [""] * self.count(table)
        query = f"SELECT CAST(COALESCE({column}, '') AS TEXT) FROM {table}"  # noqa: S608  # our own names
        return [text for (text,) in self._connection.execute(query)]

    def count(self, table: str) -> int:
        """Count the rows of a table; 0 where there is none."""
        if not self.has(table):
            return 0
        # An index is shorter to count, but where it is damaged it disagrees with its table.
        query = f"SELECT COUNT(*) FROM {table} NOT INDEXED"  # noqa: S608  # our own names
        (count,) = self._connection.execute(query).fetchone()
        return int(count)

    def rows(self, query: str, *values: object) -> list[tuple[object, ...]]:
        """Return the rows of a small query."""
        return self._connection.execute(query, values).fetchall()

    def strings(self, ids: Iterable[int]) -> dict[int, str]:
        """Look up the names of ids."""
        wanted = [int(identity) for identity in ids]
        found: dict[int, str] = {}
        for first in range(0, len(wanted), _IDS_PER_QUERY):
            part = wanted[first : first + _IDS_PER_QUERY]
            marks = ", ".join("?" * len(part))
            text = "CAST(COALESCE(value, '') AS TEXT)"
            query = f"SELECT id, {text} FROM {STRINGS} WHERE id IN ({marks})"  # noqa: S608  # our own names
            found.update(self._connection.execute(query, part).fetchall())
        return found

    def _integer(self, table: str, column: str) -> str:
        missing = str(MISSING_TIME) if column in {"start", "end"} else str(UNKNOWN)
        if column not in self._columns[table]:
            if column in {"start", "end"}:
                message = f"the export's table {table} has no column {column}"
                raise TraceError(message, file=self._file, hint="export it with a newer nsys")
            return missing
        return f'CAST(COALESCE("{column}", {missing}) AS INTEGER)'


class Names:
    """Names, each kept once; rows refer to them by index."""

    def __init__(self) -> None:
        self._index: dict[str, int] = {}

    def add(self, name: str) -> int:
        """Return the index of a name."""
        return self._index.setdefault(name, len(self._index))

    def look_up(self, ids: I64, export: Export) -> I32:
        """Return the indices of the names of Nsight's string ids."""
        unique, inverse = np.unique(ids, return_inverse=True)
        found = export.strings(unique.tolist())
        indices = [self.add(found.get(identity, "")) for identity in unique.tolist()]
        return np.array(indices, dtype=np.int32)[inverse.reshape(-1)]

    def all(self) -> tuple[str, ...]:
        """Return all names in the order of their indices."""
        return tuple(self._index)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedTable:
    """Rows with a start and an end."""

    start: I64
    end: I64

    def __len__(self) -> int:
        return len(self.start)


TimedType = TypeVar("TimedType", bound=TimedTable)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceWork(TimedTable):
    """Kernels, copies, memsets and whole graphs of all processes."""

    is_kernel: NDArray[np.bool_]
    process: I64
    device: I64
    stream: I64
    correlation: I64
    graph: I64
    name: I32
    kind: U8


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSpans(TimedTable):
    """CUDA calls or NVTX ranges of all threads."""

    thread: I64
    correlation: I64
    name: I32


@dataclass(frozen=True, slots=True, kw_only=True)
class Tables:
    """Everything that is kept of a file, or of one process in it."""

    work: DeviceWork
    calls: HostSpans
    ranges: HostSpans
    names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.work) + len(self.calls) + len(self.ranges)


def read_tables(export: Export) -> Tables:
    """Read the whole file."""
    names = Names()
    work = _read_device_work(export, names)
    calls = _read_calls(export, names)
    ranges = _read_ranges(export, names)
    return Tables(work=work, calls=calls, ranges=ranges, names=names.all())


def take(table: TimedType, rows: NDArray[np.bool_] | NDArray[np.intp]) -> TimedType:
    """Keep some rows of a table."""
    return type(table)(**{f.name: getattr(table, f.name)[rows] for f in fields(table)})


def plausible(table: TimedTable) -> NDArray[np.bool_]:
    """Tell which rows end at or after their start, at times that can be."""
    inside = (np.abs(table.start // 2) < _LAST_TIME // 2) & (
        np.abs(table.end // 2) < _LAST_TIME // 2
    )
    return inside & (table.end >= table.start)


def _read_device_work(export: Export, names: Names) -> DeviceWork:
    """Read everything that ran on a device."""
    parts = []
    if export.has(KERNELS):
        parts.append(_read_kernels(export, names))
    if export.has(GRAPHS):
        parts.append(_read_alike(export, GRAPHS, names.add(GRAPH_NAME), KernelKind.COMPUTE))
    if export.has(COPIES):
        parts.append(_read_copies(export, names))
    if export.has(MEMSETS):
        parts.append(_read_alike(export, MEMSETS, names.add("Memset"), KernelKind.MEMSET))
    joined = {f.name: np.concatenate([getattr(p, f.name) for p in parts]) for f in fields(parts[0])}
    return DeviceWork(**joined)


def _read_calls(export: Export, names: Names) -> HostSpans:
    """Read the CUDA calls of the host."""
    if not export.has(CALLS):
        return _no_spans()
    start, end, thread, correlation, name = export.integers(
        CALLS, "start", "end", "globalTid", "correlationId", "nameId"
    )
    return HostSpans(
        start=start,
        end=end,
        thread=thread,
        correlation=correlation,
        name=names.look_up(name, export),
    )


def _read_ranges(export: Export, names: Names) -> HostSpans:
    """Read the NVTX ranges, also those that were never closed; no marks, no domains."""
    if not export.has(RANGES):
        return _no_spans()
    start, end, kind, thread, text_id = export.integers(
        RANGES, "start", "end", "eventType", "globalTid", "textId"
    )
    texts = export.texts(RANGES, "text")
    by_id = names.look_up(text_id, export)
    own = np.fromiter((names.add(text) for text in texts), dtype=np.int32, count=len(texts))
    spans = HostSpans(
        start=start,
        end=end,
        thread=thread,
        correlation=np.full(len(start), UNKNOWN, dtype=np.int64),
        name=np.where(own == names.add(""), by_id, own),
    )
    return take(spans, np.isin(kind, (_PUSH_POP_RANGE, _START_END_RANGE)))


def _read_kernels(export: Export, names: Names) -> DeviceWork:
    column = next(
        (c for c in ("demangledName", "shortName", "mangledName") if export.has(KERNELS, c)),
        "demangledName",
    )
    (ids,) = export.integers(KERNELS, column)
    name = names.look_up(ids, export)
    all_names = names.all()
    kinds = np.zeros(len(all_names), dtype=np.uint8)
    for index in np.unique(name).tolist():
        kinds[index] = classify_kernel_name(all_names[index])
    return _device_work(export, KERNELS, name, kinds[name])


def _read_copies(export: Export, names: Names) -> DeviceWork:
    copy_kind, source, target = export.integers(COPIES, "copyKind", "srcDeviceId", "dstDeviceId")
    labels = dict(_COPY_LABELS)
    if export.has("ENUM_CUDA_MEMCPY_OPER", "id", "label"):
        (ids,) = export.integers("ENUM_CUDA_MEMCPY_OPER", "id")
        told = zip(ids.tolist(), export.texts("ENUM_CUDA_MEMCPY_OPER", "label"), strict=True)
        labels.update((key, label) for key, label in told if label)
    unique, inverse = np.unique(copy_kind, return_inverse=True)
    texts = [labels.get(kind, "Unknown") for kind in unique.tolist()]
    name = np.array([names.add(f"Memcpy {text}") for text in texts], dtype=np.int32)
    peer = np.array([text.startswith("Peer") for text in texts], dtype=np.bool_)
    between = (source >= 0) & (target >= 0) & (source != target)
    is_peer = peer[inverse.reshape(-1)] | between
    kind = np.where(is_peer, KernelKind.COMMUNICATION, KernelKind.COPY).astype(np.uint8)
    return _device_work(export, COPIES, name[inverse.reshape(-1)], kind)


def _read_alike(export: Export, table: str, name: int, kind: KernelKind) -> DeviceWork:
    """Read a table whose rows all have one name and one kind."""
    rows = export.count(table)
    names, kinds = np.full(rows, name, dtype=np.int32), np.full(rows, kind, dtype=np.uint8)
    return _device_work(export, table, names, kinds)


def _device_work(export: Export, table: str, name: I32, kind: U8) -> DeviceWork:
    start, end, process, device, stream, correlation, graph, node = export.integers(
        table,
        *("start", "end", "globalPid", "deviceId", "streamId", "correlationId"),
        *("graphId", "graphNodeId"),
    )
    graph = np.where(graph > 0, graph, np.where(node > 0, node >> _NODE_BITS, UNKNOWN))
    return DeviceWork(
        start=start,
        end=end,
        is_kernel=np.full(len(start), table in {KERNELS, GRAPHS}),
        process=process,
        device=device,
        stream=stream,
        correlation=correlation,
        graph=graph,
        name=name,
        kind=kind,
    )


def _no_spans() -> HostSpans:
    none = np.zeros(0, dtype=np.int64)
    return HostSpans(
        start=none, end=none, thread=none, correlation=none, name=none.astype(np.int32)
    )
