"""Steps of a job in → traces of some of them. All of it needs torch.

```
steps     … wait …  │ timed │ warm-up │ profiled │ settling │ timed │  … sleep until `every` …
profiler            │  off  │      on, one trace │         off      │
sidecar             │       │         │       written          rewritten
```

The plan is a generator that says how many steps to sleep; between captures a step costs one
comparison. Nothing that goes wrong in here may stop the job: it is logged, and the capture skipped.

A host runs ahead of its device by many steps, so that what it times between two calls is what it
took to issue them. On CUDA each mark is an event in the device's own queue; it costs microseconds.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Generator
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

import torch
from torch import profiler as torch_profiler

from debubble.capture.files import CaptureFiles, capture_name, keep_newest, prepare_out
from debubble.capture.labels import find_pipeline, label_passes
from debubble.capture.session import describe, enter, leave
from debubble.capture.settings import PROFILER_WARMUP_STEPS, SETTLING_STEPS, Settings
from debubble.capture.sidecar import describe_job, find_rank, read_power_w, uses_cuda
from debubble.errors import CaptureError, DebubbleError

_log = logging.getLogger("debubble")


class Session:
    """What `debubble.capture` returns: enter it around the loop, and tell it each step."""

    def __init__(
        self,
        settings: Settings,
        pipeline: Any,
        *,
        clock: Callable[[], float] = time.perf_counter,
        done: int = 0,
    ) -> None:
        if not torch_profiler.kineto_available():
            raise CaptureError(
                f"torch {torch.__version__} was built without its profiler",
                hint="take a torch built with USE_KINETO=1, as those on PyPI are",
            )
        self.settings = settings
        self.pipeline = find_pipeline(pipeline)
        self.problems: list[str] = []
        """What went wrong, as it was logged."""
        self._clock = clock
        self._done = done
        self._wake_at = 0
        self._ending = False
        self._plan = self._run()

    def __enter__(self) -> Self:
        """Refuse what cannot be captured, while the job has not begun; from here on nothing is."""
        try:
            prepare_out(self.settings.out)
            enter(self)
        except DebubbleError:
            raise
        except Exception as error:  # noqa: BLE001 (what nobody foresaw is no reason to end a job)
            self._wake_at = sys.maxsize
            self._note(describe(error))
            return self
        self._go_on()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except Exception as failure:  # noqa: BLE001 (the loop ends as it would)
            self.problems += [describe(failure)]

    def close(self) -> None:
        """End a capture that is under way: what is not complete is not kept."""
        self._ending = True
        try:
            self._plan.close()
        except Exception as error:  # noqa: BLE001 (a capture must never cost anybody a job)
            self._note(describe(error))
        finally:
            self._wake_at = sys.maxsize
            leave()

    @property
    def finished(self) -> bool:
        """Whether no step is waited for any more."""
        return self._wake_at == sys.maxsize

    def step(self) -> None:
        """Say that a step has ended."""
        self._done += 1
        if self._done >= self._wake_at:
            self._go_on()

    def _go_on(self) -> None:
        """Do what is to be done now; should that fail as a whole, do nothing ever after."""
        try:
            self._wake_at = next(self._plan)
        except Exception as error:  # noqa: BLE001 (a capture must never cost anybody a job)
            self._wake_at = sys.maxsize
            self._note(describe(error))

    def _run(self) -> Generator[int]:
        """Yield the numbers of the steps after which there is something to do."""
        start = self.settings.wait
        while True:
            if start > self._done:
                yield start
            try:
                yield from self._capture()
            except DebubbleError as error:
                self._note(f"{error}; {error.hint}" if error.hint else str(error))
            except Exception as error:  # noqa: BLE001 (a capture must never cost anybody a job)
                self._note(describe(error))
            if self._ending:
                return  # the profiler failed as the loop ended: there is no step to wait for
            if self.settings.every is None:
                break
            start += self.settings.every
        while True:
            yield sys.maxsize

    def _note(self, problem: str) -> None:
        self.problems.append(problem)
        with suppress(Exception):  # a job's own logging may refuse
            _log.warning("debubble: no capture after step %d: %s", self._done, problem)

    def _capture(self) -> Generator[int]:
        """Time some steps, profile as many, and time as many again."""
        settings = self.settings
        steps_s = {"before_s": (yield from self._time_steps())}
        power_w = read_power_w()
        rank = find_rank()
        first_step = self._done + PROFILER_WARMUP_STEPS
        name = capture_name(rank.started, first_step)
        files = CaptureFiles(out=settings.out, name=name, rank=rank.rank)
        steps_s["profiled_s"] = yield from self._profile_steps(files)

        def write_sidecar() -> None:
            text = describe_job(
                name,
                rank,
                self.pipeline,
                split=settings.split,
                tokens=settings.tokens,
                context_lengths=settings.context_lengths,
                steps_s=steps_s,
                power_w=power_w,
            )
            with files.replacing(files.sidecar) as partial:
                partial.write_text(text, "utf-8")

        write_sidecar()  # now, should the job not live to see the steps after
        if settings.keep is not None:
            keep_newest(settings.out, files.trace.name, settings.keep, spared={name})
        yield self._done + SETTLING_STEPS
        steps_s["after_s"] = yield from self._time_steps()
        if files.trace.exists():
            write_sidecar()

    def _time_steps(self) -> Generator[int, None, list[float]]:
        """Time steps as they are, without the profiler."""
        steps = StepClock(self._clock)
        for _ in range(self.settings.steps):
            steps.begin()
            yield self._done + 1
            steps.end()
        return steps.lengths()

    def _profile_steps(self, files: CaptureFiles) -> Generator[int, None, list[float]]:
        """Profile steps and write their trace; return their times."""
        if getattr(torch.autograd.profiler, "_is_profiler_enabled", False):
            # torch would end the job's own profile without a word.
            raise CaptureError(
                "another profiler is at work in this process",
                hint="the next capture is tried again in its turn",
            )
        profiler, done = _make_profiler(self.settings.steps), 0
        with label_passes(self.pipeline):
            try:
                profiler.start()
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
                times = steps.lengths()
            except GeneratorExit:
                self._note(f"the loop ended after {done} of {self.settings.steps} profiled steps")
                raise
            finally:
                profiler.stop()
        files.export(lambda plain: profiler.export_chrome_trace(str(plain)))
        return times


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


class StepClock:
    """Times steps: each begins at one mark and ends at another."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._on_device = uses_cuda()
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
        marks = zip(self._begun, self._ended, strict=True)
        if self._on_device:
            return [begun.elapsed_time(ended) / 1000 for begun, ended in marks]
        return [ended - begun for begun, ended in marks]

    def _mark(self) -> Any:
        if not self._on_device:
            return self._clock()
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


def wait_for_device() -> None:
    """Let the device come up to the host."""
    if uses_cuda():
        torch.cuda.synchronize()
