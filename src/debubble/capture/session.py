"""Steps of a job in → traces of some of them.

A host runs ahead of its device by many steps, so that what it times between two calls is what it
took to issue them. On CUDA each mark is an event in the device's own queue; it costs microseconds.

The plan is a generator that says how many steps to sleep; between captures a step costs one
comparison. Nothing that goes wrong in here may stop the job: it is logged, and the capture skipped.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import profiler as torch_profiler

from debubble.capture.files import CaptureFiles, capture_name, keep_newest, prepare_out
from debubble.capture.labels import find_pipeline, label_passes
from debubble.capture.settings import (
    DEFAULT_OUT,
    PROFILED_STEPS,
    PROFILER_WARMUP_STEPS,
    SETTLING_STEPS,
    WAIT_STEPS,
    Settings,
)
from debubble.capture.sidecar import Facts, Latencies, find_place, write_sidecar
from debubble.errors import CaptureError, DebubbleError, MissingExtra

if TYPE_CHECKING:
    from collections.abc import Iterator

_MS_PER_S = 1000.0


class StepClock:
    """Times steps: each begins at one mark and ends at another."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._on_device = _has_device()
        self._begun: list[Any] = []
        self._ended: list[Any] = []
        wait_for_device()

    def begin(self) -> None:
        """Note that a step begins here."""
        self._begun.append(self._mark())

    def end(self) -> None:
        """Note that it ends here."""
        self._ended.append(self._mark())

    def lengths(self) -> list[float]:
        """Return the seconds of each step; waits for the device to come to the last."""
        wait_for_device()
        return [self._between(*ends) for ends in zip(self._begun, self._ended, strict=True)]

    def _mark(self) -> Any:
        if not self._on_device:
            return self._clock()
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _between(self, begun: Any, ended: Any) -> float:
        if self._on_device:
            return float(begun.elapsed_time(ended)) / _MS_PER_S
        return float(ended - begun)


def wait_for_device() -> None:
    """Let the device come up to the host."""
    if _has_device():
        torch.cuda.synchronize()


def _has_device() -> bool:
    """Tell whether this process uses CUDA; asking must not make it do so."""
    return torch.cuda.is_available() and bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


_log = logging.getLogger("debubble")

Times = Generator[int, None, list[float]]


@dataclass(slots=True)
class _Recorded:
    """What the profiled steps gave."""

    times: list[float] = field(default_factory=list)
    labels: str | None = None


