"""A task and files in → what came of each, also where a worker dies.

`local` is a process pool of this machine, where the files are worth one; `tcp://scheduler:8786` and
`tls://…` are a Dask cluster; anything else that is a `concurrent.futures.Executor` will do as well.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import threading
import time
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
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import dataclass
from itertools import accumulate
from typing import Generic, Protocol, TypeVar

from debubble.errors import TraceError, TraceTooLarge, UsageError
from debubble.trace.format import TraceFile
from debubble.trace.source import Limits, size_of

# Below this, starting worker processes takes longer than reading (4 ranks of 5 MB: 0.2 s).
_WORTH_A_POOL_BYTES = 8 * 1024 * 1024

# One file in work and one at hand: a worker never waits for orders, and what came back and is not
# yet used stays small however many ranks there are.
_AHEAD = 2

# A file that takes its worker along may have been the victim of its neighbours; three times alone
# it was not.
_ATTEMPTS = 3

# A connection may break, a disk stutter; what fails three times is broken.
_TRIES = 3
# How often somebody looks whether the workers are still there.
_LOOK_S = 1.0

# Of Linux' prctl: what a process is sent when its parent ends.
_DEATH_SIGNAL = 1

_CLUSTER_SCHEMES = ("tcp", "tls", "ws", "wss")

_Known = TypeVar("_Known", bound=TraceFile)
_Result = TypeVar("_Result")
Task = Callable[[_Known, Limits], _Result]
Progress = Callable[[int, int], None]


class Crew(Protocol):
    """Workers, as long as they are lent."""

    attempts: int
    """How often a file may lose its worker while nothing else is in work, before it is given up."""

    def workers(self) -> int:
        """Return how many files can be in work at once, at least one."""
        ...

    def submit(self, task: Task[_Known, _Result], known: _Known, limits: Limits) -> Future[_Result]:
        """Hand out one file."""
        ...

    def is_loss(self, error: BaseException) -> bool:
        """Tell the loss of a worker from an error of the task."""
        ...

    def renew(self) -> bool:
        """Replace lost workers; False where nobody can."""
        ...

    def look_around(self) -> None:
        """See now and then who is there; raise where there is nobody left to wait for."""
        ...


class Engine(Protocol):
    """Lends a crew for some files; nothing is left running or queued once it is given back."""

    def hire(self, files: Sequence[TraceFile]) -> AbstractContextManager[Crew | None]:
        """Lend a crew, or None where the files are best read right here."""
        ...


def engine_at(address: str) -> Engine:
    """Return the engine of that name or address."""
    if address == "local":
        return LOCAL
    scheme, separator, rest = address.partition("://")
    if separator and rest.rpartition(":")[2].isdigit() and scheme in _CLUSTER_SCHEMES:
        from debubble.trace.dask_engine import DaskEngine  # noqa: PLC0415 (an extra, and slow)

        return DaskEngine(address=address)
    raise UsageError(
        f"there is no engine {address!r}",
        hint="give local, or the address of a Dask scheduler such as tcp://scheduler:8786",
    )


def map_files(  # noqa: PLR0913 (one argument a question)
    task: Task[_Known, _Result],
    files: Sequence[_Known],
    engine: Engine,
    limits: Limits,
    on_progress: Progress | None = None,
    *,
    ordered: bool = False,
) -> Generator[tuple[_Known, _Result | TraceError]]:
    """Yield what comes of each file as it comes, or in the files' order.

    A `TraceError` of the task, a worker that dies of a file and a task that fails three times are
    the outcome of that file alone. Left early, the iterator cancels what is queued.
    """
    early: dict[int, _Result | TraceError] = {}
    following = 0
    with engine.hire(files) as crew:
        if crew is None:
            outcomes = _work_here(task, files, limits)
        else:
            outcomes = _Shift(task, files, crew, limits).outcomes()
        with closing(outcomes):
            for done, (number, outcome) in enumerate(outcomes, start=1):
                if on_progress is not None:
                    on_progress(done, len(files))
                if not ordered:
                    yield files[number], outcome
                    continue
                early[number] = outcome
                while following in early:
                    yield files[following], early.pop(following)
                    following += 1


def _work_here(
    task: Task[_Known, _Result], files: Sequence[_Known], limits: Limits
) -> Generator[tuple[int, _Result | TraceError]]:
    """Do the work in this process, one file after the other."""
    for number, known in enumerate(files):
        outcome: _Result | TraceError
        try:
            outcome = task(known, limits)
        except TraceError as error:
            outcome = error
        except MemoryError:
            outcome = too_large(known)
        yield number, outcome


@dataclass(slots=True)
class _Order(Generic[_Known]):
    """One file on its way."""

    number: int
    known: _Known
    tries: int = 0
    losses: int = 0
    alone: bool = False


class _Shift(Generic[_Known, _Result]):
    """Files handed out to a crew until each has its outcome.

    A file whose worker died is set aside and tried alone when all others are done: so the one that
    kills is told from those that were beside it.
    """

    def __init__(
        self, task: Task[_Known, _Result], files: Sequence[_Known], crew: Crew, limits: Limits
    ) -> None:
        self._task = task
        self._crew = crew
        self._limits = limits
        self._waiting = deque(_Order(number, known) for number, known in enumerate(files))
        self._suspects: deque[_Order[_Known]] = deque()
        self._flying: dict[Future[_Result], _Order[_Known]] = {}
        self._is_broken = False

    def outcomes(self) -> Generator[tuple[int, _Result | TraceError]]:
        """Yield the number of each file with what came of it."""
        looks_at_s = time.monotonic() + _LOOK_S
        try:
            while self._waiting or self._suspects or self._flying:
                yield from self._hand_out()
                done, _ = wait(self._flying, timeout=_LOOK_S, return_when=FIRST_COMPLETED)
                now_s = time.monotonic()
                if now_s >= looks_at_s:
                    looks_at_s = now_s + _LOOK_S
                    self._crew.look_around()
                for future in done:
                    yield from self._settle(self._flying.pop(future), future)
        finally:
            for future in self._flying:
                future.cancel()

    def _hand_out(self) -> Iterator[tuple[int, TraceError]]:
        """Fill the crew's hands; a suspect goes alone."""
        if self._is_broken and self._flying:
            return
        if self._is_broken and not self._crew.renew():
            for order in (*self._waiting, *self._suspects):
                yield order.number, _lost(order.known)
            self._waiting.clear()
            self._suspects.clear()
            return
        self._is_broken = False
        most = _AHEAD * self._crew.workers()
        while self._waiting and len(self._flying) < most and not self._is_broken:
            self._submit(self._waiting.popleft())
        if self._suspects and not self._flying and not self._is_broken:
            self._submit(self._suspects.popleft())

    def _submit(self, order: _Order[_Known]) -> None:
        order.alone = not self._flying and not self._waiting
        try:
            self._flying[self._crew.submit(self._task, order.known, self._limits)] = order
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
        elif self._crew.is_loss(error):
            self._is_broken |= isinstance(error, BrokenExecutor)
            order.losses += 1
            if order.alone and order.losses >= self._crew.attempts:
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


