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
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import isfinite
from typing import Any

import msgspec

from debubble.errors import Code, Gap, TraceError
from debubble.trace.format import OTHER, Format, Reading, TraceFile, decode_events, decode_json
from debubble.trace.optable import HELD_BYTES, PASSES, Op, RawTable, make_op_table, shared_stages
from debubble.trace.optable.files import find_columns, ops_of
from debubble.trace.source import Limits, inflate
from debubble.units import counted

NAME = "spans of passes"
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

_WHOLE = re.compile(r"\s*-?[0-9]{1,18}\s*")
# Whose a pass is; and what else a span may tell.
_OWNER = ("rank", "pipeline", "stage", "chunk", "step")
_KEYS = (*_OWNER, "microbatch", "bytes")

Lane = int | str


class _Event(msgspec.Struct):
    """One event of a Chrome trace."""

    ph: str = ""
    name: str = ""
    ts: float = 0.0
    dur: float = 0.0
    pid: Lane = 0
    tid: Lane = 0
    args: dict[str, Any] | None = None


class _Timed(msgspec.Struct):
    """One span of a device, as zero-bubble's tools write it."""

    type: str
    start_time: float
    end_time: float
    minibatch: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Span:
    """One event that has a length, with what its arguments and the names of its thread tell."""

    event: _Event
    fields: Mapping[str, int]
    stage_of_thread: bool
    """Whether the name of its thread says the stage: then that is the position of a rank."""
    op: Op
    name: str
    """Without the number at its end."""


def _classify(name: str) -> tuple[Op, str, int | None]:
    """Say what a span is by its name, and take the number at its end off it.

    An exchange of messages is what it sends first; the table makes a row of each message.
    """
    op = ops_of(name)[0]
    match = _NUMBERED.match(name) if op is Op.OTHER else None
    return (ops_of(match[1])[0], match[1], int(match[2])) if match else (op, name, None)


def recognise(file: str, prefix: bytes) -> TraceFile | None:
    """Tell it by spans that are called as passes are."""
    if not _SIGN.match(prefix):
        return None
    names = {name.decode("utf-8", "replace") for name in _NAMES.findall(prefix)}
    ops = [_classify(name)[0] for name in names]
    if Op.FORWARD not in ops or sum(op in PASSES for op in ops) < 2:
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
    data = inflate(known.file, limits, HELD_BYTES)
    problem = "was told by its spans of passes, and cannot be read"
    hint = "spans need name, ph, ts, and dur or an E for each B; a list of spans a device needs "
    hint += "type, start_time and end_time"
    if _DEVICES.match(data):
        devices = decode_json(data, list[list[_Timed]], known.file, problem=problem, hint=hint)
        events = list(_events_of(devices))
    else:
        events = decode_events(data, _Event, known.file, problem=problem, hint=hint)
    spans = list(_spans(events))
    if not any(span.op in PASSES for span in spans):
        raise TraceError("no pass in it has a length", file=known.file)
    left = sum(event.ph == "B" for event in events)  # those that ended are spans
    gap = Gap(
        code=Code.OPEN_RANGES,
        message=f"{counted(left, 'span')} without an end left out",
        hint="let the run end before the trace is written",
        file=known.file,
    )
    tensor = [span.fields.get("tensor", 0) for span in spans]
    spans = [span for span, rank in zip(spans, tensor, strict=True) if rank == min(tensor)]
    table = RawTable.of_rows(list(_rows(spans)), file=known.file, format=NAME, file_bytes=len(data))
    gaps = ((gap,) if left else ()) + shared_stages(len(set(tensor)), known.file)
    return Reading(table=make_op_table(table, gaps))


def _events_of(devices: Sequence[Sequence[_Timed]]) -> Iterator[_Event]:
    """Yield the spans of all devices as events; an optimizer ends a step."""
    for rank, spans in enumerate(devices):
        step = 0
        for span in sorted(spans, key=lambda span: span.start_time):
            yield _Event(
                ph="X",
                name=span.type,
                ts=span.start_time / 1000,
                dur=(span.end_time - span.start_time) / 1000,
                pid=rank,
                args={"step": step, "microbatch": span.minibatch},
            )
            step += ops_of(span.type) == (Op.OPTIMIZER,)


