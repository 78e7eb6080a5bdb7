"""Chrome traces of passes in → `OpTable` out: what tools of a framework's own write for Perfetto.

    {"name": "forward", "ph": "X", "ts": 10, "dur": 90, "pid": 3,
     "args": {"microbatch": 2, "chunk": 0, "iteration": 7}}

Spans called forward or backward (`F`, `fwd`, `backward_step`, `B3`), as `X`, or as `B` and `E`.
Whose they are: a rank, a stage or a `pp_rank` among their arguments, else what their thread and
process are called (ByteDance's "DP rank [1]" and "PP rank 2, TP rank 0, compute"; MegatronApp's
"DP0-PP1-TP0"), else their process. Which microbatch: by argument, else by the number in their name,
else counted. What is called a send, a receive, a reduction or an optimizer is read as well,
anything else is passed over.

zero-bubble's tools write no Chrome trace, but a list of spans a device, in nanoseconds:

    [[{"type": "F", "start_time": 0, "end_time": 90}, …, {"type": "Optimizer", …}], […]]
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any

import msgspec

from debubble.errors import Code, Gap, TraceError
from debubble.trace.columns import UNKNOWN
from debubble.trace.format import OTHER, Format, Reading, TraceFile
from debubble.trace.optable import Op, shared_stages, table_of_passes
from debubble.trace.optable.files import ALIASES, classify_op, exchange_of
from debubble.trace.source import Limits, Source
from debubble.units import counted

NAME = "spans of passes"
# Held whole: a million spans take about a gigabyte.
_MOST_BYTES = 256 * 1024**2
_PASSES = (Op.FORWARD, Op.BACKWARD, Op.INPUT_GRAD, Op.WEIGHT_GRAD)
# A list of spans a device; or events, and nothing that only torch.profiler writes, or debubble.
_DEVICES = re.compile(rb'(?s)\A\s*\[\s*\[\s*\{[^{}]*"(?:type|(?:start|end)_time)"\s*:')
_SIGN = re.compile(
    _DEVICES.pattern + rb'|\A\s*[{\[](?=.*"ph")(?!.*(?:ProfilerStep#|"(?:schemaVersion'
    rb'|deviceProperties|distributedInfo|traceName|cpu_op|cuda_runtime|kernel)"))'
)
_NAMES = re.compile(rb'"(?:name|type)"\s*:\s*"([^"\\]{1,80})"')
# What a thread or process is called after: `DP rank [3]`, `PP rank 1, TP rank 0`, `DP0-PP1-TP0`.
_CALLED = re.compile(r"\b(dp|pp|tp)[\s_-]*(?:rank)?[\s_-]*\[?(\d{1,7})", re.IGNORECASE)
_CALLED_FOR = {"dp": "pipeline", "pp": "stage", "tp": "tensor"}
# A number at the end of a name is the microbatch: `F3`, `forward mb 3`, `backward_step_12`.
_NUMBERED = re.compile(
    r"^(.*?)[\s_#:-]*(?:mb|microbatch|micro_batch)?[\s_#:-]*(\d{1,6})$", re.IGNORECASE
)
_KEYS = ("rank", "stage", "chunk", "pipeline", "tensor", "step", "microbatch", "bytes")
_START = 4096
_WHOLE = re.compile(r"\s*-?[0-9]{1,18}\s*")
_FEWEST = 2


class _Event(msgspec.Struct):
    """One event of a Chrome trace."""

    ph: str = ""
    name: str = ""
    ts: float = 0.0
    dur: float = 0.0
    pid: int | str = 0
    tid: int | str = 0
    args: dict[str, Any] | None = None


class _Timed(msgspec.Struct):
    """One span of a device, as zero-bubble's tools write it."""

    type: str
    start_time: float
    end_time: float
    minibatch: int | None = None


class _Document(msgspec.Struct):
    """The object form of a Chrome trace."""

    events: list[_Event] = msgspec.field(name="traceEvents")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Span:
    """One event that has a length."""

    event: _Event
    told: dict[str, int | None]
    """Whose it is and which, as far as arguments and names say so."""
    by_thread: bool
    """Whether the name of its thread says the stage: then that is the place of a rank."""
    start_ns: int
    duration_ns: int
    op: Op
    number: int | None
    """In its name."""


def _classify(name: str) -> tuple[Op, int | None]:
    """Say what a span is by its name, and the number at the end of it."""
    op = classify_op(name)
    if op is not Op.OTHER:
        return op, None
    found = _NUMBERED.match(name)
    return (classify_op(found[1]), int(found[2])) if found else (op, None)


