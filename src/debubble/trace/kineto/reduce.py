"""Batches of events in → growing columns out; what the product does not use is dropped."""

from __future__ import annotations

import re
from array import array
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from debubble.trace.columns import Interner
from debubble.trace.communication import queues_or_waits
from debubble.trace.kineto.events import (
    ArgsDecoder,
    Batch,
    DeviceArgs,
    DeviceEvent,
    Event,
    LaunchArgs,
    LaunchEvent,
    MemoryArgs,
    MemoryEvent,
    MetadataArgs,
    OperatorArgs,
)

Call = TypeVar("Call", bound=Event | LaunchEvent)

_ARGS = (DeviceArgs, LaunchArgs, MemoryArgs, OperatorArgs, MetadataArgs)

# Categories before torch 1.12 were spelt as in the second column of each pair.
DEVICE_CATEGORIES = frozenset({"kernel", "Kernel", "gpu_memcpy", "Memcpy", "gpu_memset", "Memset"})
_LAUNCHES = frozenset({"cuda_runtime", "Runtime", "cuda_driver", "xpu_runtime", "xpu_driver"})
_OPERATORS = frozenset({"cpu_op", "Operator"})
_HOST_ANNOTATIONS = frozenset({"user_annotation", "User Annotation"})

# Device work of accelerators that we cannot read yet: counted, so that nobody takes them for idle.
FOREIGN_DEVICE = re.compile(r"^(?:mtia_|hpu_|npu|async_npu|privateuse1_|glow_|tpu_|xla_)")
# The same told by the process that rows are written under, as Ascend's and JAX's profilers do.
FOREIGN_PROCESS = re.compile(r"^(?:Ascend Hardware|CANN|/device:TPU|/device:GPU)", re.IGNORECASE)

_COMMUNICATION_OPERATORS = ("c10d::", "record_param_comms")
_COMMUNICATION_ANNOTATIONS = ("nccl:", "gloo:", "mpi:", "ucc:", "xccl:", "hccl:")
# Nested operators are dropped when so many rows have gathered: memory stays flat, sorts rare.
_CONDENSE_ROWS = 250_000


class Rows:
    """Columns that grow. Types as in `array`: d float, i and q integers of 32 and 64 bits."""

    def __init__(self, **types: str) -> None:
        self._columns = {name: array(code) for name, code in types.items()}

    def add(self, **values: list[Any]) -> None:
        """Append one list of equal length to each column."""
        for name, column in self._columns.items():
            column.fromlist(values[name])

    def __len__(self) -> int:
        return len(next(iter(self._columns.values())))

    def __getitem__(self, name: str) -> NDArray[np.generic]:
        column = self._columns[name]
        return np.frombuffer(column, dtype=column.typecode)

    def keep(self, wanted: NDArray[np.generic]) -> None:
        """Keep the given rows, in the given order."""
        for name in self._columns:
            column = array(self._columns[name].typecode)
            column.frombytes(self[name][wanted].tobytes())
            self._columns[name] = column


