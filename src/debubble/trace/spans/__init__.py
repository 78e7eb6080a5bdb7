"""Chrome traces of passes in → `OpTable` out: what tools of a framework's own write for Perfetto.

    {"name": "forward", "ph": "X", "ts": 10, "dur": 90, "pid": 3,
     "args": {"microbatch": 2, "chunk": 0, "iteration": 7}}

Spans called forward or backward (`F`, `fwd`, `backward_step`, `B3`), as `X`, or as `B` and `E`.
Whose they are: a rank, a stage or a `pp_rank` among their arguments, else their process. Which
microbatch: by argument, else by the number in their name, else counted. What is called a send, a
receive, a reduction or an optimizer is read as well, anything else is passed over.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any

import msgspec

from debubble.errors import Code, Gap, TraceError
from debubble.trace.format import Format, Reading, TraceFile
from debubble.trace.optable import Op, table_of_passes
from debubble.trace.optable.files import ALIASES, classify_op
from debubble.trace.source import Limits, Source
from debubble.units import counted

NAME = "spans of passes"
# Held whole: a million spans take about a gigabyte.
_MOST_BYTES = 256 * 1024**2
_PASSES = (Op.FORWARD, Op.BACKWARD, Op.INPUT_GRAD, Op.WEIGHT_GRAD)
# Events, and nothing that only torch.profiler writes, or debubble itself.
_SIGN = re.compile(
    rb'(?s)\A\s*[{\[](?=.*"ph")(?!.*(?:ProfilerStep#|"(?:schemaVersion|deviceProperties'
    rb'|distributedInfo|traceName|cpu_op|cuda_runtime|kernel)"))'
)
_NAMES = re.compile(rb'"name"\s*:\s*"([^"\\]{1,80})"')
# A number at the end of a name is the microbatch: `F3`, `forward mb 3`, `backward_step_12`.
_NUMBERED = re.compile(
    r"^(.*?)[\s_#:-]*(?:mb|microbatch|micro_batch)?[\s_#:-]*(\d{1,6})$", re.IGNORECASE
)
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


class _Document(msgspec.Struct):
    """The object form of a Chrome trace."""

    events: list[_Event] = msgspec.field(name="traceEvents")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Span:
    """One event that has a length."""

    event: _Event
    args: dict[str, Any]
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
    return TraceFile(file=file, format=NAME)


def read(known: TraceFile, limits: Limits) -> Reading:
    """Read a trace whole."""
    held = replace(limits, inflated_bytes=min(limits.inflated_bytes, _MOST_BYTES))
    data = b"".join(Source(known.file, held).pieces())
    form: Any = list[_Event] if data.lstrip()[:1] == b"[" else _Document
    try:
        said = msgspec.json.decode(data, type=form, strict=False)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        hint = "spans need name, ph, ts, and dur or an E for each B"
        message = f"was told by its spans of passes, and cannot be read: {error}"
        raise TraceError(message, file=known.file, hint=hint) from error
    events = said.events if isinstance(said, _Document) else said
    spans, gaps = _pair(events, known.file)
    if not any(span.op in _PASSES for span in spans):
        raise TraceError("no pass in it has a length", file=known.file)
    rows = list(_rows(spans, known.file))
    return Reading(
        table=table_of_passes(
            rows, file=known.file, format=NAME, inflated_bytes=len(data), gaps=gaps
        )
    )


def _pair(events: Sequence[_Event], file: str) -> tuple[list[_Span], tuple[Gap, ...]]:
    """Give every span its length: `X` has one, a `B` ends with the next `E` of its thread."""
    spans: list[_Span] = []
    open_: dict[tuple[int | str, int | str], list[_Event]] = {}

    def add(event: _Event, end: float, args: dict[str, Any]) -> None:
        op, number = _classify(event.name)
        if op is not Op.OTHER and end >= event.ts and isfinite(end) and isfinite(event.ts):
            start = round(event.ts * 1000)
            spans.append(
                _Span(
                    event=event,
                    args=args,
                    start_ns=start,
                    duration_ns=round(end * 1000) - start,
                    op=op,
                    number=number,
                )
            )

    for event in sorted(events, key=lambda event: event.ts):
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
    processes = {
        span.event.pid: None for span in sorted(spans, key=lambda s: _natural(s.event.pid))
    }
    place = {pid: number for number, pid in enumerate(processes)}
    seen: dict[tuple[object, ...], int] = {}
    for span in sorted(spans, key=lambda span: span.start_ns):
        told = {
            key: _told(span.args, key) for key in ("rank", "stage", "chunk", "pipeline", "step")
        }
        own = span.event.pid if isinstance(span.event.pid, int) else place[span.event.pid]
        rank = told["rank"] if told["rank"] is not None else own
        stage = told["stage"] if told["stage"] is not None else place[span.event.pid]
        microbatch = _told(span.args, "microbatch")
        microbatch = span.number if microbatch is None else microbatch
        who = rank, stage, told["chunk"], span.op, told["step"]
        if microbatch is None and span.op in _PASSES:
            microbatch = seen.get(who, 0)
            seen[who] = microbatch + 1
        step = told["step"]
        if step is None:  # a microbatch that comes again is of the next step
            again = (*who, microbatch, "again")
            step = seen.get(again, 0) if span.op in _PASSES else 0
            seen[again] = step + 1
        bytes_ = _told(span.args, "bytes")
        row: dict[str, int | str] = {
            "step": step,
            "rank": rank,
            "pipeline": told["pipeline"] or 0,
            "stage": stage,
            "microbatch": -1 if microbatch is None else microbatch,
            "op": span.event.name if span.number is None else _stem(span.event.name),
            "start": span.start_ns,
            "duration": span.duration_ns,
            "bytes": -1 if bytes_ is None else bytes_,
        }
        if min(int(row[key]) for key in ("rank", "stage", "pipeline")) < 0:
            raise TraceError(f"the span {span.event.name!r} has a negative rank", file=file)
        yield row | ({} if told["chunk"] is None else {"chunk": told["chunk"]})


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
