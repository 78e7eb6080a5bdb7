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
from collections.abc import Callable, Generator, Iterator, Sequence
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
from dataclasses import dataclass
from typing import Generic, ParamSpec, TypeVar

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


@dataclass(slots=True)
class _Order(Generic[_Known]):
    """One file on its way."""

    number: int
    known: _Known
    tries: int = 0
    losses: int = 0
    alone: bool = False


class Shift(Generic[_Known, _Result]):
    """Files handed out to workers until each has its outcome.

    A file whose worker died is set aside and tried alone when all others are done: so the one that
    kills is told from those that were beside it.
    """

    def __init__(
        self,
        task: Task[_Known, _Result],
        files: Sequence[_Known],
        executor: Executor,
        limits: Limits,
    ) -> None:
        self._task = task
        self._executor = executor
        # Of somebody else's executor, what it loses is lost, and of its workers it tells itself.
        self._attempts = _TRIES if isinstance(executor, Pool) else 1
        self._limits = limits
        self._waiting = deque(_Order(number, known) for number, known in enumerate(files))
        self._suspects: deque[_Order[_Known]] = deque()
        self._flying: dict[Future[_Result], _Order[_Known]] = {}
        self._is_broken = False

    def outcomes(self) -> Generator[tuple[int, _Result | TraceError]]:
        """Yield the number of each file with what came of it."""
        try:
            while self._waiting or self._suspects or self._flying:
                yield from self._hand_out()
                done, _ = wait(self._flying, return_when=FIRST_COMPLETED)
                for future in done:
                    yield from self._settle(self._flying.pop(future), future)
        finally:
            for future in self._flying:
                future.cancel()

    def _hand_out(self) -> Iterator[tuple[int, TraceError]]:
        """Fill the workers' hands; a suspect goes alone."""
        if self._is_broken and self._flying:
            return
        if self._is_broken and isinstance(self._executor, Pool):
            self._executor.renew()
        elif self._is_broken:
            for order in (*self._waiting, *self._suspects):
                yield order.number, _lost(order.known)
            self._waiting.clear()
            self._suspects.clear()
            return
        self._is_broken = False
        workers = int(getattr(self._executor, "_max_workers", 0)) or os.cpu_count() or 1
        most = _AHEAD * workers
        while self._waiting and len(self._flying) < most and not self._is_broken:
            self._submit(self._waiting.popleft())
        if self._suspects and not self._flying and not self._is_broken:
            self._submit(self._suspects.popleft())

    def _submit(self, order: _Order[_Known]) -> None:
        order.alone = not self._flying and not self._waiting
        try:
            self._flying[self._executor.submit(self._task, order.known, self._limits)] = order
        except BrokenExecutor:
            self._is_broken = True
            self._waiting.appendleft(order)

    def _settle(
        self, order: _Order[_Known], future: Future[_Result]
    ) -> Iterator[tuple[int, _Result | TraceError]]:
        """Yield what came of a file, or put it back where it deserves another try."""
        error = CancelledError() if future.cancelled() else future.exception()
        if error is None:
            yield order.number, future.result()
        elif isinstance(error, TraceError):
            yield order.number, error
        elif isinstance(error, MemoryError):
            yield order.number, too_large(order.known)
        elif isinstance(error, BrokenExecutor | CancelledError | WorkerLost):
            self._is_broken |= isinstance(error, BrokenExecutor)
            order.losses += 1
            if order.alone and order.losses >= self._attempts:
                yield order.number, _lost(order.known)
            else:
                self._suspects.append(order)
        elif isinstance(error, OSError):
            order.tries += 1
            if order.tries < _TRIES:
                self._waiting.append(order)
            else:
                yield order.number, _failed(order.known, error)
        else:
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
        self._pool = _make_pool(workers)

    def submit(
        self, task: Callable[_Words, _Result], /, *words: _Words.args, **more: _Words.kwargs
    ) -> Future[_Result]:
        """Hand out work."""
        return self._pool.submit(task, *words, **more)

    def renew(self) -> None:
        """Start the processes anew."""
        self._pool.shutdown()
        self._pool = _make_pool(self._max_workers)

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


def _make_pool(workers: int) -> ProcessPoolExecutor:
    # Forking is quickest, and safe only while no other thread may hold a lock.
    method = "fork" if threading.active_count() == 1 and os.name == "posix" else "spawn"
    context = multiprocessing.get_context(method)
    return ProcessPoolExecutor(workers, context, initializer=_follow_the_parent)


def _follow_the_parent() -> None:
    """Leave Ctrl-C, which reaches every process of a terminal, to the parent, and end with it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with suppress(OSError, AttributeError):  # Linux alone can be asked for that
        ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL)
