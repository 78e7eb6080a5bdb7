"""Files and an executor in → what came of each, also where a worker dies.

Loaded where there is work for more than this process: starting Python's pools takes 30 ms.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import threading
from collections import Counter, deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import (
    FIRST_COMPLETED,
    BrokenExecutor,
    CancelledError,
    Executor,
    Future,
    ProcessPoolExecutor,
    wait,
)
from contextlib import suppress
from typing import ParamSpec, TypeVar

from debubble.errors import TraceError
from debubble.trace.engine import Task, too_large
from debubble.trace.format import TraceFile
from debubble.trace.source import Limits

# One file in work and one at hand: a worker never waits for orders, and what came back and is not
# yet used stays small however many ranks there are.
_AHEAD = 2

# A file that takes its worker along may have been the victim of its neighbours; three times alone
# it was not. A connection may break, a disk stutter; what fails three times is broken.
_TRIES = 3

# Of Linux' prctl: what a process is sent when its parent ends.
_DEATH_SIGNAL = 1

_Known = TypeVar("_Known", bound=TraceFile)
_Result = TypeVar("_Result")
_Words = ParamSpec("_Words")


class WorkerLost(Exception):
    """A task took its worker along; the executor goes on without it."""


def hand_out(
    task: Task[_Known, _Result], files: Sequence[_Known], executor: Executor, limits: Limits
) -> Generator[tuple[int, _Result | TraceError]]:
    """Yield the number of each file with what came of it.

    A file whose worker died is set aside and tried alone when all others are done: so the one that
    kills is told from those that were beside it. Of somebody else's executor, what is lost is lost.
    """
    at_most = _AHEAD * (int(getattr(executor, "_max_workers", 0)) or os.cpu_count() or 1)
    waiting, suspects = deque(range(len(files))), deque[int]()
    flying: dict[Future[_Result], int] = {}
    tries = Counter[int]()
    broken = alone = False
    try:
        while waiting or suspects or flying:
            if broken and not flying:
                if not isinstance(executor, Pool):
                    yield from ((number, _lost(files[number])) for number in (*waiting, *suspects))
                    return
                executor.renew()
                broken = False
            while not broken and len(flying) < at_most and (waiting or (suspects and not flying)):
                number = (waiting or suspects).popleft()
                alone = not waiting and not flying
                try:
                    flying[executor.submit(task, files[number], limits)] = number
                except BrokenExecutor:
                    broken = True
                    waiting.appendleft(number)
            for future in wait(flying, return_when=FIRST_COMPLETED).done:
                number = flying.pop(future)
                error = CancelledError() if future.cancelled() else future.exception()
                if error is None:
                    yield number, future.result()
                    continue
                tries[number] += 1
                broken |= isinstance(error, BrokenExecutor)
                least = 1 if alone and not isinstance(executor, Pool) else _TRIES
                final = tries[number] >= least and (alone or isinstance(error, OSError))
                problem = _problem_of(files[number], error, final=final)
                if problem is not None:
                    yield number, problem
                else:
                    (waiting if isinstance(error, OSError) else suspects).append(number)
    finally:
        for future in flying:
            future.cancel()


def _problem_of(known: TraceFile, error: BaseException, *, final: bool) -> TraceError | None:
    """Say what an error tells of its file; None where that deserves another try."""
    if isinstance(error, TraceError):
        return error
    if isinstance(error, MemoryError):
        return too_large(known)
    if isinstance(error, BrokenExecutor | CancelledError | WorkerLost):
        return _lost(known) if final else None
    if isinstance(error, OSError):
        return _failed(known, error) if final else None
    raise error


def _lost(known: TraceFile) -> TraceError:
    """Say that whoever reads a file dies of it."""
    return TraceError(
        "was not read: a worker process died, perhaps for want of memory",
        hint="read fewer files at once, or on a larger machine",
        file=known.file,
        rank=known.rank,
    )


def _failed(known: TraceFile, error: OSError) -> TraceError:
    """Say that a file was tried often enough."""
    return TraceError(
        f"was not read: failed {_TRIES} times, the last time with: {error or type(error).__name__}",
        hint="check the disks and the network of the workers",
        file=known.file,
        rank=known.rank,
    )


class Pool(Executor):
    """Processes of this machine, started anew when one dies and takes the others along."""

    def __init__(self, workers: int) -> None:
        self._max_workers = workers
        self._start()

    def _start(self) -> None:
        # Forking is quickest, and safe only while no other thread may hold a lock.
        method = "fork" if threading.active_count() == 1 and os.name == "posix" else "spawn"
        context = multiprocessing.get_context(method)
        self._pool = ProcessPoolExecutor(self._max_workers, context, initializer=_follow_the_parent)

    def submit(
        self, task: Callable[_Words, _Result], /, *words: _Words.args, **more: _Words.kwargs
    ) -> Future[_Result]:
        """Hand out work."""
        return self._pool.submit(task, *words, **more)

    def renew(self) -> None:
        """Start the processes anew."""
        self._pool.shutdown()
        self._start()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Send the workers home."""
        self._pool.shutdown(wait=wait, cancel_futures=cancel_futures)

    def dismiss(self) -> None:
        """End the workers at once, in the middle of their files."""
        processes = list((getattr(self._pool, "_processes", None) or {}).values())
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
