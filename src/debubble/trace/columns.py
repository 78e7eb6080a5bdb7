"""The columns that every format becomes, and the figures of `inspect`.

Nothing here knows of pipelines. A row of a table is an index into its arrays; `name`, `thread` and
`group` are indices into the tuples of `RankTrace`; -1 means "not known".
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, fields, replace
from enum import IntEnum
from typing import Any, Self, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from debubble.errors import Code, Gap
from debubble.trace.sidecar import Sidecar
from debubble.units import NS_PER_S

I64 = NDArray[np.int64]
I32 = NDArray[np.int32]
U8 = NDArray[np.uint8]

UNKNOWN = -1
# Ten times the largest clusters there are: ranks beyond are damage, and all missing ones are named.
MOST_RANKS = 2**20
# The year 2096. A base and a start of so much, and a duration of a quarter, stay inside 64 bits.
LAST_NS = 4 * 10**18


class KernelKind(IntEnum):
    """What a piece of device work is for. From PEER up it is communication, never busy time."""

    COMPUTE = 0
    COPY = 1
    MEMSET = 2
    PEER = 3
    """Point to point: sends and receives, alone or fused."""
    COLLECTIVE = 4
    COMMUNICATION = 5
    """Communication, but the trace does not tell whether point to point or collective."""


FIRST_COMMUNICATION_KIND = KernelKind.PEER


class Operation(IntEnum):
    """What a communication operator does."""

    OTHER = 0
    SEND = 1
    RECEIVE = 2
    COLLECTIVE = 3
    WAIT = 4
    BARRIER = 5


class MemoryDevice(IntEnum):
    """Whose memory an allocation event counts."""

    CPU = 0
    DEVICE = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Arrays of one length, sorted by start."""

    start_ns: I64

    def __len__(self) -> int:
        return len(self.start_ns)

    def take(self, rows: NDArray[np.bool_] | NDArray[np.intp]) -> Self:
        """Return some of the rows."""
        return replace(self, **{c.name: getattr(self, c.name)[rows] for c in fields(self)})


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels(Table):
    """Device kernels, copies and memsets."""

    duration_ns: I64
    name: I32
    kind: U8
    device: I32
    stream: I32
    correlation: I64
    graph: I64
    """Identity of the CUDA graph the kernel belongs to, where the trace says so."""
    launch: I32
    """Row in `launches` of the call that queued it. Kernels of one graph launch share a row."""

    @property
    def communication(self) -> NDArray[np.bool_]:
        """True where a row is communication of any kind."""
        return self.kind >= FIRST_COMMUNICATION_KIND


@dataclass(frozen=True, slots=True, kw_only=True)
class Launches(Table):
    """Host calls that queue device work or wait for it."""

    duration_ns: I64
    name: I32
    thread: I32
    correlation: I64


