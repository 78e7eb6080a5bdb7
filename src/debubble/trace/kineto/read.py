"""One Kineto file in → one `RankTrace` out, with a gap for everything missing or broken."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from debubble.errors import Code, Gap, NotATrace, TraceError
from debubble.trace.columns import Header, RankTrace, Thread
from debubble.trace.format import Reading, TraceFile
from debubble.trace.kineto.document import NAME, Document, not_a_trace, parse_header, wrong_fields
from debubble.trace.kineto.reduce import FOREIGN_DEVICE, FOREIGN_NEEDS, FOREIGN_PROCESS, Reducer
from debubble.trace.kineto.tables import BadTimes, Tables, make_tables
from debubble.trace.source import DEFAULT_LIMITS, Limits, Source
from debubble.units import counted, show_count

_AGAIN = "copy the file again, or record the trace again"


def read_known(known: TraceFile, limits: Limits) -> Reading:
    """Read the one rank of a file."""
    return Reading(traces=(read_kineto(known.file, limits),))


def read_kineto(file: str, limits: Limits = DEFAULT_LIMITS) -> RankTrace:
    """Read and reduce one file. Raises `TraceError` only when nothing of use is in it."""
    document, reducer = _gather(file, limits, cpu_operators=None)
    if not len(reducer.device) and not document.cpu_operators:
        document, reducer = _gather(file, limits, cpu_operators=True)
    events = sum(reducer.counts.values()) + document.skipped
    if not events:
        raise _nothing_in(document)
    header = parse_header(document.fields)
    bad = BadTimes()
    tables = make_tables(reducer, header, bad)
    return RankTrace(
        file=file,
        format=NAME,
        header=header,
        names=reducer.names.all(),
        threads=tuple(
            Thread(identity=str(identity), name=reducer.thread_names.get(identity, ""))
            for identity in reducer.threads
        ),
        groups=tables.groups,
        kernels=tables.kernels,
        launches=tables.launches,
        operators=tables.operators,
        annotations=tables.annotations,
        memory=tables.memory,
        cpu_operators=tables.cpu_operators,
        events=events,
        inflated_bytes=document.source.inflated_bytes,
        rank=header.rank,
        gaps=tuple(
            Gap(code=code, message=message, hint=hint, file=file, rank=header.rank)
            for code, message, hint in _find_gaps(document, reducer, header, tables, bad)
        ),
    )


def read_kineto_text(data: bytes, file: str, format_name: str, limits: Limits) -> RankTrace:
    """Read a trace that was made of a file of another format, as one of that file."""
    with TemporaryDirectory() as place:
        path = Path(place) / "rank.json"
        path.write_bytes(data)
        trace = read_kineto(str(path), limits)
    gaps = tuple(replace(gap, file=file) for gap in trace.gaps)
    return replace(trace, file=file, format=format_name, gaps=gaps)


def _gather(file: str, limits: Limits, *, cpu_operators: bool | None) -> tuple[Document, Reducer]:
    """Run the stream through the reducer.

    CPU operators are a third of a trace and of no use beside kernels. Unless told, they are read
    only where the header names no device; a device whose kernels then do not come costs a second
    reading.
    """
    document = Document(Source(file, limits), cpu_operators=cpu_operators)
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
    if document.malformed:
        return not_a_trace({}, file)
    return NotATrace(
        "holds no events",
        hint="call prof.step() in the loop, and export in on_trace_ready",
        file=file,
    )


def _find_gaps(
    document: Document, reducer: Reducer, header: Header, tables: Tables, bad: BadTimes
) -> Iterator[tuple[Code, str, str]]:
    """Yield code, message and hint of everything that was missing or broken in this file."""
    yield from _find_damage(document, sum(reducer.counts.values()) + document.skipped)
    for problem, count in bad.counts.items():
        if count:
            yield (
                Code.BAD_TIMES,
                f"{counted(count, 'event')} with {problem} left out",
                "a profiler bug: newer torch versions write them less often",
            )
    wrong = document.wrong + reducer.wrong
    if wrong:
        yield (
            Code.WRONG_FIELDS,
            f"{counted(wrong, 'event')} with a field of a wrong type, which counts as absent",
            _AGAIN,
        )
    fields = wrong_fields(document.fields)
    if fields:
        yield (
            Code.WRONG_FIELDS,
            f"its header is not what it should be, and counts as absent: {', '.join(fields)}",
            _AGAIN,
        )
    foreign = {name: n for name, n in reducer.counts.items() if FOREIGN_DEVICE.match(name)}
    processes = sorted(filter(FOREIGN_PROCESS.match, reducer.process_names))
    read = (reducer.device, reducer.launches, reducer.cpu_operators, reducer.operators)
    if foreign or (processes and not len(tables.kernels)):
        listed = ", ".join(
            [*(f"{show_count(n)} {name}" for name, n in sorted(foreign.items())), *processes]
        )
        yield (
            Code.FOREIGN_DEVICE,
            f"device events that are not read: {listed}",
            _needed(" ".join((*foreign, *processes))),
        )
    elif not any(map(len, (*read, reducer.annotations, reducer.memory))):
        events = counted(sum(reducer.counts.values()), "event")
        yield (
            Code.NOT_UNDERSTOOD,
            f"none of its {events} is of a kind that is read: another tool wrote it",
            "give traces of torch.profiler, or spans of passes (`debubble` reads F and B, by rank)",
        )
    elif header.devices and not len(tables.kernels):
        yield (
            Code.NO_KERNELS,
            "there is a device but none of its kernels was traced; CPU operators are used",
            "record with activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]",
        )


def _needed(named: str) -> str:
    """Say what would be needed of a device that is not read."""
    whose = next((whose for pattern, whose in FOREIGN_NEEDS if pattern.search(named)), "")
    read = "CUDA, ROCm, XPU and Ascend are read; of any device, a table of passes is"
    return f"{whose}; {read}" if whose else read


def _find_damage(document: Document, events: int) -> Iterator[tuple[Code, str, str]]:
    damage = document.source.damage
    if not damage and not document.closed and not document.bare:
        damage = "the file ends inside its list of events"
    elif not damage and document.tail_lost:
        damage = "what follows the list of events is damaged and was not read"
    if damage:
        kept = f"{counted(events, 'event')} before that kept"
        yield Code.TRUNCATED, f"{damage}; {kept}", _AGAIN
    if document.malformed:
        sample = f", the first near {document.first_malformed!r}"
        message = f"{counted(document.malformed, 'malformed event')} left out{sample}"
        yield Code.MALFORMED, message, _AGAIN
    if document.bad_text:
        names = counted(document.bad_text, "name")
        yield Code.BAD_TEXT, f"{names} with bad UTF-8; the bad bytes were replaced", ""
