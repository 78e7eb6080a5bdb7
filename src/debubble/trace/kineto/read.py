"""One Kineto file in → one `RankTrace` out, with a gap for everything missing or broken."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from debubble.errors import Code, Gap, NotATrace, TraceError
from debubble.trace.columns import (
    FIRST_COMMUNICATION_KIND,
    I64,
    LAST_NS,
    UNKNOWN,
    Annotations,
    CpuOperators,
    Header,
    KernelKind,
    Kernels,
    Launches,
    Memory,
    MemoryDevice,
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
    find_next,
    join_launches,
)
from debubble.trace.format import Reading, TraceFile
from debubble.trace.kineto.document import NAME, Document, not_a_trace, parse_header
from debubble.trace.kineto.operators import Communication, fold_operators
from debubble.trace.kineto.reduce import (
    FOREIGN_DEVICE,
    FOREIGN_PROCESS,
    Reducer,
    Rows,
    outermost,
)
from debubble.trace.source import DEFAULT_LIMITS, Limits, Source
from debubble.units import NS_PER_US, counted, show_count

Positions = NDArray[np.intp]

_MAX_TIME_US = LAST_NS / NS_PER_US
_MAX_DURATION_US = _MAX_TIME_US / 4


def judge_times(rows: Rows, bad: Counter[str], *, durations: bool = True) -> Positions:
    """Return the rows whose times can be used, sorted by start; count the others by what is bad."""
    start = rows["ts"].astype(np.float64)
    good = np.abs(start) < _MAX_TIME_US  # not missing, NaN or absurd
    bad["no usable start"] += int((~good).sum())
    if durations:
        length = rows["dur"].astype(np.float64)
        negative, usable = length < 0, (length >= 0) & (length < _MAX_DURATION_US)
        bad["a negative duration"] += int((good & negative).sum())
        bad["no usable duration"] += int((good & ~negative & ~usable).sum())
        good &= usable
    kept = np.flatnonzero(good)
    return kept[np.argsort(start[kept], kind="stable")]


def make_trace(document: Document, reducer: Reducer) -> RankTrace:
    """Sort, convert and join everything that was gathered."""
    header, wrong_fields = parse_header(document.fields)
    base_ns, bad = header.base_time_ns, Counter[str]()
    rows, order = reducer.launches, judge_times(reducer.launches, bad)
    launches = build(
        Launches,
        len(order),
        **_spans(rows, order, base_ns),
        thread=rows["thread"][order],
        correlation=rows["correlation"][order],
    )
    device_order = judge_times(reducer.device, bad)
    kernels = _kernels(reducer, device_order, base_ns, launches)
    communication = _communication(reducer, header, device_order, bad)
    kernel_of = _kernels_of_operators(communication, kernels, launches)
    kernels, operators = _settle(communication, kernels, kernel_of)
    cpu_order = np.zeros(0, dtype=np.intp)
    if not len(kernels):
        reducer.cpu_operators.keep(outermost(reducer.cpu_operators))
        cpu_order = judge_times(reducer.cpu_operators, bad)
    ranges, order = reducer.annotations, judge_times(reducer.annotations, bad)
    file = document.source.file
    trace = RankTrace(
        file=file,
        format=NAME,
        header=header,
        names=reducer.names.all(),
        threads=tuple(
            Thread(identity=str(identity), name=reducer.thread_names.get(identity, ""))
            for identity in reducer.threads
        ),
        groups=communication.groups,
        kernels=kernels,
        launches=launches,
        operators=operators,
        annotations=build(
            Annotations,
            len(order),
            **_spans(ranges, order, base_ns),
            thread=ranges["thread"][order],
            stream=fit_int32(ranges["stream"][order]),
        ),
        memory=_memory(reducer.memory, base_ns, bad),
        cpu_operators=build(
            CpuOperators,
            len(cpu_order),
            **_spans(reducer.cpu_operators, cpu_order, base_ns),
            thread=reducer.cpu_operators["thread"][cpu_order],
        ),
        events=sum(reducer.counts.values()) + document.skipped,
        inflated_bytes=document.source.inflated_bytes,
        rank=header.rank,
    )
    gaps = list(_find_damage(document, trace.events, bad))
    if wrong_fields:
        named = ", ".join(wrong_fields)
        message = f"its header is not what it should be, and counts as absent: {named}"
        gaps.append((Code.WRONG_FIELDS, message, _AGAIN))
    gaps += _find_unread(document, reducer, trace)
    return replace(
        trace,
        gaps=tuple(
            Gap(code=code, message=message, hint=hint, file=file, rank=header.rank)
            for code, message, hint in gaps
        ),
    )


def _spans(rows: Rows, order: Positions, base_ns: int) -> dict[str, NDArray[np.generic]]:
    """Return what all that lasts has: its times in nanoseconds, and its name."""
    return {
        "start_ns": _to_ns(rows["ts"][order], base_ns),
        "duration_ns": _to_ns(rows["dur"][order]),
        "name": rows["name"][order],
    }


def _to_ns(times: NDArray[np.generic], base_ns: int = 0) -> I64:
    """Convert exactly: the whole part and the fraction apart, so that no digit is rounded twice."""
    microseconds = times.astype(np.float64)
    whole = np.floor(microseconds)
    nanoseconds = np.rint((microseconds - whole) * NS_PER_US).astype(np.int64)
    return whole.astype(np.int64) * NS_PER_US + nanoseconds + np.int64(base_ns)


def _kernels(reducer: Reducer, order: Positions, base_ns: int, launches: Launches) -> Kernels:
    rows = reducer.device
    kind_of_name = np.array(
        [classify_kernel_name(name) for name in reducer.names.all()] or [KernelKind.COMPUTE],
        dtype=np.uint8,
    )
    correlation = rows["correlation"][order].astype(np.int64)
    return build(
        Kernels,
        len(order),
        **_spans(rows, order, base_ns),
        kind=kind_of_name[rows["name"][order].astype(np.int32)],
        device=fit_int32(rows["device"][order]),
        stream=fit_int32(rows["stream"][order]),
        correlation=correlation,
        graph=rows["graph"][order],
        launch=join_launches(correlation, launches.correlation),
    )


def _memory(rows: Rows, base_ns: int, bad: Counter[str]) -> Memory:
    order = judge_times(rows, bad, durations=False)
    on_cpu = rows["device_type"][order] == MemoryDevice.CPU
    return build(
        Memory,
        len(order),
        start_ns=_to_ns(rows["ts"][order], base_ns),
        device_type=np.where(on_cpu, MemoryDevice.CPU, MemoryDevice.DEVICE),
        device=fit_int32(rows["device"][order]),
        change_bytes=rows["bytes"][order],
        allocated_bytes=rows["allocated"][order],
        reserved_bytes=rows["reserved"][order],
    )


def _communication(
    reducer: Reducer, header: Header, device_order: Positions, bad: Counter[str]
) -> Communication:
    rows = reducer.operators
    order = judge_times(rows, bad)
    device_row = rows["device_row"][order].astype(np.int64)
    sorted_row = np.full(len(reducer.device) + 1, UNKNOWN, dtype=np.int64)
    sorted_row[device_order] = np.arange(len(device_order))
    columns = _spans(rows, order, header.base_time_ns) | {
        "thread": rows["thread"][order],
        "device_row": sorted_row[device_row],  # row -1 is the last one, and unknown
    }
    args = [reducer.operator_args[row] for row in order.tolist()]
    return fold_operators(columns, args, reducer.names, header)


def _kernels_of_operators(
    communication: Communication, kernels: Kernels, launches: Launches
) -> Positions:
    """Return the kernel that carried out each operator; -1 where none did or none is known.

    An operator that launches holds the launch. A coalesced one only queues: its batch is launched
    inside the bracket that follows it on the same thread.
    """
    operators = communication.operators
    kernel_of = np.full(len(operators), UNKNOWN, dtype=np.intp)
    speaking = np.flatnonzero((kernels.kind >= FIRST_COMMUNICATION_KIND) & (kernels.launch >= 0))
    called_ns = launches.start_ns[kernels.launch[speaking]]
    caller = launches.thread[kernels.launch[speaking]]
    end_ns = operators.start_ns + operators.duration_ns
    direct = find_enclosing(called_ns, caller, operators.start_ns, end_ns, operators.thread)
    kernel_of[direct[direct >= 0]] = speaking[direct >= 0]
    brackets = communication.brackets
    batched = find_enclosing(called_ns, caller, *brackets.T)
    kernel_of_bracket = np.full(len(brackets) + 1, UNKNOWN, dtype=np.intp)
    kernel_of_bracket[batched[batched >= 0]] = speaking[batched >= 0]
    bracket = find_next(end_ns, operators.thread, brackets[:, 0], brackets[:, 2])
    # Among one rank alone there is nothing to launch: Megatron calls such collectives all the same.
    alone = np.array([len(group.ranks) == 1 for group in communication.groups] + [False])
    moves_data = (Operation.SEND, Operation.RECEIVE, Operation.COLLECTIVE)
    queued = (kernel_of < 0) & ~communication.on_host & np.isin(operators.operation, moves_data)
    queued &= ~alone[operators.group]
    kernel_of[queued] = kernel_of_bracket[bracket[queued]]
    own = np.flatnonzero(communication.device_row >= 0)
    kernel_of[own] = communication.device_row[own]
    return kernel_of


def _settle(
    communication: Communication, kernels: Kernels, kernel_of: Positions
) -> tuple[Kernels, Operators]:
    """Name each kernel's kind by its operators, and drop what kernels say twice.

    A kernel's own description is kept only where no operator of the host tells the same.
    """
    operators = communication.operators
    told_by_host = np.zeros(len(kernels) + 1, dtype=bool)
    on_device = communication.device_row >= 0
    told_by_host[kernel_of[~on_device & (kernel_of >= 0)]] = True
    kept = ~on_device | ~told_by_host[kernel_of]
    kind = kernels.kind.copy()
    for operation, meant in (
        (Operation.COLLECTIVE, KernelKind.COLLECTIVE),
        (Operation.BARRIER, KernelKind.COLLECTIVE),
        (Operation.SEND, KernelKind.PEER),
        (Operation.RECEIVE, KernelKind.PEER),
    ):
        rows = kernel_of[kept & (operators.operation == operation)]
        kind[rows[rows >= 0]] = meant
    kernel = kernel_of[kept].astype(np.int32)
    return replace(kernels, kind=kind), replace(operators.take(kept), kernel=kernel)


_AGAIN = "copy the file again, or record the trace again"


def read_known(known: TraceFile, limits: Limits) -> Reading:
    """Read the one rank of a file."""
    return Reading(traces=(read_kineto(known.file, limits),))


def read_kineto(file: str, limits: Limits = DEFAULT_LIMITS, text: bytes | None = None) -> RankTrace:
    """Read and reduce one file, or the text that was made of it in Kineto's form.

    Raises `TraceError` only when nothing of use is in it.
    """
    source = Source(file, limits, text)
    document, reducer = _gather(source, cpu_operators=None)
    if not len(reducer.device) and not document.cpu_operators:
        document, reducer = _gather(source, cpu_operators=True)
    if not sum(reducer.counts.values()) + document.skipped:
        raise _nothing_in(document)
    return make_trace(document, reducer)


def _gather(source: Source, *, cpu_operators: bool | None) -> tuple[Document, Reducer]:
    """Run the stream through the reducer.

    CPU operators are a third of a trace and of no use beside kernels. Unless told, they are read
    only where the header names no device; a device whose kernels then do not come costs a second
    reading.
    """
    document = Document(source, cpu_operators=cpu_operators)
    reducer = Reducer()
    collecting = gc.isenabled()
    gc.disable()  # events form no cycles: the collector would only cost time
    try:
        for batch in document.batches():
            reducer.add(batch, cpu_operators=bool(document.cpu_operators))
    finally:
        if collecting:
            gc.enable()
    return document, reducer


def _nothing_in(document: Document) -> TraceError:
    file = document.source.file
    if document.source.damage:
        return TraceError(
            f"{document.source.damage}, before the first event",
            hint=_AGAIN,
            file=file,
        )
    if document.damage.malformed:
        return not_a_trace({}, file)
    return NotATrace(
        "holds no events",
        hint="call prof.step() in the loop, and export in on_trace_ready",
        file=file,
    )


def _find_unread(
    document: Document, reducer: Reducer, trace: RankTrace
) -> Iterator[tuple[Code, str, str]]:
    """Yield code, message and hint of events that are of no use."""
    wrong = document.damage.wrong + reducer.wrong
    if wrong:
        yield (
            Code.WRONG_FIELDS,
            f"{counted(wrong, 'event')} with a field of a wrong type, which counts as absent",
            _AGAIN,
        )
    foreign = {name: n for name, n in reducer.counts.items() if FOREIGN_DEVICE.match(name)}
    processes = sorted(filter(FOREIGN_PROCESS.match, reducer.process_names))
    read = (reducer.device, reducer.launches, reducer.cpu_operators, reducer.operators)
    if foreign or (processes and not len(trace.kernels)):
        listed = ", ".join(
            [*(f"{show_count(n)} {name}" for name, n in sorted(foreign.items())), *processes]
        )
        yield (
            Code.FOREIGN_DEVICE,
            f"device events that are not read: {listed}",
            "CUDA, ROCm, XPU and Ascend are read; of any device, a table of passes",
        )
    elif not any(map(len, (*read, reducer.annotations, reducer.memory))):
        events = counted(sum(reducer.counts.values()), "event")
        if reducer.counts["cuda_runtime"]:  # the host asked its device, and gave it nothing to do
            yield (
                Code.NO_KERNELS,
                f"nothing ran on its device while it was captured: {events}, none of them work",
                "capture for longer, while every rank has work",
            )
            return
        yield (
            Code.NOT_UNDERSTOOD,
            f"none of its {events} is of a kind that is read: another tool wrote it",
            "give traces of torch.profiler, or spans of passes (`debubble` reads F and B, by rank)",
        )
    elif trace.header.devices and not len(trace.kernels):
        yield (
            Code.NO_KERNELS,
            "there is a device but none of its kernels was traced; CPU operators are used",
            "record with activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]",
        )


def _find_damage(
    document: Document, events: int, bad: Counter[str]
) -> Iterator[tuple[Code, str, str]]:
    """Yield code, message and hint of what is broken in this file."""
    damage = document.source.damage
    if not damage and not document.closed and not document.bare:
        damage = "the file ends inside its list of events"
    elif not damage and document.tail_lost:
        damage = "what follows the list of events is damaged and was not read"
    if damage:
        kept = f"{counted(events, 'event')} before that kept"
        yield Code.TRUNCATED, f"{damage}; {kept}", _AGAIN
    if document.damage.malformed:
        sample = f", the first near {document.damage.first_malformed!r}"
        message = f"{counted(document.damage.malformed, 'malformed event')} left out{sample}"
        yield Code.MALFORMED, message, _AGAIN
    if document.damage.bad_text:
        names = counted(document.damage.bad_text, "name")
        yield Code.BAD_TEXT, f"{names} with bad UTF-8; the bad bytes were replaced", ""
    for problem, count in bad.items():
        if count:
            message = f"{counted(count, 'event')} with {problem} left out"
            hint = "a profiler bug: newer torch versions write them less often"
            yield Code.BAD_TIMES, message, hint