@dataclass(frozen=True, slots=True, kw_only=True)
class Operators(Table):
    """Communication operators: the host side of sends, receives and collectives."""

    duration_ns: I64
    name: I32
    thread: I32
    operation: U8
    local_peer: I32
    """The other side of a send or receive, counted inside its process group."""
    peer: I32
    """The same as a global rank, where the group is known."""
    group: I32
    elements: I64
    message_bytes: I64
    dtype: I32
    shape: I32
    """Of a message's tensor, as a name such as `1024x1x4096`."""
    tag: I32
    kernel: I32
    """Row in `kernels` that carried it out. A fused exchange: several operators, one kernel."""

    @property
    def addressed(self) -> NDArray[np.bool_]:
        """True where the other side is known, as a global rank or inside its group."""
        return (self.peer >= 0) | (self.local_peer >= 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Annotations(Table):
    """`record_function` and NVTX ranges, of the host (thread) or mirrored on a device (stream)."""

    duration_ns: I64
    name: I32
    thread: I32
    stream: I32
    """The stream of a device annotation; -1 for a host annotation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory(Table):
    """The allocator after each allocation (positive) or release (negative)."""

    device_type: U8
    device: I32
    change_bytes: I64
    allocated_bytes: I64
    reserved_bytes: I64


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuOperators(Table):
    """The outermost operators of each thread; only kept where no device work was traced."""

    duration_ns: I64
    name: I32
    thread: I32


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A process group and its members as global ranks, in group order."""

    name: str
    description: str = ""
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """An accelerator as the trace describes it."""

    index: int
    name: str
    memory_bytes: int | None = None
    multiprocessors: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Thread:
    """A host thread that launched work or was annotated."""

    identity: str
    name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What the file says about itself."""

    rank: int | None = None
    world_size: int | None = None
    backend: str = ""
    groups: tuple[Group, ...] = ()
    devices: tuple[Device, ...] = ()
    host: str = ""
    base_time_ns: int = 0
    record_shapes: bool | None = None
    profile_memory: bool | None = None
    with_stack: bool | None = None
    versions: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTrace:
    """One rank's trace, reduced to what the product uses."""

    file: str
    format: str
    header: Header
    names: tuple[str, ...]
    threads: tuple[Thread, ...]
    groups: tuple[Group, ...] = ()
    """The header's process groups and those that only operators name."""
    kernels: Kernels
    launches: Launches
    operators: Operators
    annotations: Annotations
    memory: Memory
    cpu_operators: CpuOperators
    events: int
    """Events in the file, kept or not."""
    inflated_bytes: int
    rank: int | None = None
    """From the header, else the file name; None until one of them told."""
    gaps: tuple[Gap, ...] = ()
    sidecar: Sidecar | None = None
    """What the job said of itself beside the trace."""

    @property
    def tables(self) -> tuple[Table, ...]:
        """All tables."""
        return tuple(getattr(self, name) for name in TABLES)

    def kept_bytes(self) -> int:
        """Return the memory that all columns take."""
        columns = [
            getattr(table, name) for table in self.tables for name in column_types(type(table))
        ]
        return sum(column.nbytes for column in columns)


TABLES: dict[str, type[Table]] = {
    "kernels": Kernels,
    "launches": Launches,
    "operators": Operators,
    "annotations": Annotations,
    "memory": Memory,
    "cpu_operators": CpuOperators,
}
_COLUMN_TYPES: dict[str, type[np.integer[Any]]] = {
    "I64": np.int64,
    "I32": np.int32,
    "U8": np.uint8,
}

TableType = TypeVar("TableType", bound=Table)
Name = TypeVar("Name", bound=Hashable)


def column_types(table: type[Any]) -> dict[str, type[np.integer[Any]]]:
    """Return the columns of a table and what each is made of."""
    known = {column.name: _COLUMN_TYPES.get(str(column.type)) for column in fields(table)}
    return {column: kind for column, kind in known.items() if kind is not None}


def build(table: type[TableType], rows: int, /, **columns: object) -> TableType:
    """Make a table of `rows` rows; columns not given are -1 (0 for unsigned ones)."""
    made = {}
    for column, dtype in column_types(table).items():
        given = columns.pop(column, None)
        if given is None:
            given = np.full(rows, 0 if dtype is np.uint8 else UNKNOWN, dtype=dtype)
        made[column] = np.asarray(given, dtype=dtype)
    if columns:
        unknown = ", ".join(sorted(columns))
        message = f"{table.__name__} has no column {unknown}"
        raise TypeError(message)
    return table(**made)


class Interner(dict[Name, int]):
    """`interner[name]` is the name's number; new names get the next one."""

    def __missing__(self, name: Name) -> int:
        number = self[name] = len(self)
        return number

    def all(self) -> tuple[Name, ...]:
        """Return all names, by number."""
        return tuple(self)


def fit_int32(values: NDArray[np.generic]) -> I32:
    """Fit numbers of strangers into 32 bits; what does not fit is unknown."""
    wide = values.astype(np.int64, copy=False)
    fits = (wide >= UNKNOWN) & (wide <= np.iinfo(np.int32).max)
    return np.where(fits, wide, UNKNOWN).astype(np.int32)


_COMMUNICATION_PREFIX = "c10d::"
STEP = re.compile(r"^ProfilerStep#(\d{1,9})$")


class RankSummary(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank's trace holds."""

    rank: int
    file: str
    format: str
    device: str
    steps: tuple[int, ...]
    events: int
    kernels: int
    communication_kernels: int
    unjoined_kernels: int
    """Kernels whose launch is not in the trace: they cannot be given to a step."""
    span_s: float | None
    busy_fraction: float | None
    sends: int
    receives: int
    collectives: int
    sent_bytes: int | None
    """None where the trace does not tell sizes: `record_shapes` was off."""
    peers: tuple[int, ...]
    peak_memory_bytes: int | None


def summarise(trace: RankTrace) -> RankSummary:
    """Count what is in a trace."""
    span = device_span(trace)
    span_ns = 0 if span is None else span[1] - span[0]
    starts, ends = busy_intervals(trace)
    operators = trace.operators
    sent = operators.message_bytes[operators.operation == Operation.SEND]
    return RankSummary(
        rank=trace.rank if trace.rank is not None else -1,
        file=trace.file,
        format=trace.format,
        device=_device(trace),
        steps=steps_of(trace),
        events=trace.events,
        kernels=len(trace.kernels),
        communication_kernels=int(trace.kernels.communication.sum()),
        unjoined_kernels=int((trace.kernels.launch < 0).sum()),
        span_s=None if span is None else span_ns / NS_PER_S,
        busy_fraction=None
        if device_unread(trace) or not span_ns
        else int((ends - starts).sum()) / span_ns,
        sends=len(sent),
        receives=int((operators.operation == Operation.RECEIVE).sum()),
        collectives=int((operators.operation == Operation.COLLECTIVE).sum()),
        sent_bytes=None if (sent < 0).any() else int(sent.sum()),
        peers=tuple(np.unique(operators.peer[operators.peer >= 0]).tolist()),
        peak_memory_bytes=peak_memory(trace),
    )


def device_unread(trace: RankTrace) -> bool:
    """Tell a trace whose device is known to have worked, and of whose work nothing was read."""
    unread = {Code.FOREIGN_DEVICE, Code.NO_KERNELS, Code.NOT_UNDERSTOOD}
    return any(gap.code in unread for gap in trace.gaps)


def steps_of(trace: RankTrace) -> tuple[int, ...]:
    """Return the numbers of the profiler's steps, as the host saw them."""
    host = trace.annotations.name[trace.annotations.stream < 0]
    found = (STEP.match(trace.names[name]) for name in np.unique(host).tolist())
    return tuple(sorted({int(step[1]) for step in found if step}))


def _device(trace: RankTrace) -> str:
    used = set(np.unique(trace.kernels.device).tolist())
    names = {device.name for device in trace.header.devices if device.index in used and device.name}
    if names:
        return ", ".join(sorted(names))
    if device_unread(trace):
        return "not read"
    return "unknown device" if used else "CPU"


def peak_memory(trace: RankTrace) -> int | None:
    """Return the most bytes allocated on a device; totals of the CPU are relative, so no peak."""
    on_device = trace.memory.device_type == MemoryDevice.DEVICE
    allocated = trace.memory.allocated_bytes[on_device]
    return int(allocated.max()) if len(allocated) and allocated.max() >= 0 else None


def busy_intervals(trace: RankTrace) -> tuple[I64, I64]:
    """Return starts and ends of disjoint stretches in which the rank computed.

    On a device: kernels, copies and memsets that are not communication. Without device work:
    operators of the CPU that are not communication. Annotations never count: they include waits.
    """
    if len(trace.kernels):
        kernels = trace.kernels
        kept = ~kernels.communication
        start = kernels.start_ns[kept]
        return merge(start, start + kernels.duration_ns[kept])
    operators = trace.cpu_operators
    computes = np.array([not n.startswith(_COMMUNICATION_PREFIX) for n in trace.names], dtype=bool)
    kept = computes[operators.name] if len(operators) else np.zeros(0, dtype=bool)
    start = operators.start_ns[kept]
    return merge(start, start + operators.duration_ns[kept])


def device_span(trace: RankTrace) -> tuple[int, int] | None:
    """Return first start and last end of all device work, or else of all CPU operators."""
    table = trace.kernels if len(trace.kernels) else trace.cpu_operators
    if not len(table):
        return None
    return int(table.start_ns[0]), int((table.start_ns + table.duration_ns).max())


def merge(start: I64, end: I64) -> tuple[I64, I64]:
    """Return the union of intervals, given sorted by start, as disjoint intervals."""
    if not len(start):
        return start, end
    reach = np.maximum.accumulate(end)
    first = np.concatenate(([True], start[1:] > reach[:-1]))
    last = np.concatenate((first[1:], [True]))
    return start[first], reach[last]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpTable:
    """All operations of a job, sorted by step and start. Starts may count from each step's own."""

    file: str
    format: str
    """`csv`, `jsonl` or `parquet`."""
    names: tuple[str, ...]
    """The operations as the table spells them."""
    step: I64
    pipeline: I32
    stage: I32
    microbatch: I32
    """-1 where the table does not tell, as is usual for transfers."""
    op: U8
    name: I32
    start_ns: I64
    duration_ns: I64
    rank: I32
    message_bytes: I64
    peer: I32
    layer: I32
    memory_bytes: I64
    """What the rank's device held at the most, as far as it was noted with this row; else -1."""
    events: int
    inflated_bytes: int
    hosts: tuple[tuple[int, str], ...] = ()
    """Of ranks whose host the table names."""
    gaps: tuple[Gap, ...] = ()
    sidecar: Sidecar | None = None

    def __len__(self) -> int:
        return len(self.step)

    @property
    def end_ns(self) -> I64:
        """When each operation ended."""
        return self.start_ns + self.duration_ns


def join_op_tables(tables: Sequence[OpTable]) -> OpTable | None:
    """Put the tables of several ranks into one; None where two of them hold the same rank."""
    first, *others = tables
    held = [set(zip(t.pipeline.tolist(), t.rank.tolist(), strict=True)) for t in tables]
    if not others:
        return first
    if sum(map(len, held)) > len(set.union(*held)) or any((t.rank < 0).any() for t in tables):
        return None
    names = tuple(dict.fromkeys(name for table in tables for name in table.names))
    columns: dict[str, Any] = {
        column.name: np.concatenate([getattr(table, column.name) for table in tables])
        for column in fields(first)
        if isinstance(getattr(first, column.name), np.ndarray)
    }
    renamed = [np.array([names.index(n) for n in table.names])[table.name] for table in tables]
    columns["name"] = np.concatenate(renamed).astype(np.int32)
    order = np.lexsort((columns["start_ns"], columns["step"]))
    return replace(
        first,
        names=names,
        events=sum(table.events for table in tables),
        inflated_bytes=sum(table.inflated_bytes for table in tables),
        hosts=tuple(sorted({host for table in tables for host in table.hosts})),
        gaps=tuple(dict.fromkeys(gap for table in tables for gap in table.gaps)),
        **{name: column[order] for name, column in columns.items()},
    )