def recognise(file: str, prefix: bytes) -> TraceFile | None:
    """Tell it by spans that are called as passes are."""
    names = {name.decode("utf-8", "replace") for name in _NAMES.findall(prefix)}
    ops = [_classify(name)[0] for name in names]
    if Op.FORWARD not in ops or sum(op in _PASSES for op in ops) < _FEWEST:
        return None
    if b'"rel_ts"' in prefix and b'"ts"' not in prefix:
        why = TraceError(
            "is what MegatronApp records of one rank, whose times count from its own iterations",
            hint="put all ranks together with its scripts/aggregate.py, and give the benchmark.json"
            " that it writes",
            file=file,
        )
        return TraceFile(file=file, format=OTHER, why_not=why)
    return TraceFile(file=file, format=NAME)


def read(known: TraceFile, limits: Limits) -> Reading:
    """Read a trace whole."""
    held = replace(limits, inflated_bytes=min(limits.inflated_bytes, _MOST_BYTES))
    data = b"".join(Source(known.file, held).pieces())
    form: Any = list[_Event] if data.lstrip()[:1] == b"[" else _Document
    form = list[list[_Timed]] if _DEVICES.match(data[:_START]) else form
    try:
        said = msgspec.json.decode(data, type=form, strict=False)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        hint = "spans need name, ph, ts, and dur or an E for each B; a list of spans a device needs"
        hint += " type, start_time and end_time"
        message = f"was told by its spans of passes, and cannot be read: {error}"
        raise TraceError(message, file=known.file, hint=hint) from error
    events = said.events if isinstance(said, _Document) else said
    if form == list[list[_Timed]]:
        events = list(_events_of(said))
    spans, gaps = _pair(events, known.file)
    if not any(span.op in _PASSES for span in spans):
        raise TraceError("no pass in it has a length", file=known.file)
    tensor = [span.told["tensor"] or 0 for span in spans]
    gaps += shared_stages(tensor, known.file)
    spans = [span for span, at in zip(spans, tensor, strict=True) if at == min(tensor)]
    rows = list(_rows(spans, known.file))
    return Reading(
        table=table_of_passes(
            rows, file=known.file, format=NAME, inflated_bytes=len(data), gaps=gaps
        )
    )


def _events_of(devices: Sequence[Sequence[_Timed]]) -> Iterator[_Event]:
    """Yield the spans of all devices as events; an optimizer ends a step."""
    for rank, spans in enumerate(devices):
        step = 0
        for span in sorted(spans, key=lambda span: span.start_time):
            args = {"step": step, "microbatch": span.minibatch}
            yield _Event(
                ph="X",
                name=span.type,
                ts=span.start_time / 1000,
                dur=(span.end_time - span.start_time) / 1000,
                pid=rank,
                args={name: value for name, value in args.items() if value is not None},
            )
            step += classify_op(span.type) is Op.OPTIMIZER


def _pair(events: Sequence[_Event], file: str) -> tuple[list[_Span], tuple[Gap, ...]]:
    """Give every span its length: `X` has one, a `B` ends with the next `E` of its thread.

    What its thread and process are called says whose it is, unless its own arguments do.
    """
    spans: list[_Span] = []
    open_: dict[tuple[int | str, int | str], list[_Event]] = {}
    called: dict[tuple[object, ...], dict[str, Any]] = {}
    for event in events:
        if event.ph == "M" and event.name in {"process_name", "thread_name"}:
            whose = (event.pid,) if event.name == "process_name" else (event.pid, event.tid)
            words = _CALLED.findall(str((event.args or {}).get("name", "")))
            called[whose] = {_CALLED_FOR[word.lower()]: int(number) for word, number in words}

    def add(event: _Event, end: float, args: dict[str, Any]) -> None:
        op, number = _classify(event.name)
        if op is Op.OTHER and not exchange_of(event.name):
            return
        if end >= event.ts and isfinite(end) and isfinite(event.ts):
            start = round(event.ts * 1000)
            names = called.get((event.pid,), {}) | called.get((event.pid, event.tid), {})
            told = {key: _told(args, key) for key in _KEYS}
            spans.append(
                _Span(
                    event=event,
                    told={key: names.get(key) if value is None else value
                          for key, value in told.items()},
                    by_thread="stage" in called.get((event.pid, event.tid), {}),
                    start_ns=start,
                    duration_ns=round(end * 1000) - start,
                    op=op,
                    number=number,
                )
            )  # fmt: skip

    # What ends where another begins ends first.
    for event in sorted(events, key=lambda event: (event.ts, event.ph != "E")):
        thread = (event.pid, event.tid)
        if event.ph == "X":
            add(event, event.ts + event.dur, event.args or {})
        elif event.ph == "B":
            open_.setdefault(thread, []).append(event)
        elif event.ph == "E" and open_.get(thread):
            begun = open_[thread].pop()
            add(begun, event.ts, {**(begun.args or {}), **(event.args or {})})
    left = sum(map(len, open_.values()))
    gap = Gap(
        code=Code.OPEN_RANGES,
        message=f"{counted(left, 'span')} without an end left out",
        hint="let the run end before the trace is written",
        file=file,
    )
    return spans, (gap,) if left else ()


