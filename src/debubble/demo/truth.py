"""What the pipeline itself saw, written beside each trace: the yardstick for the analysis."""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import msgspec

from debubble.demo.workload import Workload
from debubble.errors import DemoError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

Kind = Literal["F", "B", "I", "W"]
Part = Literal["forward", "input", "weight", "reduce"]
Phase = Literal["unprofiled", "profiler-warm-up", "profiled"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrueCall:
    """One timed call: a layer's forward, input or weight gradient, or a reduction after it."""

    kind: Kind
    part: Part
    stage: int
    microbatch: int
    layer: int
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TruePass:
    """One pass of one microbatch through one stage, from call to return."""

    kind: Kind
    stage: int
    microbatch: int
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrueStep:
    """One batch through the pipeline, optimizer and closing barrier included."""

    step: int
    phase: Phase
    start_ns: int
    end_ns: int
    loss: float | None
    passes: tuple[TruePass, ...]
    calls: tuple[TrueCall, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """All steps of one rank; times are nanoseconds since the epoch, as in `time.time_ns`."""

    rank: int
    stages: tuple[int, ...]
    workload: Workload
    steps: tuple[TrueStep, ...]

    @property
    def profiled(self) -> tuple[TrueStep, ...]:
        """The steps that are in the trace."""
        return tuple(step for step in self.steps if step.phase == "profiled")


def read_truth(file: Path) -> Truth:
    """Read what a rank wrote beside its trace."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=Truth)
    except msgspec.MsgspecError as error:
        raise DemoError(
            f"this is no truth file: {error}", file=str(file), hint="run the demo again"
        ) from error


class Recorder:
    """Collects passes and calls as they happen, and hands them out step by step."""

    def __init__(self) -> None:
        self._passes: list[TruePass] = []
        self._calls: list[TrueCall] = []
        self._running: tuple[Kind, int, int] | None = None

    @contextmanager
    def record_pass(self, kind: Kind, stage: int, microbatch: int) -> Iterator[None]:
        """Record one pass; the calls within are its own."""
        start_ns = time.time_ns()
        self._running = (kind, stage, microbatch)
        try:
            yield
        finally:
            self._running = None
        self._passes.append(
            TruePass(
                kind=kind,
                stage=stage,
                microbatch=microbatch,
                start_ns=start_ns,
                end_ns=time.time_ns(),
            )
        )

    def record_call(self, part: Part, layer: int, start_ns: int, end_ns: int) -> None:
        """Record one operator. Outside a pass, torch is inferring shapes: that is no work."""
        if self._running is None:
            return
        kind, stage, microbatch = self._running
        self._calls.append(
            TrueCall(
                kind=kind,
                part=part,
                stage=stage,
                microbatch=microbatch,
                layer=layer,
                start_ns=start_ns,
                end_ns=end_ns,
            )
        )

    def end_step(
        self, *, step: int, phase: Phase, start_ns: int, end_ns: int, loss: float | None
    ) -> TrueStep:
        """Return what was recorded since the last step, and forget it."""
        passes, self._passes = tuple(self._passes), []
        calls, self._calls = tuple(self._calls), []
        return TrueStep(
            step=step,
            phase=phase,
            start_ns=start_ns,
            end_ns=end_ns,
            loss=loss,
            passes=passes,
            calls=calls,
        )
