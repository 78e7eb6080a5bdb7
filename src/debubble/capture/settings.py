"""What is asked of a job from outside in → the environment that carries it in, and back."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from debubble.errors import UsageError

# The first steps connect the ranks, infer shapes, fill allocators and tune kernels.
WAIT_STEPS = 10

# Two steps are not representative; a trace of six is small.
PROFILED_STEPS = 6

# The profiler's first step pays for its set-up; torch keeps that step out of the trace.
PROFILER_WARMUP_STEPS = 1

# After the export the ranks have drifted apart: one step in which they find together again.
SETTLING_STEPS = 1

DEFAULT_OUT = Path("debubble-traces")

INJECTED = Path(__file__).resolve().parent / "inject"

_Settings = TypeVar("_Settings", bound="JobSettings")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSettings:
    """What is asked of a job from outside: a variable of its environment carries it in."""

    variable: ClassVar[str]
    done: ClassVar[str]
    """What is done to the job, in a word."""
    traces: ClassVar[str]
    """The files that come of it."""
    out: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(JobSettings):
    """When to capture, where to put it, and what the job itself cannot tell."""

    variable: ClassVar[str] = "DEBUBBLE_CAPTURE"
    done: ClassVar[str] = "captured"
    traces: ClassVar[str] = "rank*.json.gz"
    steps: int = PROFILED_STEPS
    every: int | None = None
    """Steps from the start of one capture to the start of the next; None for a single capture."""
    wait: int = WAIT_STEPS
    """Steps before the first capture."""
    out: Path = DEFAULT_OUT
    keep: int | None = None
    """How many captures stay in the folder; None for all."""
    tokens: int | None = None
    """Tokens of one step, over all microbatches."""
    context_lengths: tuple[int, ...] | None = None
    split: tuple[int, ...] | None = None
    """Layers of each stage."""

    def __post_init__(self) -> None:
        for name, least in {"steps": 1, "wait": 0, "keep": 1, "tokens": 1}.items():
            steps = getattr(self, name)
            if steps is not None and steps < least:
                raise UsageError(f"{name} is {steps}", hint=f"give at least {least}")
        if self.every is not None and self.every < self.length:
            raise UsageError(
                f"every is {self.every}, but one capture takes {self.length} steps: "
                f"{self.steps} timed before, {self.steps} profiled, {self.steps} timed after",
                hint=f"give every={self.length} or more, or fewer steps",
            )

    @property
    def length(self) -> int:
        """Steps that one capture takes, those timed before and after it included."""
        return 3 * self.steps + PROFILER_WARMUP_STEPS + SETTLING_STEPS


def environment_for(settings: JobSettings, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which every Python process does to itself what is asked."""
    variable = settings.variable
    if variable in inherited:
        raise UsageError(
            f"this job is being {settings.done} already",
            hint=f"unset {variable}, or leave out the outer",
        )
    order = {setting.name: getattr(settings, setting.name) for setting in fields(settings)}
    order["out"] = str(settings.out.resolve())
    path = [str(INJECTED), *filter(None, [inherited.get("PYTHONPATH")])]
    return {**inherited, variable: json.dumps(order), "PYTHONPATH": os.pathsep.join(path)}


def read_order(kind: type[_Settings], environment: Mapping[str, str]) -> _Settings | None:
    """Read back what `environment_for` wrote; None where nothing was asked."""
    text = environment.get(kind.variable)
    if text is None:
        return None
    try:
        order: dict[str, Any] = json.loads(text)
        order["out"] = Path(order["out"])
        for name, value in order.items():
            order[name] = tuple(value) if isinstance(value, list) else value
        return kind(**order)
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{kind.variable} is damaged: {error}", hint=f"unset {kind.variable}"
        ) from error