def too_large(known: TraceFile) -> TraceTooLarge:
    """Say that a file does not fit."""
    return TraceTooLarge(
        "does not fit into memory",
        hint="record fewer steps, or read it on a larger machine",
        file=known.file,
        rank=known.rank,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalEngine:
    """Worker processes of this machine, as many as it has processors unless told."""

    workers: int | None = None
    worth_bytes: int | None = None

    @contextmanager
    def hire(self, files: Sequence[TraceFile]) -> Iterator[Crew | None]:
        """Lend a process pool, where the files are worth one and other processes can see them."""
        worth = _WORTH_A_POOL_BYTES if self.worth_bytes is None else self.worth_bytes
        in_memory = any(known.file.startswith("memory://") for known in files)
        sizes = accumulate(size_of(known.file) for known in files)  # asked for until it is enough
        if len(files) < 2 or in_memory or not any(total >= worth for total in sizes):
            yield None
            return
        crew = ProcessCrew(min(len(files), self.workers or os.cpu_count() or 1))
        try:
            yield crew
        except BaseException:
            crew.dismiss()
            raise
        crew.close()


LOCAL = LocalEngine()


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenEngine:
    """An executor of the caller's, who also shuts it down."""

    executor: Executor

    @contextmanager
    def hire(self, files: Sequence[TraceFile]) -> Iterator[Crew | None]:  # noqa: ARG002
        """Lend the executor as it is."""
        workers = int(getattr(self.executor, "_max_workers", 0)) or os.cpu_count() or 1
        yield ExecutorCrew(self.executor, workers)


class ExecutorCrew:
    """Somebody else's executor: what it loses is lost, and of its workers it tells itself."""

    attempts = 1

    def __init__(self, executor: Executor, workers: int) -> None:
        self._executor = executor
        self._workers = workers

    def workers(self) -> int:
        """Return how many files can be in work at once."""
        return self._workers

    def submit(self, task: Task[_Known, _Result], known: _Known, limits: Limits) -> Future[_Result]:
        """Hand out one file."""
        return self._executor.submit(task, known, limits)

    def is_loss(self, error: BaseException) -> bool:
        """Tell the loss of a worker from an error of the task."""
        return isinstance(error, BrokenExecutor | CancelledError)

    def renew(self) -> bool:
        """Say that nobody can: the executor is the caller's."""
        return False

    def look_around(self) -> None:
        """Trust the executor."""


class ProcessCrew(ExecutorCrew):
    """A process pool that is built anew when a worker dies and takes it along."""

    attempts = _ATTEMPTS

    def __init__(self, workers: int) -> None:
        super().__init__(_make_pool(workers), workers)

    def is_loss(self, error: BaseException) -> bool:
        """Tell the loss of a worker: nobody but us cancels."""
        return isinstance(error, BrokenExecutor)

    def renew(self) -> bool:
        """Build the pool anew."""
        self._executor.shutdown(wait=True)
        self._executor = _make_pool(self._workers)
        return True

    def close(self) -> None:
        """Send the workers home; none has anything left to do."""
        self._executor.shutdown(wait=True)

    def dismiss(self) -> None:
        """End the workers at once, in the middle of their files."""
        processes = list((getattr(self._executor, "_processes", None) or {}).values())
        self._executor.shutdown(wait=False, cancel_futures=True)
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
