"""A trace's name in → what the job said of itself beside it, in `rankN.debubble.json`.

Damage is tolerated: a field of another type than it should have is named and as good as missing,
and fields that are not used, or that a later version adds, are left alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import msgspec

from debubble.errors import Code, Gap
from debubble.trace.source import is_url, read_whole

SUFFIX = ".debubble.json"
SCHEMA = "debubble.sidecar/1"

_TRACE_EXTENSIONS = re.compile(r"(?:\.pt)?(?:\.trace)?\.json(?:\.gz)?$")

Count = Annotated[int, msgspec.Meta(ge=0)]
Amount = Annotated[float, msgspec.Meta(gt=0, le=1e300)]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Steps in seconds, from one to the next: timed without the profiler, and under it."""

    before_s: tuple[Amount, ...] = ()
    profiled_s: tuple[Amount, ...] = ()
    after_s: tuple[Amount, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sidecar:
    """What the profiler cannot see; None or empty where the job did not say."""

    file: str
    rank: Count | None = None
    world_size: Count | None = None
    capture: str | None = None
    schedule: str | None = None
    microbatches: Count | None = None
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
    draw_w: Annotated[float, msgspec.Meta(ge=0, le=1e300)] | None = None
    """That the device drew in steps without the profiler."""
    environment: Mapping[str, str] = field(default_factory=dict)


# The fields in each section of a sidecar.
_SECTIONS = {
    "": ("rank", "world_size", "capture"),
    "pipeline": ("schedule", "microbatches", "split"),
    "workload": ("tokens", "context_lengths"),
    "memory": (
        *("max_allocated_bytes", "max_reserved_bytes"),
        *("reserved_bytes", "free_bytes", "total_bytes"),
    ),
    "power": ("draw_w",),
}
_STEPS = get_type_hints(StepTimes, include_extras=True)
_FIELDS = get_type_hints(Sidecar, include_extras=True)


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
        data = json.loads(text, parse_constant=str)
        if not isinstance(data, dict) or data.get("schema") != SCHEMA:
            raise ValueError(f"it is no {SCHEMA}")  # noqa: TRY301 (it is told as damage is)
    except FileNotFoundError:
        return None, None
    except (OSError, ValueError, ImportError, RecursionError) as error:
        gap = Gap(
            code=Code.UNREADABLE,
            message=f"cannot be read, what it said of the job is missing: {error}",
            hint="the trace beside it is read all the same",
            file=file,
        )
        return None, gap
    wrong: list[str] = []
    known: dict[str, Any] = {}
    for section, names in _SECTIONS.items():
        values = data.get(section) if section else data
        known |= _take(values, {name: _FIELDS[name] for name in names}, section, wrong)
    environment = data.get("environment")
    kinds = dict.fromkeys(environment if isinstance(environment, dict) else (), str)
    sidecar = Sidecar(
        file=file,
        steps=StepTimes(**_take(data.get("steps"), _STEPS, "steps", wrong)),
        environment=_take(environment, kinds, "environment", wrong),
        **known,
    )
    if not wrong:
        return sidecar, None
    gap = Gap(
        code=Code.SIDECAR_DIFFERS,
        message=f"{'; '.join(wrong)}: taken as not said",
        hint="docs/reference/sidecar.md has every field",
        file=file,
    )
    return sidecar, gap


def _take(
    values: object, kinds: Mapping[str, Any], section: str, wrong: list[str]
) -> dict[str, Any]:
    """Return the fields of a section; one of another kind is missing, and named in `wrong`."""
    if not isinstance(values, dict):
        wrong += [] if values is None else [f"{section}: Expected `object`"]
        return {}
    taken = {}
    for name, kind in kinds.items():
        if values.get(name) is not None:
            try:
                taken[name] = msgspec.convert(values[name], kind)
            except (msgspec.ValidationError, OverflowError) as error:
                wrong.append(f"{section}.{name}: {error}".removeprefix("."))
    return taken
