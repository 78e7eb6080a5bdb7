"""Traces of Ascend NPUs (torch_npu's `trace_view.json`) in → `RankTrace` out.

A bare list of events, the host's first; whose an event is says the name of its process.

    {"ph": "M", "name": "process_name", "pid": 96, "args": {"name": "Ascend Hardware"}}
    {"ph": "X", "name": "MatMulV2", "pid": 96, "tid": 2, "ts": "1700000000000010.250", "dur": 90.5,
     "args": {"Task Type": "AI_CORE", "Physic Stream Id": 2}}                  a kernel, on stream 2
    {"ph": "X", "name": "EVENT_WAIT", "pid": 96, …, "args": {"Task Type": "EVENT_WAIT"}}    no work
    {"ph": "X", "name": "hcom_send__101_0_1", "pid": 128, …}         under "Communication" or "HCCL"

Each is written as Kineto would, and that is read. What of it is not there: who a message goes to,
which call of the host launched a kernel, memory. So shares of time are told, and no pipeline.

Written from what its makers and their readers document; not seen on a device of ours.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from debubble.errors import Code, Gap, TraceError
from debubble.trace.columns import LAST_NS, KernelKind, merge
from debubble.trace.format import Format, Reading, TraceFile, decode_events, rank_from_name
from debubble.trace.kineto import read_kineto
from debubble.trace.source import HELD_BYTES, Limits, inflate, is_url
from debubble.units import NS_PER_US, counted

NAME = "Ascend trace"
_HARDWARE = frozenset({"ascend hardware"})
_TALK = frozenset({"communication", "hccl"})
# Times as text are torch_npu's alone; the name of the device may lie megabytes further on.
_MARKS = re.compile(rb'"Ascend Hardware"|"Physic Stream Id"|"ts"\s*:\s*"\d{10,}(?:\.\d+)?"')
# Tasks that wait, record or mark; what a device computes has other types, AI_CORE and its like.
_NO_WORK = re.compile(
    r"EVENT|NOTIFY|WAIT|RECORD|PLACE_?HOLDER|^MODEL|^LABEL|^STREAM|PROFILER|MAINTENANCE|GRAPH|VALUE",
    re.IGNORECASE,
)
_COPY = re.compile(r"MEMCPY|DMA", re.IGNORECASE)
_HCOM = re.compile(r"hcom_", re.IGNORECASE)
# Lanes of talk are no streams; their numbers are kept apart from those of streams.
_TALKS_APART = 1_000_000_000
_STREAM = re.compile(r"\d{1,9}")
_RANK_BESIDE = re.compile(r"profiler_info_(\d{1,7})\.json")


class _Event(msgspec.Struct, gc=False):
    """One event, as far as it is used."""

    ph: str = ""
    cat: str = ""
    name: str = ""
    pid: int | str = 0
    tid: int | str = 0
    ts: float | str = ""
    dur: float | str = 0.0
    args: msgspec.Raw = msgspec.Raw(b"{}")


class _Args(msgspec.Struct):
    """Arguments of device tasks, and of names."""

    name: str = ""
    task: str = msgspec.field(name="Task Type", default="")


def recognise(file: str, prefix: bytes) -> TraceFile | None:
    """Tell it by the name of its device, or by times as text in a bare list."""
    start = prefix.lstrip()[:1]
    if start not in {b"[", b"{"} or b'"ph"' not in prefix:
        return None
    mark = _MARKS.search(prefix)
    if mark is None or (start == b"{" and mark[0] != b'"Ascend Hardware"'):
        return None
    return TraceFile(file=file, format=NAME, rank=_rank_of(file))


def _rank_of(file: str) -> int | None:
    """Return the rank that a path names, else `profiler_info_3.json` in the folder above."""
    named = rank_from_name(file)
    if named is not None or is_url(file):
        return named
    above = Path(file).resolve().parent.parent
    told = [found for path in above.glob("profiler_info_*.json")
            if (found := _RANK_BESIDE.fullmatch(path.name))]  # fmt: skip
    return int(told[0][1]) if len(told) == 1 else None


def read(known: TraceFile, limits: Limits) -> Reading:
    """Write the events as Kineto would, and read that."""
    data = inflate(known.file, limits, HELD_BYTES)
    events = decode_events(
        data,
        _Event,
        known.file,
        problem="was told by its marks of Ascend, and cannot be read",
        hint="copy it again, or let torch_npu's analysis end: its parts come one by one",
    )
    size = len(data)
    del data
    devices = _processes(events, _HARDWARE)
    if not devices:  # what the host did alone; the general reader says so
        return Reading(traces=(read_kineto(known.file, limits),))
    base_ns, rows = _translate(events, devices, _processes(events, _TALK), known.file)
    header = {
        "schemaVersion": 1,
        "deviceProperties": [{"id": 0, "name": "Ascend NPU"}],
        "baseTimeNanoseconds": base_ns,
        "traceEvents": rows,
    }
    trace = read_kineto(known.file, limits, msgspec.json.encode(header))
    gaps = trace.gaps
    messages = int((trace.kernels.kind == KernelKind.PEER).sum())
    if messages:
        gap = Gap(
            code=Code.UNLINKED_MESSAGES,
            message=f"{counted(messages, 'message')} of its device without a peer",
            hint="they show no pipeline; give a table of passes, or spans of passes",
            file=known.file,
            rank=known.rank,
        )
        gaps = (*gaps, gap)
    whose = replace(trace, format=NAME, rank=known.rank, gaps=gaps)
    return Reading(traces=(replace(whose, events=len(events), inflated_bytes=size),))


def _processes(events: Sequence[_Event], names: frozenset[str]) -> set[int | str]:
    """Return the processes of these names."""
    named = (event for event in events if event.ph == "M" and event.name == "process_name")
    return {event.pid for event in named if _arguments(event).name.lower() in names}


def _arguments(event: _Event) -> _Args:
    try:
        return msgspec.json.decode(event.args, type=_Args)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _Args()


def _translate(
    events: Sequence[_Event], devices: set[int | str], talk: set[int | str], file: str
) -> tuple[int, list[dict[str, Any]]]:
    """Return the earliest nanosecond, and Kineto's events counted from it.

    Talk is written twice, whole and as the tasks that it is made of: where it is there whole, tasks
    of streams that compute nothing are its own. Names of processes are left out: they would be
    taken for those of a device that is not read.
    """
    spans = [event for event in events if event.ph == "X"]
    starts = [_stamp_ns(event.ts, file) for event in spans]
    durations = [_stamp_ns(event.dur, file) for event in spans]
    base_ns = min(starts, default=0)
    is_talk = [bool(_HCOM.match(event.name)) for event in spans]
    whole = [row for row, event in enumerate(spans) if is_talk[row] and event.pid in talk]
    whole = whole or [row for row, event in enumerate(spans) if is_talk[row]]
    covered = sorted((starts[row], starts[row] + durations[row]) for row in whole)
    bounds = np.array(covered, dtype=np.int64).reshape(-1, 2)
    begins, ends = merge(bounds[:, 0], bounds[:, 1])
    tasks = [_arguments(event).task or event.name for event in spans]
    works = [
        event.pid in devices and not is_talk[row] and not _NO_WORK.search(tasks[row])
        for row, event in enumerate(spans)
    ]
    computes = {
        event.tid for row, event in enumerate(spans) if works[row] and not _COPY.search(tasks[row])
    }
    rows: list[dict[str, Any]] = [
        {"ph": "M", "name": "thread_name", "tid": event.tid, "args": event.args}
        for event in events
        if event.ph == "M" and event.name == "thread_name"
    ]
    talking = set(whole)
    for row, event in enumerate(spans):
        made: dict[str, Any] = {
            "ph": "X",
            "cat": event.cat,
            "name": event.name,
            "tid": event.tid,
            "ts": (starts[row] - base_ns) / NS_PER_US,
            "dur": durations[row] / NS_PER_US,
        }
        found = _STREAM.search(str(event.tid))
        stream = int(found[0]) if found else 0
        before = int(np.searchsorted(begins, starts[row], side="right")) - 1
        inside = before >= 0 and starts[row] <= ends[before]
        if row in talking:
            of_device = {"device": 0, "stream": stream + _TALKS_APART}
            rows.append(made | {"cat": "kernel", "args": of_device})
        elif event.pid not in devices and event.pid not in talk:
            category = "user_annotation" if event.name.startswith("ProfilerStep#") else event.cat
            args = {"args": event.args} if category in {"cpu_op", "user_annotation"} else {}
            rows.append(made | {"cat": category} | args)
        elif works[row] and (event.tid in computes or not inside):
            copies = _COPY.search(tasks[row]) is not None
            name = f"Memcpy {event.name}" if copies else event.name
            category = "gpu_memcpy" if copies else "kernel"
            of_device = {"device": 0, "stream": stream}
            rows.append(made | {"cat": category, "name": name, "args": of_device})
    return base_ns, rows


def _stamp_ns(text: float | str, file: str) -> int:
    """Read microseconds to the digit: as a float, today's lack the nanoseconds."""
    try:
        value = Decimal(str(text))
    except InvalidOperation:
        value = Decimal("nan")
    if not value.is_finite() or abs(value) * NS_PER_US > LAST_NS:
        raise TraceError(f"{str(text)[:40]!r} is no time", file=file, hint="copy it again")
    return round(value * NS_PER_US)


FORMAT = Format(
    name=NAME,
    position=3,
    in_names=("trace_view",),
    recognise=recognise,
    read=read,
)
