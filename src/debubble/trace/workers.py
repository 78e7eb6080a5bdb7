"""Files and an executor in → what came of each, also where a worker dies.

Loaded where there is work for more than this process: starting Python's pools takes 30 ms.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Generator, Sequence
from concurrent.futures import (
    FIRST_COMPLETED,
    BrokenExecutor,
    CancelledError,
    Executor,
    Future,
    ProcessPoolExecutor,
    wait,
)
from contextlib import nullcontext, suppress
from typing import TypeVar

from debubble.errors import TraceError
from debubble.trace.engine import Task, outcome_of
from debubble.trace.format import TraceFile
from debubble.trace.source import Limits

# One file in work and one at hand: a worker never waits for orders, and what came back and is not
# yet used stays small however many ranks there are.
_AHEAD = 2

# Of Linux' prctl: what a process is sent when its parent ends.
_DEATH_SIGNAL = 1

_Known = TypeVar("_Known", bound=TraceFile)
_Result = TypeVar("_Result")


class WorkerLost(Exception):
    """A task took its worker along; the executor goes on without it."""


def hand_out(
    task: Task[_Known, _Result], files: Sequence[_Known], executor: Executor, limits: Limits
) -> Generator[tuple[int, _Result | TraceError]]:
    """Yield the number of each file with what came of it.

    What was lost with a worker is read again in the end, one file after the other, and each in a
    process of its own where the processes are ours: so the file that kills is told from those that
    were beside it.
    """
    at_most = _AHEAD * (int(getattr(executor, "_max_workers", 0)) or os.cpu_count() or 1)
    waiting, lost = deque(range(len(files))), list[int]()
    flying: dict[Future[_Result], int] = {}
    try:
        while waiting or flying:
            while waiting and len(flying) < at_most:
                number = waiting.popleft()
                try:
                    flying[executor.submit(task, files[number], limits)] = number
                except BrokenExecutor:
                    lost += [number, *waiting]
                    waiting.clear()
            for future in wait(flying, return_when=FIRST_COMPLETED).done:
                number = flying.pop(future)
                try:
                    outcome = outcome_of(files[number], future.result)
                except (BrokenExecutor, CancelledError, WorkerLost):
                    lost.append(number)
                else:
                    yield number, outcome
        for number in lost:
            outcome = TraceError(
                "was not read: a worker process died, perhaps for want of memory",
                hint="read fewer files at once, or on a larger machine",
                file=files[number].file,
                rank=files[number].rank,
            )
            own = Pool(1) if isinstance(executor, Pool) else nullcontext(executor)
            with own as alone, suppress(BrokenExecutor, CancelledError, WorkerLost):
                future = alone.submit(task, files[number], limits)
                outcome = outcome_of(files[number], future.result)
            yield number, outcome
    finally:
        for future in flying:
            future.cancel()


class Pool(ProcessPoolExecutor):
    """Processes of this machine."""

    def __init__(self, workers: int) -> None:
        # Forking is quickest, and safe only while no other thread may hold a lock.
        method = "fork" if threading.active_count() == 1 and os.name == "posix" else "spawn"
        context = multiprocessing.get_context(method)
        super().__init__(workers, context, initializer=_follow_the_parent)

    def __exit__(self, *_: object) -> None:
        """End the workers at once: what is still in work then is not wanted."""
        processes = list((self._processes or {}).values())
        self.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            with suppress(OSError, ValueError):
                process.terminate()


def _follow_the_parent() -> None:
    """Leave Ctrl-C, which reaches every process of a terminal, to the parent, and end with it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with suppress(OSError, AttributeError):  # Linux alone can be asked for that
        ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL)
