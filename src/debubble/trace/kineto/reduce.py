"""Batches of events in → growing columns out; what the product does not use is dropped."""

from __future__ import annotations

import re
from array import array
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from debubble.trace.interning import Interner
from debubble.trace.kineto.events import (
    AnyKind,
    ArgsDecoder,
    DeviceArgs,
    LaunchArgs,
    MemoryArgs,
    MetadataArgs,
    OperatorArgs,
)

# Categories before torch 1.12 were spelt as in the second column of each pair.
DEVICE_CATEGORIES = frozenset({"kernel", "Kernel", "gpu_memcpy", "Memcpy", "gpu_memset", "Memset"})
_LAUNCHES = frozenset({"cuda_runtime", "Runtime", "cuda_driver", "xpu_runtime", "xpu_driver"})
_OPERATORS = frozenset({"cpu_op", "Operator"})
_HOST_ANNOTATIONS = frozenset({"user_annotation", "User Annotation"})

# Device work of accelerators that we cannot read yet: counted, so that nobody takes them for idle.
FOREIGN_DEVICE = re.compile(r"^(?:mtia_|hpu_|npu|privateuse1_|glow_)")

_COMMUNICATION_OPERATORS = ("c10d::", "record_param_comms")
_COMMUNICATION_ANNOTATIONS = ("nccl:", "gloo:", "mpi:", "ucc:", "xccl:", "hccl:")
_QUEUES_OR_WAITS = re.compile(r"Launch|Memcpy|Memset|Graph|Synchronize")

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


class Launched(dict[str, bool]):
    """Whether a runtime call of this name queues device work or waits for it."""

    def __missing__(self, name: str) -> bool:
        answer = self[name] = bool(_QUEUES_OR_WAITS.search(name))
        return answer