class Reducer:
    """Gathers the rows of one file; times stay microseconds as written."""

    def __init__(self) -> None:
        self.names: Interner[str] = Interner()
        self.threads: Interner[int | str] = Interner()
        self.thread_names: dict[int | str, str] = {}
        self.process_names: set[str] = set()
        self.counts: Counter[str] = Counter()
        self.device = Rows(
            ts="d",
            dur="d",
            name="i",
            device="q",
            stream="q",
            correlation="q",
            graph="q",
        )
        self.launches = Rows(ts="d", dur="d", name="i", thread="i", correlation="q")
        self.annotations = Rows(ts="d", dur="d", name="i", thread="i", stream="q")
        self.memory = Rows(
            ts="d", device_type="q", device="q", bytes="q", allocated="q", reserved="q"
        )
        self.cpu_operators = Rows(ts="d", dur="d", name="i", thread="i")
        self.operators = Rows(ts="d", dur="d", name="i", thread="i", device_row="q")
        self.operator_args: list[OperatorArgs] = []
        self._args = {kind: ArgsDecoder(kind) for kind in _ARGS}
        self._condense_at = _CONDENSE_ROWS

    def add(self, batch: Batch, *, cpu_operators: bool = True) -> None:
        """Take what the product uses from a batch; operators of the CPU only where wanted."""
        if batch.device:
            self.counts["kernel"] += len(batch.device)
            self._add_device(batch.device, [event.args for event in batch.device])
        if batch.launches:
            self.counts["cuda_runtime"] += len(batch.launches)
            kept = self._queueing(batch.launches)
            self._add_launches(kept, [event.args for event in kept])
        if batch.memory:
            self.counts["cpu_instant_event"] += len(batch.memory)
            self._add_memory(batch.memory, [event.args for event in batch.memory])
        groups: defaultdict[str, list[Event]] = defaultdict(list)
        for event in batch.others:
            groups[event.cat].append(event)
        for category, group in groups.items():
            self.counts[category] += len(group)
            if category in _OPERATORS and cpu_operators and not len(self.device):
                self._add_cpu_operators(group)  # beside device work they are of no use
            self._sort(category, group)

    @property
    def wrong(self) -> int:
        """Return how many events have arguments that are not what they should be."""
        return sum(decoder.wrong for decoder in self._args.values())

    def _sort(self, category: str, group: list[Event]) -> None:
        if category in DEVICE_CATEGORIES:
            # Some kernels say themselves what they communicate: operators of their own.
            speaking = [row for row, e in enumerate(group) if b"Collective name" in bytes(e.args)]
            if speaking:
                first = len(self.device)
                rows = [first + row for row in speaking]
                self._add_operators([group[row] for row in speaking], rows)
            self._add_device(group, self._args[DeviceArgs](group))
        elif category in _LAUNCHES:
            kept = self._queueing(group)
            self._add_launches(kept, self._args[LaunchArgs](kept))
        elif category in _OPERATORS:
            self._add_communication(group, _COMMUNICATION_OPERATORS)
            # torch 1.8 and 1.9 mark steps so, and builds for other devices do.
            steps = [event for event in group if event.name.startswith("ProfilerStep#")]
            threads = self._thread_numbers(steps)
            self.annotations.add(**self._spans(steps), thread=threads, stream=[-1] * len(steps))
        elif category == "cpu_instant_event":
            kept = [event for event in group if event.name == "[memory]"]
            self._add_memory(kept, self._args[MemoryArgs](kept))
        elif category in _HOST_ANNOTATIONS:
            self._add_communication(group, _COMMUNICATION_ANNOTATIONS)
            threads = self._thread_numbers(group)
            self.annotations.add(**self._spans(group), thread=threads, stream=[-1] * len(group))
        elif category == "gpu_user_annotation":
            streams = [_stream(event.tid) for event in group]
            self.annotations.add(**self._spans(group), thread=[-1] * len(group), stream=streams)
        elif not category:
            named = [e for e in group if e.name == "thread_name"]
            for event, args in zip(named, self._args[MetadataArgs](named), strict=True):
                self.thread_names[event.tid] = args.name
            processes = [e for e in group if e.name == "process_name"]
            self.process_names.update(args.name for args in self._args[MetadataArgs](processes))

    def _add_device(
        self, events: Sequence[Event | DeviceEvent], args: Sequence[DeviceArgs]
    ) -> None:
        self.device.add(
            **self._spans(events),
            device=[a.device for a in args],
            stream=[a.stream if a.queue < 0 else a.queue for a in args],
            correlation=[a.correlation for a in args],
            graph=[a.graph for a in args],
        )

    def _queueing(self, events: Sequence[Call]) -> list[Call]:
        return [event for event in events if queues_or_waits(event.name)]

    def _add_launches(
        self, events: Sequence[Event | LaunchEvent], args: Sequence[LaunchArgs]
    ) -> None:
        self.launches.add(
            **self._spans(events),
            thread=self._thread_numbers(events),
            correlation=[a.correlation for a in args],
        )

    def _add_memory(
        self, events: Sequence[Event | MemoryEvent], args: Sequence[MemoryArgs]
    ) -> None:
        self.memory.add(
            ts=[e.ts for e in events],
            device_type=[a.device_type for a in args],
            device=[a.device for a in args],
            bytes=[a.bytes for a in args],
            allocated=[a.allocated for a in args],
            reserved=[a.reserved for a in args],
        )

    def _add_communication(self, group: list[Event], prefixes: tuple[str, ...]) -> None:
        communication = [e for e in group if e.name.startswith(prefixes)]
        if communication:
            self._add_operators(communication, [-1] * len(communication))

    def _add_operators(self, group: list[Event], device_rows: list[int]) -> None:
        self.operators.add(
            **self._spans(group), thread=self._thread_numbers(group), device_row=device_rows
        )
        self.operator_args += self._args[OperatorArgs](group)

    def _add_cpu_operators(self, group: list[Event]) -> None:
        self.cpu_operators.add(**self._spans(group), thread=self._thread_numbers(group))
        if len(self.cpu_operators) > self._condense_at:
            self.cpu_operators.keep(outermost(self.cpu_operators))
            self._condense_at = len(self.cpu_operators) + _CONDENSE_ROWS

    def _spans(self, events: Sequence[Event | DeviceEvent | LaunchEvent]) -> dict[str, list[Any]]:
        names = self.names
        return {
            "ts": [e.ts for e in events],
            "dur": [e.dur for e in events],
            "name": [names[e.name] for e in events],
        }

    def _thread_numbers(self, events: Sequence[Event | LaunchEvent]) -> list[int]:
        threads = self.threads
        return [threads[event.tid] for event in events]


def _stream(identity: int | str) -> int:
    return identity if isinstance(identity, int) and abs(identity) < 2**63 else -1


def outermost(rows: Rows) -> NDArray[np.intp]:
    """Return the rows that no other of their thread contains, ordered by thread and start."""
    start = rows["ts"].astype(np.float64)
    with np.errstate(over="ignore"):
        end = start + np.nan_to_num(rows["dur"].astype(np.float64))
    end[~np.isfinite(end)] = np.nan
    order = np.lexsort((-end, start, rows["thread"]))
    end, thread = end[order], rows["thread"][order]
    kept = np.isnan(end)  # times that are no times are judged, and counted, later
    bounds = [0, *(np.flatnonzero(np.diff(thread)) + 1), len(order)]
    for first, last in pairwise(bounds):
        reach = np.fmax.accumulate(end[first:last])
        kept[first:last] |= np.diff(reach, prepend=-np.inf) > 0
    return order[kept]
