"""A trace's name in → what the job said of itself beside it, in `rankN.debubble.json`.

Damage is tolerated: a field of another type than it should have is named and as good as missing,
and fields that a later version adds are left alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import msgspec

from debubble.errors import Code, Gap
from debubble.trace.source import is_url, read_whole

SUFFIX = ".debubble.json"
SCHEMA = "debubble.sidecar/1"

_TRACE_EXTENSIONS = re.compile(r"(?:\.pt)?(?:\.trace)?\.json(?:\.gz)?$")
# Of what a sidecar has wrong, so many fields are named, with so many letters of what they hold.
_MOST_NAMED, _MOST_SHOWN = 3, 40
_SHAPES: dict[type, str] = {dict: "an object", list: "a list"}

Count = Annotated[int, msgspec.Meta(ge=0)]
Amount = Annotated[float, msgspec.Meta(gt=0, le=1e300)]
Share = Annotated[float, msgspec.Meta(ge=-1e300, le=1e300)]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Steps in seconds, from one to the next: timed without the profiler, and under it."""

    before_s: tuple[Amount, ...] = ()
    profiled_s: tuple[Amount, ...] = ()
    after_s: tuple[Amount, ...] = ()
    unprofiled_median_s: Amount | None = None
    profiled_median_s: Amount | None = None
    overhead_fraction: Share | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sidecar:
    """What the profiler cannot see; None or empty where the job did not say."""

    file: str
    rank: Count | None = None
    world_size: Count | None = None
    capture: str | None = None
    first_step: Count | None = None
    schedule: str | None = None
    microbatches: Count | None = None
    stages: Count | None = None
    held_stages: tuple[Count, ...] = ()
    split: tuple[Count, ...] = ()
    tokens: Count | None = None
    context_lengths: tuple[Count, ...] = ()
    steps: StepTimes = StepTimes()
    max_allocated_bytes: Count | None = None
    max_reserved_bytes: Count | None = None
    reserved_bytes: Count | None = None
    """At the time that `free_bytes` was asked for."""
    free_bytes: Count | None = None
    total_bytes: Count | None = None
    power_w: Amount | None = None
    """That the device drew in steps without the profiler."""
    environment: Mapping[str, str] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)


# The fields in each section of a sidecar.
_SECTIONS = {
    "": ("rank", "world_size", "capture", "first_step"),
    "pipeline": ("schedule", "microbatches", "stages", "held_stages", "split"),
    "workload": ("tokens", "context_lengths"),
    "memory": (
        *("max_allocated_bytes", "max_reserved_bytes"),
        *("reserved_bytes", "free_bytes", "total_bytes"),
    ),
}
# What is said of a field that should be of another kind.
_EXPECTED: dict[Any, str] = {
    Count | None: "a whole number from 0",
    tuple[Count, ...]: "a list of whole numbers from 0",
    Amount | None: "a number above 0",
    tuple[Amount, ...]: "a list of numbers above 0",
    Share | None: "a number",
    str | None: "text",
    str: "text",
    dict[str, Any]: "an object",
}


def is_sidecar(file: str) -> bool:
    """Tell a sidecar by its name: it is never a trace."""
    return file.endswith(SUFFIX)


def sidecar_of(trace: str) -> str:
    """Return where the sidecar of a trace lies, should it have one."""
    return _TRACE_EXTENSIONS.sub("", trace) + SUFFIX


def read_sidecar(trace: str) -> tuple[Sidecar | None, Gap | None]:
    """Return what lies beside a trace; nothing where there is none, a gap where it is bad."""
    file = sidecar_of(trace)
    problem, data = "", None
    try:
        text = read_whole(file) if is_url(file) else Path(file).read_bytes()
    except FileNotFoundError:
        return None, None
    except (OSError, ValueError, ImportError) as error:
        problem = f"cannot be read: {error}"
    else:
        try:
            data = json.loads(text, parse_constant=str)
        except (ValueError, RecursionError):
            problem = "is no whole JSON"
    schema = data.get("schema") if isinstance(data, dict) else None
    if schema != SCHEMA or not isinstance(data, dict):
        gap = Gap(
            code=Code.UNREADABLE,
            message=f"{problem or f'is no sidecar of this version (schema {schema!r})'}; "
            "what it said of the job is missing",
            hint="the trace beside it is read all the same",
            file=file,
        )
        return None, gap
    wrong: list[str] = []
    fields_of = partial(_take_fields, data, wrong)
    hints = get_type_hints(Sidecar, include_extras=True)
    known: dict[str, Any] = {}
    for section, names in _SECTIONS.items():
        known |= fields_of(section, {name: hints[name] for name in names})
    steps = fields_of("steps", get_type_hints(StepTimes, include_extras=True))
    power = fields_of("power", {"draw_w": hints["power_w"]})
    sidecar = Sidecar(
        file=file,
        steps=StepTimes(**steps),
        power_w=power.get("draw_w"),
        **known,
        environment=fields_of("environment", None),
        tags=fields_of("tags", None),
    )
    if not wrong:
        return sidecar, None
    more = f", and {len(wrong) - _MOST_NAMED} more" if len(wrong) > _MOST_NAMED else ""
    gap = Gap(
        code=Code.SIDECAR_DIFFERS,
        message=f"{'; '.join(wrong[:_MOST_NAMED])}{more}: taken as not said",
        hint="docs/reference/sidecar.md has every field",
        file=file,
    )
    return sidecar, gap


def _take_fields(
    data: Mapping[str, Any], wrong: list[str], section: str, kinds: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return the fields of a section; one of another kind is missing, and named in `wrong`.

    Without kinds it holds any fields, all of them text.
    """
    values: Any = data
    if section:
        values = _take(data, section, dict[str, Any], "", wrong) or {}
    kinds = dict.fromkeys(values, str) if kinds is None else kinds
    path = f"{section}." * bool(section)
    taken = {name: _take(values, name, kind, path, wrong) for name, kind in kinds.items()}
    return {name: value for name, value in taken.items() if value is not None}


def _take(values: Mapping[str, Any], name: str, kind: Any, path: str, wrong: list[str]) -> Any:
    value = values.get(name)
    if value is None or (value == 0 and kind == Amount | None):  # nothing was measured
        return None
    try:
        return msgspec.convert(value, kind)
    except (msgspec.ValidationError, OverflowError):
        shown = _SHAPES.get(type(value)) or json.dumps(value)
        shown = shown if len(shown) <= _MOST_SHOWN else f"{shown[:_MOST_SHOWN]}…"
        wrong.append(f"{path}{name} is {shown} and should be {_EXPECTED[kind]}")
        return None