class Reducer:
    """Gathers the rows of one file; times stay microseconds as written."""

    def __init__(self) -> None:
        self.names = Interner()
        self.threads: dict[int | str, int] = {}
        self.thread_names: dict[int | str, str] = {}
        self.counts: Counter[str] = Counter()
        self.device = Rows(
            ts="d", dur="d", name="i", device="q", stream="q", correlation="q", graph="q", bytes="q"
        )
        self.launches = Rows(ts="d", dur="d", name="i", thread="i", correlation="q")
        self.annotations = Rows(ts="d", dur="d", name="i", thread="i", stream="q")
        self.memory = Rows(
            ts="d", device_type="q", device="q", bytes="q", allocated="q", reserved="q"
        )
        self.cpu_operators = Rows(ts="d", dur="d", name="i", thread="i")
        self.operators = Rows(ts="d", dur="d", name="i", thread="i", device_row="q")
        self.operator_args: list[OperatorArgs] = []
        self._queues = Launched()
        self._device_args = ArgsDecoder(DeviceArgs)
        self._launch_args = ArgsDecoder(LaunchArgs)
        self._memory_args = ArgsDecoder(MemoryArgs)
        self._operator_args = ArgsDecoder(OperatorArgs)
        self._metadata_args = ArgsDecoder(MetadataArgs)
        self._condense_at = _CONDENSE_ROWS

    def add(self, events: Sequence[AnyKind]) -> None:
        """Take what the product uses from a batch of events."""
        groups: defaultdict[str, list[AnyKind]] = defaultdict(list)
        for event in events:
            groups[event.cat].append(event)
        for category, group in groups.items():
            self.counts[category] += len(group)
            if category in _OPERATORS:
                self._add_operators(group)
            elif category in _LAUNCHES:
                self._add_launches(group)
            elif category in DEVICE_CATEGORIES:
                self._add_device(group)
            elif category == "cpu_instant_event":
                self._add_memory(group)
            elif category in _HOST_ANNOTATIONS:
                self._add_annotations(group)
            elif category == "gpu_user_annotation":
                self._add_device_annotations(group)
            elif not category:
                self._add_metadata(group)

    def _add_device(self, group: list[AnyKind]) -> None:
        args = self._device_args(group)
        described = [row for row, known in enumerate(args) if known.collective]
        if described:
            first = len(self.device)
            self._add_operator_rows(
                [group[row] for row in described], [first + r for r in described]
            )
        names = self.names
        self.device.add(
            ts=[e.ts for e in group],
            dur=[e.dur for e in group],
            name=[names[e.name] for e in group],
            device=[a.device for a in args],
            stream=[a.stream for a in args],
            correlation=[a.correlation for a in args],
            graph=[a.graph for a in args],
            bytes=[a.bytes for a in args],
        )

    def _add_launches(self, group: list[AnyKind]) -> None:
        queues = self._queues
        kept = [e for e in group if queues[e.name]]
        if not kept:
            return
        names = self.names
        self.launches.add(
            ts=[e.ts for e in kept],
            dur=[e.dur for e in kept],
            name=[names[e.name] for e in kept],
            thread=self._thread_numbers(kept),
            correlation=[a.correlation for a in self._launch_args(kept)],
        )

    def _add_operators(self, group: list[AnyKind]) -> None:
        communication = [e for e in group if e.name.startswith(_COMMUNICATION_OPERATORS)]
        if communication:
            self._add_operator_rows(communication, [-1] * len(communication))
        if len(self.device):
            return  # with device work in the trace, busy time is the device's
        names = self.names
        self.cpu_operators.add(
            ts=[e.ts for e in group],
            dur=[e.dur for e in group],
            name=[names[e.name] for e in group],
            thread=self._thread_numbers(group),
        )
        if len(self.cpu_operators) > self._condense_at:
            self.cpu_operators.keep(outermost(self.cpu_operators))
            self._condense_at = len(self.cpu_operators) + _CONDENSE_ROWS

    def _add_operator_rows(self, group: list[AnyKind], device_rows: list[int]) -> None:
        names = self.names
        self.operators.add(
            ts=[e.ts for e in group],
            dur=[e.dur for e in group],
            name=[names[e.name] for e in group],
            thread=self._thread_numbers(group),
            device_row=device_rows,
        )
        self.operator_args += self._operator_args(group)

    def _add_annotations(self, group: list[AnyKind]) -> None:
        communication = [e for e in group if e.name.startswith(_COMMUNICATION_ANNOTATIONS)]
        if communication:
            self._add_operator_rows(communication, [-1] * len(communication))
        self._annotate(group, self._thread_numbers(group), [-1] * len(group))

    def _add_device_annotations(self, group: list[AnyKind]) -> None:
        streams = [e.tid if isinstance(e.tid, int) and abs(e.tid) < 2**63 else -1 for e in group]
        self._annotate(group, [-1] * len(group), streams)

    def _annotate(self, group: list[AnyKind], threads: list[int], streams: list[int]) -> None:
        names = self.names
        self.annotations.add(
            ts=[e.ts for e in group],
            dur=[e.dur for e in group],
            name=[names[e.name] for e in group],
            thread=threads,
            stream=streams,
        )

    def _add_memory(self, group: list[AnyKind]) -> None:
        kept = [e for e in group if e.name == "[memory]"]
        args = self._memory_args(kept)
        self.memory.add(
            ts=[e.ts for e in kept],
            device_type=[a.device_type for a in args],
            device=[a.device for a in args],
            bytes=[a.bytes for a in args],
            allocated=[a.allocated for a in args],
            reserved=[a.reserved for a in args],
        )

    def _add_metadata(self, group: list[AnyKind]) -> None:
        named = [e for e in group if e.name == "thread_name"]
        for event, args in zip(named, self._metadata_args(named), strict=True):
            self.thread_names[event.tid] = args.name

    def _thread_numbers(self, group: list[AnyKind]) -> list[int]:
        threads = self.threads
        return [threads.setdefault(e.tid, len(threads)) for e in group]


def outermost(rows: Rows) -> NDArray[np.intp]:
    """Return the rows that no other of their thread contains, ordered by thread and start."""
    start = rows["ts"].astype(np.float64)
    end = start + np.nan_to_num(rows["dur"].astype(np.float64))
    order = np.lexsort((-end, start, rows["thread"]))
    end, thread = end[order], rows["thread"][order]
    kept = np.isnan(end)  # times that are no times are judged, and counted, later
    bounds = [0, *(np.flatnonzero(np.diff(thread)) + 1), len(order)]
    for first, last in pairwise(bounds):
        reach = np.fmax.accumulate(end[first:last])
        kept[first:last] |= np.diff(reach, prepend=-np.inf) > 0
    return order[kept]
