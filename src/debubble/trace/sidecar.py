"""`rankN.debubble.json` in → what the job said of itself beside its trace; damage is tolerated.

A field of another type than it should have is as good as missing. Fields that a later version adds
are left alone.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from debubble.errors import Code, Gap
from debubble.trace.source import is_url, read_whole

SUFFIX = ".debubble.json"
SCHEMA = "debubble.sidecar/1"

_TRACE_EXTENSIONS = re.compile(r"(?:\.pt)?(?:\.trace)?\.json(?:\.gz)?$")
_Kind = TypeVar("_Kind")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Steps in seconds, from one to the next: timed without the profiler, and under it."""

    before_s: tuple[float, ...] = ()
    profiled_s: tuple[float, ...] = ()
    after_s: tuple[float, ...] = ()
    unprofiled_median_s: float | None = None
    profiled_median_s: float | None = None
    overhead_fraction: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sidecar:
    """What the profiler cannot see; None or empty where the job did not say."""

    file: str
    rank: int | None = None
    world_size: int | None = None
    capture: str | None = None
    first_step: int | None = None
    schedule: str | None = None
    microbatches: int | None = None
    stages: int | None = None
    held_stages: tuple[int, ...] = ()
    split: tuple[int, ...] = ()
    tokens: int | None = None
    context_lengths: tuple[int, ...] = ()
    steps: StepTimes = StepTimes()
    max_allocated_bytes: int | None = None
    max_reserved_bytes: int | None = None
    reserved_bytes: int | None = None
    """At the time that `free_bytes` was asked for."""
    free_bytes: int | None = None
    total_bytes: int | None = None
    power_w: float | None = None
    """That the device drew in steps without the profiler."""
    environment: Mapping[str, str] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)


def is_sidecar(file: str) -> bool:
    """Tell a sidecar by its name: it is never a trace."""
    return file.endswith(SUFFIX)


def sidecar_of(trace: str) -> str:
    """Return where the sidecar of a trace lies, should it have one."""
    return _TRACE_EXTENSIONS.sub("", trace) + SUFFIX


def read_sidecar(trace: str) -> tuple[Sidecar | None, Gap | None]:
    """Return what lies beside a trace; nothing where there is none, a gap where it is bad."""
    file = sidecar_of(trace)
    try:
        text = read_whole(file) if is_url(file) else Path(file).read_bytes()
    except FileNotFoundError:
        return None, None
    except (OSError, ValueError, ImportError) as error:
        return None, _unreadable(file, f"cannot be read: {error}")
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return None, _unreadable(file, "is no whole JSON")
    schema = data.get("schema") if isinstance(data, dict) else None
    if schema != SCHEMA:
        return None, _unreadable(file, f"is no sidecar of this version (schema {schema!r})")
    return _as_sidecar(file, data), None


def _as_sidecar(file: str, data: dict[str, Any]) -> Sidecar:
    pipeline, workload, memory, steps = (
        _part(data, name) for name in ("pipeline", "workload", "memory", "steps")
    )
    return Sidecar(
        file=file,
        rank=_count(data, "rank"),
        world_size=_count(data, "world_size"),
        capture=_value(data, "capture", str),
        first_step=_count(data, "first_step"),
        schedule=_value(pipeline, "schedule", str),
        microbatches=_count(pipeline, "microbatches"),
        stages=_count(pipeline, "stages"),
        held_stages=_counts(pipeline, "held_stages"),
        split=_counts(pipeline, "split"),
        tokens=_count(workload, "tokens"),
        context_lengths=_counts(workload, "context_lengths"),
        steps=StepTimes(
            before_s=_times(steps, "before_s"),
            profiled_s=_times(steps, "profiled_s"),
            after_s=_times(steps, "after_s"),
            unprofiled_median_s=_time(steps.get("unprofiled_median_s")),
            profiled_median_s=_time(steps.get("profiled_median_s")),
            overhead_fraction=_number(steps.get("overhead_fraction")),
        ),
        max_allocated_bytes=_count(memory, "max_allocated_bytes"),
        max_reserved_bytes=_count(memory, "max_reserved_bytes"),
        reserved_bytes=_count(memory, "reserved_bytes"),
        free_bytes=_count(memory, "free_bytes"),
        total_bytes=_count(memory, "total_bytes"),
        power_w=_time(_part(data, "power").get("draw_w")),
        environment=_words(data, "environment"),
        tags=_words(data, "tags"),
    )


def _part(data: dict[str, Any], name: str) -> dict[str, Any]:
    part = data.get(name)
    return part if isinstance(part, dict) else {}


def _value(data: dict[str, Any], name: str, kind: type[_Kind]) -> _Kind | None:
    value = data.get(name)
    return value if isinstance(value, kind) and not isinstance(value, bool) else None


def _count(data: dict[str, Any], name: str) -> int | None:
    count = _value(data, name, int)
    return count if count is not None and count >= 0 else None


def _counts(data: dict[str, Any], name: str) -> tuple[int, ...]:
    values = _value(data, name, list) or []
    counts = [_count({"": value}, "") for value in values]
    return () if None in counts else tuple(count for count in counts if count is not None)


def _number(value: object) -> float | None:
    fits = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if fits and math.isfinite(value) else None  # type: ignore[arg-type]


def _time(value: object) -> float | None:
    time = _number(value)
    return time if time is not None and time > 0 else None


def _times(data: dict[str, Any], name: str) -> tuple[float, ...]:
    """Return the times that are times: each stands for itself, so the others may be missing."""
    times = (_time(value) for value in _value(data, name, list) or [])
    return tuple(time for time in times if time is not None)


def _words(data: dict[str, Any], name: str) -> dict[str, str]:
    part = _part(data, name)
    return {key: value for key, value in part.items() if isinstance(value, str)}


def _unreadable(file: str, problem: str) -> Gap:
    return Gap(
        code=Code.UNREADABLE,
        message=f"{problem}; what it said of the job is missing",
        hint="the trace beside it is read all the same",
        file=file,
    )