def _rows(spans: Sequence[_Span], file: str) -> Iterator[dict[str, int | str]]:
    """Yield a row a span, with its rank, stage, microbatch and step as far as they are told."""
    lane = _lanes(spans)
    place = {key: number for number, key in enumerate(sorted(set(lane.values()), key=_natural))}
    counted_through = _is_of_several(spans, lane)
    seen: dict[tuple[object, ...], int] = {}
    for span in sorted(spans, key=lambda span: span.start_ns):
        told, own = span.told, lane[id(span)]
        rank = told["rank"]
        if rank is None:
            rank = UNKNOWN if counted_through else own if isinstance(own, int) else place[own]
        pipeline = told["pipeline"]
        if pipeline is None:
            pipeline = place[own] if counted_through and len(place) > 1 else 0
        stage = told["stage"] if told["stage"] is not None else place[own]
        microbatch = told["microbatch"]
        microbatch = span.number if microbatch is None else microbatch
        who = rank, pipeline, stage, told["chunk"], span.op, told["step"]
        if microbatch is None and span.op in _PASSES:
            microbatch = seen.get(who, 0)
            seen[who] = microbatch + 1
        step = told["step"]
        if step is None:  # a microbatch that comes again is of the next step
            again = (*who, microbatch, "again")
            step = seen.get(again, 0) if span.op in _PASSES else 0
            seen[again] = step + 1
        row: dict[str, int | str] = {
            "step": step,
            "rank": rank,
            "pipeline": pipeline,
            "stage": stage,
            "microbatch": -1 if microbatch is None else microbatch,
            "op": span.event.name if span.number is None else _stem(span.event.name),
            "start": span.start_ns,
            "duration": span.duration_ns,
            "bytes": -1 if told["bytes"] is None else told["bytes"],
        }
        if min(told["rank"] or 0, stage, pipeline) < 0:
            raise TraceError(f"the span {span.event.name!r} has a negative rank", file=file)
        yield row | ({} if told["chunk"] is None else {"chunk": told["chunk"]})


def _is_of_several(spans: Sequence[_Span], lane: dict[int, int | str]) -> bool:
    """Tell whether processes are no ranks, but hold several each: all of a job, or a replica's."""
    held: dict[int | str, set[tuple[int | None, int]]] = {lane[id(span)]: set() for span in spans}
    for span in spans:
        if span.told["stage"] is not None and span.op in _PASSES:
            held[lane[id(span)]].add((span.told["pipeline"], span.told["stage"]))
    several = any(len(places) > 1 for places in held.values())
    by_place = any(span.by_thread or span.told["chunk"] is not None for span in spans)
    twice = sum(map(len, held.values())) > len(set().union(*held.values()))
    return several and (by_place or len(held) == 1 or twice)


def _lanes(spans: Sequence[_Span]) -> dict[int, int | str]:
    """Return whose each span is where nothing says it: its process, or its thread.

    Its thread where there is one process, and each thread goes forward and back.
    """
    kinds: dict[int | str, set[bool]] = {}
    for span in spans:
        if span.op in _PASSES:
            kinds.setdefault(span.event.tid, set()).add(span.op is Op.FORWARD)
    one = len({span.event.pid for span in spans}) == 1
    by_thread = one and len(kinds) > 1 and all(len(both) > 1 for both in kinds.values())
    return {id(span): span.event.tid if by_thread else span.event.pid for span in spans}


def _stem(name: str) -> str:
    found = _NUMBERED.match(name)
    return found[1] if found else name


def _told(args: dict[str, Any], key: str) -> int | None:
    """Return a number among the arguments of a span, by any name that tables have for it."""
    spelled = {re.sub(r"[^a-z0-9]+", "_", str(name).lower()): name for name in args}
    for alias in ALIASES[key]:
        if alias in spelled:
            value = args[spelled[alias]]
            if isinstance(value, str) and _WHOLE.fullmatch(value):
                return int(value)
            if isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value):
                return int(value)
    return None


def _natural(pid: int | str) -> tuple[int, str]:
    digits = re.findall(r"\d+", str(pid))
    return (int(digits[-1]) if digits else -1, str(pid))


FORMAT = Format(
    name=NAME,
    a_file="a Chrome trace of passes",
    position=5,
    in_names=(),
    sign=(_SIGN,),
    recognise=recognise,
    read=read,
    one_a_rank=False,
)
