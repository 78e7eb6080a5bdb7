"""Traces of Ascend NPUs (torch_npu's `trace_view.json`) in → `RankTrace` out.

A bare list of events, the host's first; whose an event is says the name of its process.

    {"ph": "M", "name": "process_name", "pid": 96, "args": {"name": "Ascend Hardware"}}
    {"ph": "X", "name": "MatMulV2", "pid": 96, "tid": 2, "ts": "1700000000000010.250", "dur": 90.5,
     "args": {"Task Type": "AI_CORE", "Physic Stream Id": 2}}                  a kernel, on stream 2
    {"ph": "X", "name": "EVENT_WAIT", "pid": 96, …, "args": {"Task Type": "EVENT_WAIT"}}    no work
    {"ph": "X", "name": "hcom_send__101_0_1", "pid": 128, …}         under "Communication" or "HCCL"

Each is written as Kineto would, and that is read. What of it is not there: who a message goes to,
which call of the host launched a kernel, memory. So shares of time are told, and no pipeline.

Written from what its makers and their readers document; not seen on a device of ours. The pictures
of XLA's profiler (`*.xplane.pb`), which TPUs write, are told by their first bytes, and refused.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

import msgspec

from debubble.errors import Code, Gap, TraceError
from debubble.trace.columns import KernelKind
from debubble.trace.format import OTHER, Format, Reading, TraceFile, rank_from_name
from debubble.trace.kineto import read_kineto, read_kineto_text
from debubble.trace.source import DEFAULT_LIMITS, Limits, inflate, is_url
from debubble.units import NS_PER_US, counted

NAME = "Ascend trace"
# Held whole, once as it is and once as it is read.
_MOST_BYTES = 2 * 1024**3
_MOST_PACKED = 40.0
_HARDWARE = "ascend hardware"
_TALK = frozenset({"communication", "hccl"})
# Times as text are torch_npu's alone; the name of the device may lie megabytes further on.
_MARKS = re.compile(rb'"Ascend Hardware"|"Physic Stream Id"|"ts"\s*:\s*"\d{10,}(?:\.\d+)?"')
_XPLANE = re.compile(rb"\A\x0a[\x01-\xff][\x00-\xff]{0,6}\x12[\x01-\x7f]/(?:host|device):")
# Tasks that wait, record or mark; what a device computes has other types, AI_CORE and its like.
_NO_WORK = re.compile(
    r"EVENT|NOTIFY|WAIT|RECORD|PLACE_?HOLDER|^MODEL|^LABEL|^STREAM|PROFILER|MAINTENANCE|GRAPH|VALUE",
    re.IGNORECASE,
)
_COPY = re.compile(r"MEMCPY|DMA", re.IGNORECASE)
_HCOM = re.compile(r"hcom_", re.IGNORECASE)
# Lanes of talk are no streams; their numbers are kept apart from those of streams.
_TALKS_APART = 1_000_000_000
# The year 2096: what lies beyond is no time.
_MOST_US = Decimal(4 * 10**15)
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


class _Document(msgspec.Struct):
    """The form with fields around the list, which some tools make of it."""

    events: list[_Event] = msgspec.field(name="traceEvents")


def recognise(file: str, prefix: bytes) -> TraceFile | None:
    """Tell it by the name of its device, or by times as text in a bare list."""
    if _XPLANE.match(prefix):
        why = TraceError(
            "is a profile of XLA (XPlane), as TPUs and JAX write it: it does not tell what a pass "
            "is, nor whose",
            hint="give a table of passes, with a start and a duration each (`debubble` reads CSV)",
            file=file,
        )
        return TraceFile(file=file, format=OTHER, why_not=why)
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
    # Held as objects it takes several times its text: what packs too well is no trace.
    ratio = min(limits.ratio, _MOST_PACKED) if limits == DEFAULT_LIMITS else limits.ratio
    data = inflate(known.file, replace(limits, ratio=ratio), _MOST_BYTES)
    events, gaps = _decode(data, known)
    size = len(data)
    del data
    devices = _processes(events, {_HARDWARE})
    if not devices:  # what the host did alone; the general reader says so
        return Reading(traces=(read_kineto(known.file, limits),))
    base_us, rows = _translate(events, devices, _processes(events, _TALK), known.file)
    header = {
        "schemaVersion": 1,
        "deviceProperties": [{"id": 0, "name": "Ascend NPU"}],
        "baseTimeNanoseconds": base_us * NS_PER_US,
        "traceEvents": rows,
    }
    trace = read_kineto_text(msgspec.json.encode(header), known.file, NAME, limits)
    gaps += trace.gaps
    messages = int((trace.kernels.kind == KernelKind.PEER).sum())
    if messages:
        gap = Gap(
            code=Code.UNLINKED_MESSAGES,
            message=f"{counted(messages, 'message')} of its device, which do not say to whom",
            hint="no pipeline can be told from them; give a table of passes, or spans of passes",
            file=known.file,
            rank=known.rank,
        )
        gaps = (*gaps, gap)
    told = replace(trace, rank=known.rank, events=len(events), inflated_bytes=size, gaps=gaps)
    return Reading(traces=(told,))


def _decode(data: bytes, known: TraceFile) -> tuple[Sequence[_Event], tuple[Gap, ...]]:
    """Read the list; one that was never closed, as an analysis broken off leaves it, is cut."""
    form: Any = list[_Event] if data.lstrip()[:1] == b"[" else _Document
    gaps: tuple[Gap, ...] = ()
    for content in (data, data[: data.rfind(b"}") + 1] + b"]"):
        try:
            said = msgspec.json.decode(content, type=form)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            why: Exception = error
            message = "the list of events has no end; those before it are kept"
            gap = Gap(
                code=Code.TRUNCATED,
                message=message,
                hint="let torch_npu's analysis end, or run it again: its parts come one by one",
                file=known.file,
                rank=known.rank,
            )
            gaps = (gap,)
        else:
            return (said.events if isinstance(said, _Document) else said), gaps
    hint = "copy it again, or run torch_npu's analysis again"
    message = f"was told by its marks of Ascend, and cannot be read: {why}"
    raise TraceError(message, file=known.file, hint=hint) from why


def _processes(events: Sequence[_Event], names: frozenset[str] | set[str]) -> set[int | str]:
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
    """Return the earliest microsecond, and Kineto's events counted from it.

    Talk is written twice, whole and as the tasks that it is made of: where it is there whole, tasks
    of streams that compute nothing are its own.
    """
    spans = [event for event in events if event.ph == "X"]
    stamps = [_stamp(event.ts, file) for event in spans]
    base_us = int(min(stamps)) if stamps else 0
    ours = [(event, at) for event, at in zip(spans, stamps, strict=True) if event.pid in devices]
    whole = [(event, at) for event, at in zip(spans, stamps, strict=True)
             if event.pid in talk and _HCOM.match(event.name)]  # fmt: skip
    whole = whole or [(event, at) for event, at in ours if _HCOM.match(event.name)]
    covered = _union([(at, at + _stamp(event.dur, file)) for event, at in whole])
    computes = {event.tid for event, _ in ours if _is_compute(event)}
    rows = list(_host_rows(events))
    for event, at in zip(spans, stamps, strict=True):
        if event.pid not in devices and event.pid not in talk:
            category = "user_annotation" if event.name.startswith("ProfilerStep#") else event.cat
            rows.append(_row(event, category, event.name, at - base_us, file))
    for event, at in ours:
        task = _arguments(event).task
        if _HCOM.match(event.name) or _NO_WORK.search(task or event.name):
            continue
        copies = _COPY.search(task or event.name) is not None
        if event.tid not in computes and _is_inside(at, covered):
            continue
        name = f"Memcpy {event.name}" if copies else event.name
        rows.append(_row(event, "gpu_memcpy" if copies else "kernel", name, at - base_us, file))
    for event, at in whole:
        row = _row(event, "kernel", event.name, at - base_us, file)
        row["args"]["stream"] += _TALKS_APART
        rows.append(row)
    return base_us, rows


def _is_compute(event: _Event) -> bool:
    task = _arguments(event).task or event.name
    return not (_HCOM.match(event.name) or _NO_WORK.search(task) or _COPY.search(task))


def _host_rows(events: Sequence[_Event]) -> Iterator[dict[str, Any]]:
    """Yield names of threads; those of processes would be taken for a device that is not read."""
    for event in events:
        if event.ph == "M" and event.name == "thread_name":
            name = _arguments(event).name
            yield {"ph": "M", "name": "thread_name", "tid": event.tid, "args": {"name": name}}


def _row(event: _Event, category: str, name: str, at: Decimal, file: str) -> dict[str, Any]:
    stream = _STREAM.search(str(event.tid))
    row: dict[str, Any] = {
        "ph": "X",
        "cat": category,
        "name": name,
        "tid": event.tid,
        "ts": float(at),
        "dur": float(_stamp(event.dur, file)),
    }
    if category in {"kernel", "gpu_memcpy"}:
        row["args"] = {"device": 0, "stream": int(stream[0]) if stream else 0}
    elif category in {"cpu_op", "user_annotation"}:
        row["args"] = event.args
    return row


def _stamp(told: float | str, file: str) -> Decimal:
    """Return microseconds to the digit: as a float, today's lack the nanoseconds."""
    try:
        value = Decimal(str(told))
    except InvalidOperation:
        value = Decimal("nan")
    if not value.is_finite() or abs(value) > _MOST_US:
        raise TraceError(f"{str(told)[:40]!r} is no time", file=file, hint="copy it again")
    return value


def _union(intervals: Sequence[tuple[Decimal, Decimal]]) -> list[tuple[Decimal, Decimal]]:
    joined: list[tuple[Decimal, Decimal]] = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((start, end))
    return joined


def _is_inside(at: Decimal, covered: Sequence[tuple[Decimal, Decimal]]) -> bool:
    before = bisect_right(covered, at, key=lambda interval: interval[0]) - 1
    return before >= 0 and at <= covered[before][1]


FORMAT = Format(
    name=NAME,
    a_file="a trace of Ascend",
    position=3,
    in_names=("trace_view",),
    recognise=recognise,
    read=read,
)