class Session:
    """What `debubble.capture` returns: enter it around the loop, and tell it each step."""

    def __init__(
        self,
        settings: Settings,
        pipeline: Any,
        *,
        on_enter: Callable[[Session], None],
        on_exit: Callable[[], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        _require_profiler()
        self.settings = settings
        self.pipeline = find_pipeline(pipeline)
        self.problems: list[str] = []
        """What went wrong, as it was logged."""
        self._on_enter = on_enter
        self._on_exit = on_exit
        self._clock = clock
        self._done = 0
        self._wake_at = 0
        self._plan = self._run()

    def __enter__(self) -> Self:
        prepare_out(self.settings.out)
        self._on_enter(self)
        self._wake_at = next(self._plan)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End a capture that is under way: what is not complete is not kept."""
        self._plan.close()
        self._wake_at = sys.maxsize
        self._on_exit()

    def step(self) -> None:
        """Say that a step has ended."""
        self._done += 1
        if self._done >= self._wake_at:
            self._wake_at = next(self._plan)

    def _run(self) -> Generator[int]:
        """Yield the numbers of the steps after which there is something to do."""
        start = self.settings.wait
        while True:
            if start > self._done:
                yield start
            with self._surviving():
                yield from self._capture()
            if self.settings.every is None:
                break
            start += self.settings.every
        while True:
            yield sys.maxsize

    @contextmanager
    def _surviving(self) -> Iterator[None]:
        try:
            yield
        except DebubbleError as error:
            self._note(f"{error}; {error.hint}" if error.hint else str(error))
        except Exception as error:  # noqa: BLE001 (a capture must never cost anybody a job)
            self._note(f"{type(error).__name__}: {error}")

    def _note(self, problem: str) -> None:
        self.problems.append(problem)
        _log.warning("debubble: no capture after step %d: %s", self._done, problem)

    def _capture(self) -> Generator[int]:
        latencies = Latencies()
        latencies.before = yield from self._timed()
        place = find_place()
        first_step = self._done + PROFILER_WARMUP_STEPS
        name = capture_name(place.started, first_step)
        files = CaptureFiles(out=self.settings.out, name=name, rank=place.rank)
        recorded = yield from self._profiled(files)
        latencies.profiled = recorded.times
        facts = Facts(
            files=files,
            world_size=place.world_size,
            first_step=first_step,
            labels=recorded.labels,
            pipeline=self.pipeline,
            settings=self.settings,
            latencies=latencies,
        )
        write_sidecar(facts)  # now, should the job not live to see the steps after
        if self.settings.keep is not None:
            keep_newest(self.settings.out, place.rank, self.settings.keep, written=name)
        yield self._done + SETTLING_STEPS
        latencies.after = yield from self._timed()
        if files.trace.exists():
            write_sidecar(facts)

    def _timed(self) -> Times:
        """Time steps as they are, without the profiler."""
        steps = StepClock(self._clock)
        for _ in range(self.settings.steps):
            steps.begin()
            yield self._done + 1
            steps.end()
        return steps.lengths()

    def _profiled(self, files: CaptureFiles) -> Generator[int, None, _Recorded]:
        _refuse_a_second_profiler()
        recorded, done = _Recorded(), 0
        profiler = _make_profiler(self.settings.steps)
        with label_passes(self.pipeline) as labels:
            profiler.start()
            try:
                yield self._done + PROFILER_WARMUP_STEPS
                profiler.step()
                steps = StepClock(self._clock)
                for left in reversed(range(self.settings.steps)):
                    steps.begin()
                    yield self._done + 1
                    steps.end()
                    done += 1
                    if not left:
                        wait_for_device()  # what is not done when the profiler stops is lost
                    profiler.step()
                recorded.times = steps.lengths()
            except GeneratorExit:
                self._note(f"the loop ended after {done} of {self.settings.steps} profiled steps")
                raise
            finally:
                profiler.stop()
        if self.pipeline.stages:
            recorded.labels = "added" if labels.added else "own"
        files.export(lambda plain: profiler.export_chrome_trace(str(plain)))
        return recorded


def _require_profiler() -> None:
    if not torch_profiler.kineto_available():
        raise CaptureError(
            f"torch {torch.__version__} was built without its profiler",
            hint="take a torch built with USE_KINETO=1, as those on PyPI are",
        )


def _refuse_a_second_profiler() -> None:
    """Keep off where the job profiles itself: torch would end that profile without a word."""
    if getattr(torch.autograd.profiler, "_is_profiler_enabled", False):
        raise CaptureError(
            "another profiler is at work in this process",
            hint="the next capture is tried again in its turn",
        )


def _make_profiler(steps: int) -> torch_profiler.profile:
    """Return a profiler with all that the analysis reads, and never with stacks."""
    activities = [torch_profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch_profiler.ProfilerActivity.CUDA)
    return torch_profiler.profile(
        activities=activities,
        record_shapes=True,
        profile_memory=True,
        with_stack=False,
        schedule=torch_profiler.schedule(
            wait=0, warmup=PROFILER_WARMUP_STEPS, active=steps, repeat=1
        ),
    )


_running: Session | None = None


def capture(  # noqa: PLR0913 (one argument a setting)
    pipeline: Any = None,
    *,
    every: int | None = None,
    steps: int = PROFILED_STEPS,
    wait: int = WAIT_STEPS,
    out: str | os.PathLike[str] = DEFAULT_OUT,
    keep: int | None = None,
    tags: Mapping[str, str] | None = None,
    tokens: int | None = None,
    context_lengths: Sequence[int] | None = None,
    split: Sequence[int] | None = None,
) -> Session:
    """Capture a few steps of the loop inside; call `debubble.step()` after each of them.

    `pipeline` is a schedule or a stage of torch.distributed.pipelining, or several stages: its
    passes are then named in the trace. After `wait` steps, `steps` are timed, `steps` profiled and
    `steps` timed again; that every `every` steps, or once. All ranks must call it alike.
    """
    settings = Settings(
        steps=steps,
        every=every,
        wait=wait,
        out=Path(out),
        keep=keep,
        tags={str(key): str(value) for key, value in (tags or {}).items()},
        tokens=tokens,
        context_lengths=None if context_lengths is None else tuple(context_lengths),
        split=None if split is None else tuple(split),
    )
    return begin(settings, pipeline)


def begin(settings: Settings, pipeline: Any) -> Session:
    """Return a capture that is to be entered; here torch is needed for the first time."""
    try:
        from debubble.capture.session import Session  # noqa: PLC0415 (imports torch)
    except ImportError as error:
        raise MissingExtra(
            f"a capture needs torch with its profiler: {error}",
            hint="pip install 'debubble[torch]'",
        ) from error
    return Session(settings, pipeline, on_enter=_begin, on_exit=_end)


def step() -> None:
    """Say that a step of the loop has ended. Outside a capture it does nothing."""
    if _running is not None:
        _running.step()


def _begin(session: Session) -> None:
    global _running  # noqa: PLW0603 (the profiler is one a process, so is this)
    if _running is not None:
        raise CaptureError(
            "this process is inside a capture already",
            hint="a process has one profiler: leave the first `with` before the second",
        )
    _running = session


def _end() -> None:
    global _running  # noqa: PLW0603
    _running = None
