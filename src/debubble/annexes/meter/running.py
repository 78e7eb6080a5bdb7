"""A running job in → its op table, its figures, its captures; on the job's thread, and off it.

On the job's thread: marks, and nothing else. Off it, in a thread that mostly sleeps: the reading of
marks that are long past, files, metrics, loggers, the other ranks. Whatever fails, on either, is
said once, and the meter is silent from there on; the job does not notice.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist

from debubble.annexes.meter import trigger
from debubble.annexes.meter.figures import (
    Figure,
    RankFigures,
    RankReport,
    Straggler,
    bubble_of,
    find_straggler,
    measure_step,
)
from debubble.annexes.meter.hooks import Hooks, find_place
from debubble.annexes.meter.output import (
    Table,
    scalars_of,
    show_line,
    show_metrics,
    write_metrics,
)
from debubble.annexes.meter.record import Recorder, Step
from debubble.annexes.meter.session import Logger
from debubble.annexes.meter.settings import CAPTURES, Settings
from debubble.annexes.meter.trigger import Agreement, asked_by_file
from debubble.capture.labels import Pipeline, find_pipeline
from debubble.capture.recording import Session
from debubble.capture.session import begin, describe, say
from debubble.capture.settings import Settings as CaptureSettings
from debubble.capture.sidecar import RankOfJob, find_rank, uses_cuda

_REPORTS = "debubble/meter/told"
# How often a line goes to the log, and scalars to the logger.
LINE_S = 60.0
# How long the end of the job waits for a logger or a disk that hangs.
CLOSE_S = 5.0
# How many captures stay: traces of six steps take megabytes a rank.
KEPT_CAPTURES = 3
# Ranks tell each other, and write metrics, every so many looks for what was agreed.
_LOOKS_PER_REPORT = 4
# At the end, for a device to come to it: ten times as long at most.
_LAST_LOOK_S = 0.01
_log = logging.getLogger("debubble")


class Meter:
    """What `debubble.meter()` returns."""

    def __init__(
        self,
        settings: Settings,
        *,
        logger: Logger | None = None,
        undo: ExitStack | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings
        self.problem: str | None = None
        """Why the meter is silent, where it is."""
        self._clock = clock
        self._logger = logger
        self._recorder = Recorder()
        self._hooks = Hooks(self._recorder, self.fail)
        self._harmless = self._hooks.harmless
        self._pipeline = Pipeline()
        self._job: RankOfJob | None = None
        self._table: Table | None = None
        self._own: RankFigures | None = None
        self._agreement: Agreement | None = None
        self._capture: Session | None = None
        self._captures = 0
        self._undisturbed = 0
        self._memory = -1
        self._device: int | None = None
        self._reports: dict[int, RankReport] = {}
        self._wanted = threading.Event()
        self._stop = threading.Event()
        self._off = False
        self._undo = ExitStack() if undo is None else undo
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Stand around the job's functions from here on."""
        with self._harmless:
            self._hooks.install()
            self._undo.callback(self._hooks.remove)
            atexit.register(self.close)
            reference = weakref.ref(self)
            os.register_at_fork(after_in_child=lambda: _silence(reference()))

    # What the job calls

    def step(self) -> None:
        """Say that a step ended, and the next begins. Found by itself where schedules run."""
        if self._off:
            return
        with self._harmless:
            if self._job is None:
                self._join()
            self._recorder.beat()
            self._see_to_capture()

    def forward(self, stage: int, microbatch: int | None = None) -> AbstractContextManager[None]:
        """Meter a forward pass of a loop of your own: `with meter.forward(stage): …`."""
        return self._pass("F", stage, microbatch)

    def backward(self, stage: int, microbatch: int | None = None) -> AbstractContextManager[None]:
        """Meter a backward pass of a loop of your own."""
        return self._pass("B", stage, microbatch)

    @contextmanager
    def _pass(self, kind: str, stage: int, microbatch: int | None) -> Iterator[None]:
        row = None
        with self._harmless:
            row = self._hooks.begin_pass(kind, stage, microbatch)
        try:
            yield
        finally:
            if row is not None:
                with self._harmless:
                    self._recorder.end(row)

    def straggler(self) -> Straggler | None:
        """Tell which rank drags this one's pipeline, since when, by how much; never waits."""
        with self._harmless:
            return find_straggler(self._of_pipeline())
        return None

    def bubble(self) -> float | None:
        """Return the bubble of this rank's pipeline, as far as its ranks have told."""
        with self._harmless:
            reports = self._of_pipeline()
            place = self._hooks.place
            complete = place is not None and len(reports) == len(place.ranks)
            return bubble_of(reports) if complete else None
        return None

    def capture_soon(self) -> None:
        """Ask for a capture of a few steps, on all ranks, unless one was taken lately."""
        self._wanted.set()

    def close(self) -> None:
        """Write what there is, and leave the job as it was before."""
        with self._harmless:
            if not self._off:
                self._close()
            self._undo.close()
            atexit.unregister(self.close)

    # On the job's thread

    def _close(self) -> None:
        if self._job is not None:
            self._recorder.beat()  # the last step ends here
        if self._capture is not None:
            self._capture.close()
        self._stop.set()
        if self._thread is not None:
            self._thread.join(CLOSE_S)
        if self._thread is None or not self._thread.is_alive():
            self._write_the_last()
        self._fall_silent()

    def _write_the_last(self) -> None:
        """Give the device a moment to come to the end, and write what there is."""
        for _ in range(10):
            self._read()
            if not self._recorder.pending:
                break
            time.sleep(_LAST_LOOK_S)
        if self._table is not None:
            self._table.write()

    def look_at(self, pipeline: Any) -> None:
        """Take a schedule for what it says of itself."""
        if pipeline is None:
            return
        self._pipeline = find_pipeline(pipeline)
        stages = self._pipeline.stages
        self._hooks.place = find_place(getattr(stages[0], "group", None))
        self._hooks.stages.update(int(stage.stage_index) for stage in stages)

    def fail(self, error: Exception) -> None:
        """Say once what went wrong, and be silent from here on.

        What stands around the job's functions stays there and does nothing: the job may be inside.
        """
        if self._off:
            return
        self.problem = describe(error)
        self._fall_silent()
        say(f"the meter is silent from here on: {self.problem}")

    def _fall_silent(self) -> None:
        self._off = True
        self._stop.set()
        with suppress(Exception):
            self._recorder.stop()

    def _join(self) -> None:
        """Find out who this is, once torch.distributed can tell."""
        self._job = job = find_rank()
        if self._hooks.place is None:
            self._hooks.place = find_place(None)
        self._table = Table(self.settings, job, self._pipeline)
        self._own = RankFigures(rank=job.rank)
        store = None
        if dist.is_available() and dist.is_initialized():
            store = dist.distributed_c10d._get_default_store()  # noqa: SLF001 (no public way to it)
        self._agreement = Agreement(store, job.world_size)
        if uses_cuda():
            self._device = torch.cuda.current_device()
        self._thread = threading.Thread(target=self._run, name="debubble-meter", daemon=True)
        self._thread.start()

    def _read(self) -> None:
        """Take in the steps that the device, or the host, is past."""
        for step in self._recorder.finished():
            self._take(step)

    def _take(self, step: Step) -> None:
        """Take in a step whose times are known."""
        figures = measure_step(step)
        if figures is None or self._table is None or self._own is None or self._job is None:
            return
        if step.number % self.settings.segment == 0 and not self._recorder.on_host:
            self._memory = torch.cuda.max_memory_allocated()
        place = self._hooks.place
        self._table.add(step, 0 if place is None else place.pipeline, self._memory)
        disturbed = self._capture is not None or step.number < self._undisturbed
        if self._own.take(figures, disturbed=disturbed) and self.settings.on_drift:
            self._wanted.set()

    def _see_to_capture(self) -> None:
        """Begin a capture at the step that was agreed on, or go on with one."""
        number, agreement = self._recorder.number, self._agreement
        if self._capture is not None:
            self._capture.step()
            if self._capture.finished:
                self._capture.close()
                self._capture = None
                self._undisturbed = number + 1
            return
        if agreement is None or agreement.step is None or number < agreement.step:
            return
        if number > agreement.step:
            _log.warning("debubble meter: step %d was to be captured, and is past", agreement.step)
        else:
            settings = CaptureSettings(
                wait=number, out=self.settings.out / CAPTURES, keep=KEPT_CAPTURES
            )
            self._capture = begin(settings, self._pipeline.schedule, done=number).__enter__()
            self._captures += 1
        agreement.take()

    # Off the job's thread

    def _run(self) -> None:
        next_line, looks, first = self._clock() + LINE_S, 0, 0
        try:
            if self._device is not None:  # a thread begins on the first, and would open it
                torch.cuda.set_device(self._device)
            poll_s = trigger.POLL_S if self._agreement is None else self._agreement.poll_s
            while not self._stop.wait(poll_s):
                self._read()
                self._ask_and_listen()
                if looks % _LOOKS_PER_REPORT == 0:
                    self._tell()
                    write_metrics(self.settings.out, self._rank, self.metrics())
                looks += 1
                if self._clock() >= next_line:
                    first = self._say_line(first)
                    next_line = self._clock() + LINE_S
        except Exception as error:  # noqa: BLE001 (the job must run)
            self.fail(error)

    def _ask_and_listen(self) -> None:
        agreement, own = self._agreement, self._own
        if agreement is None or own is None:
            return
        if asked_by_file(self.settings.out):
            self._wanted.set()
        if self._wanted.is_set() and self._capture is None:
            self._wanted.clear()
            step_s = own.recent[-1].step_ns / 1e9 if own.recent else 1.0
            agreement.ask(self._recorder.number, step_s)
        agreement.listen()

    def _tell(self) -> None:
        """Tell the other ranks of the pipeline, and hear what they told."""
        if self._own is None or not self._own.recent:
            return
        report = self._own.report()
        self._reports[report.rank] = report
        place, store = self._hooks.place, None if self._agreement is None else self._agreement.store
        if store is None or place is None:
            return
        store.set(f"{_REPORTS}/{report.rank}", report.to_text())
        for rank in place.ranks:
            if rank != report.rank and store.check([f"{_REPORTS}/{rank}"]):
                self._reports[rank] = RankReport.from_text(store.get(f"{_REPORTS}/{rank}"))

    def _say_line(self, first: int) -> int:
        """Write the line of the log, and the scalars; return where the next begins."""
        if self._own is None or not self._own.recent:
            return first
        last = self._own.recent[-1].number
        place = self._hooks.place
        figures = self._figures()
        if place is None or place.rank == place.ranks[0]:
            line = show_line(first, last, self.bubble(), figures, self.straggler())
            _log.info("debubble meter: %s", line)
        if self._logger is not None:
            try:
                self._logger(scalars_of(figures), last)
            except Exception as error:  # noqa: BLE001 (a logger that fails is asked no more)
                self._logger = None
                say(f"the meter's logger is asked no more: {describe(error)}")
        return last + 1

    def _figures(self) -> list[Figure]:
        own = self._own
        figures = [] if own is None else own.figures()
        bubble, straggler = self.bubble(), self.straggler()
        if bubble is not None:
            figures.append(Figure("bubble_fraction", {}, bubble))
        if straggler is not None:
            rank = {"straggler": str(straggler.rank)}
            figures.append(Figure("straggler_slower_fraction", rank, straggler.slower_by))
        if self._memory >= 0:
            figures.append(Figure("peak_memory_bytes", {}, float(self._memory)))
        figures += [
            Figure("steps_total", {}, float(self._recorder.number)),
            Figure("left_out_total", {}, float(self._recorder.left_out)),
            Figure("captures_total", {}, float(self._captures)),
        ]
        return figures

    def metrics(self) -> str:
        """Return the figures of this rank in the text format of Prometheus."""
        place = self._hooks.place
        labels = {"rank": str(self._rank), "pipeline": str(0 if place is None else place.pipeline)}
        return show_metrics(self._figures(), labels)

    @property
    def _rank(self) -> int:
        return 0 if self._job is None else self._job.rank

    def _of_pipeline(self) -> list[RankReport]:
        place = self._hooks.place
        members = self._reports if place is None else place.ranks
        return [self._reports[rank] for rank in sorted(members) if rank in self._reports]


def _silence(meter: Meter | None) -> None:
    """Leave a forked process alone: it is no rank, and has none of the meter's threads."""
    if meter is not None:
        meter._off = True  # noqa: SLF001 (of this module)
        meter._recorder.stop()  # noqa: SLF001
        atexit.unregister(meter.close)