def _spans(events: Sequence[_Event]) -> Iterator[_Span]:
    """Yield spans with a length: `X` has one, a `B` ends with the next `E` of its thread.

    What its thread and process are called says whose it is, unless its own arguments do.
    """
    called: dict[tuple[Lane, ...], dict[str, int]] = {}
    for event in events:
        if event.ph == "M" and event.name in {"process_name", "thread_name"}:
            owner = (event.pid,) if event.name == "process_name" else (event.pid, event.tid)
            words = _CALLED.findall(str((event.args or {}).get("name", "")))
            called[owner] = {_CALLED_FOR[word.lower()]: int(number) for word, number in words}
    unclosed: dict[tuple[Lane, Lane], list[_Event]] = {}
    # What ends where another begins ends first.
    for event in sorted(events, key=lambda event: (event.ts, event.ph != "E")):
        thread, span = (event.pid, event.tid), event
        if event.ph == "B":
            unclosed.setdefault(thread, []).append(event)
        elif event.ph == "E" and unclosed.get(thread):
            span = unclosed[thread].pop()
            span.ph, span.dur = "X", event.ts - span.ts
            span.args = {**(span.args or {}), **(event.args or {})}
        op, name, number = _classify(span.name)
        if span.ph != "X" or op is Op.OTHER:
            continue
        args = span.args or {}
        told = ((field, _whole(args[key])) for field, key in _fields_of(tuple(args)))
        fields = {field: value for field, value in told if value is not None}
        of_name = {} if number is None else {"microbatch": number}
        of_lane = called.get((event.pid,), {}) | called.get(thread, {})
        yield _Span(
            event=span,
            fields=of_name | of_lane | fields,
            stage_of_thread="stage" in called.get(thread, {}),
            op=op,
            name=name,
        )


def _rows(spans: Sequence[_Span]) -> Iterator[dict[str, object]]:
    """Yield a row a span, with its rank, stage, microbatch and step as far as they are told."""
    owner = "tid" if _ranks_are_threads(spans) else "pid"
    owned = [(getattr(span.event, owner), span) for span in spans]
    lanes = sorted({lane for lane, _ in owned}, key=_natural)
    position = {lane: number for number, lane in enumerate(lanes)}
    lanes_hold_several = _hold_several(owned)
    passes: Counter[tuple[object, ...]] = Counter()
    for lane, span in sorted(owned, key=lambda lane_and_span: lane_and_span[1].event.ts):
        fields = span.fields
        own_rank = lane if isinstance(lane, int) else position[lane]
        row: dict[str, object] = {
            "rank": None if lanes_hold_several else own_rank,
            "pipeline": position[lane] if lanes_hold_several and len(lanes) > 1 else 0,
            "stage": position[lane],
            **{key: fields[key] for key in _KEYS if key in fields},
            "op": span.name,
            "start_us": span.event.ts,
            "duration_us": span.event.dur,
        }
        if span.op in PASSES:
            alike = *(row.get(key) for key in _OWNER), span.op
            if "microbatch" not in fields:
                row["microbatch"] = passes[alike]
                passes[alike] += 1
            # A microbatch that comes again is of the next step.
            again = (*alike, row["microbatch"], "again")
            row.setdefault("step", passes[again])
            passes[again] += 1
        row.setdefault("step", 0)
        yield row


@lru_cache
def _fields_of(keys: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    """Return which arguments hold which fields; those of one tool's spans are alike."""
    return tuple(find_columns(keys).fields.items())


def _whole(value: Any) -> int | None:
    """Return a whole number, also one that is written as text; else nothing."""
    if isinstance(value, str) and _WHOLE.fullmatch(value):
        return int(value)
    number = isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
    return int(value) if number else None


def _ranks_are_threads(spans: Sequence[_Span]) -> bool:
    """Tell whether the ranks are threads: of one process, and each goes forward and back."""
    kinds: dict[Lane, set[bool]] = {}
    for span in spans:
        if span.op in PASSES:
            kinds.setdefault(span.event.tid, set()).add(span.op is Op.FORWARD)
    processes = {span.event.pid for span in spans}
    return len(processes) == 1 and len(kinds) > 1 and all(len(both) > 1 for both in kinds.values())


def _hold_several(spans: Sequence[tuple[Lane, _Span]]) -> bool:
    """Tell whether processes are no ranks, but hold several each: all of a job, or a replica's."""
    held: dict[Lane, set[tuple[int | None, int]]] = {lane: set() for lane, _ in spans}
    for lane, span in spans:
        if "stage" in span.fields and span.op in PASSES:
            held[lane].add((span.fields.get("pipeline"), span.fields["stage"]))
    several = any(len(stages) > 1 for stages in held.values())
    by_position = any(span.stage_of_thread or "chunk" in span.fields for _, span in spans)
    twice = sum(map(len, held.values())) > len(set().union(*held.values()))
    return several and (by_position or len(held) == 1 or twice)


def _natural(lane: Lane) -> tuple[int, str]:
    digits = re.findall(r"\d+", str(lane))
    return (int(digits[-1]) if digits else -1, str(lane))


FORMAT = Format(
    name=NAME,
    position=5,
    recognise=recognise,
    read=read,
    one_a_rank=False,
)
