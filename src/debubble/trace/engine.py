"""What the user calls an engine in → the crew of workers that it lends while files are read.

`local` is a process pool of this machine, where the files are worth one; `tcp://scheduler:8786` and
`tls://…` are a Dask cluster; anything else that is a `concurrent.futures.Executor` will do as well.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, CancelledError, Executor, Future, ProcessPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol, TypeVar

from debubble.errors import UsageError
from debubble.trace.formats import Recognised
from debubble.trace.source import Limits, size_of

# Below this, starting worker processes takes longer than reading (4 ranks of 5 MB: 0.2 s).
_WORTH_A_POOL_BYTES = 8 * 1024 * 1024

# One file in work and one at hand: a worker never waits for orders, and what came back and is not
# yet used stays small however many ranks there are.
AHEAD = 2

# A file that takes its worker along may have been the victim of its neighbours; three times alone
# it was not.
_ATTEMPTS = 3

# Of Linux' prctl: what a process is sent when its parent ends.
_DEATH_SIGNAL = 1

_CLUSTER_SCHEMES = ("tcp", "tls", "ws", "wss")

_Known = TypeVar("_Known", bound=Recognised)
_Result = TypeVar("_Result")
Task = Callable[[_Known, Limits], _Result]


class Crew(Protocol):
    """Workers, as long as they are lent."""

    attempts: int
    """How often a file may lose its worker while nothing else is in work, before it is given up."""

    def room(self) -> int:
        """Return how many files may be on their way at once."""
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

    def hire(self, files: Sequence[Recognised]) -> AbstractContextManager[Crew | None]:
        """Lend a crew, or None where the files are best read right here."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalEngine:
    """Worker processes of this machine, as many as it has processors unless told."""

    workers: int | None = None
    worth_bytes: int | None = None

    @contextmanager
    def hire(self, files: Sequence[Recognised]) -> Iterator[Crew | None]:
        """Lend a process pool, where the files are worth one."""
        worth = _WORTH_A_POOL_BYTES if self.worth_bytes is None else self.worth_bytes
        if len(files) < 2 or not _are_worth(files, worth):
            yield None
            return
        crew = ProcessCrew(min(len(files), self.workers or os.cpu_count() or 1))
        try:
            yield crew
        except BaseException:
            crew.dismiss()
            raise
        crew.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenEngine:
    """An executor of the caller's, who also shuts it down."""

    executor: Executor

    @contextmanager
    def hire(self, files: Sequence[Recognised]) -> Iterator[Crew | None]:  # noqa: ARG002
        """Lend the executor as it is."""
        yield GivenCrew(self.executor)


LOCAL = LocalEngine()


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


class GivenCrew:
    """Somebody else's executor: what it loses is lost."""

    attempts = 1

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._workers = int(getattr(executor, "_max_workers", 0)) or os.cpu_count() or 1

    def room(self) -> int:
        """Return how many files may be on their way at once."""
        return AHEAD * self._workers

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
        """Trust the caller."""


class ProcessCrew:
    """A process pool that is built anew when a worker dies and takes it along."""

    attempts = _ATTEMPTS

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._pool = _make_pool(workers)

    def room(self) -> int:
        """Return how many files may be on their way at once."""
        return AHEAD * self._workers

    def submit(self, task: Task[_Known, _Result], known: _Known, limits: Limits) -> Future[_Result]:
        """Hand out one file."""
        return self._pool.submit(task, known, limits)

    def is_loss(self, error: BaseException) -> bool:
        """Tell the loss of a worker from an error of the task."""
        return isinstance(error, BrokenExecutor)

    def renew(self) -> bool:
        """Build the pool anew."""
        self._pool.shutdown(wait=True)
        self._pool = _make_pool(self._workers)
        return True

    def look_around(self) -> None:
        """Trust the pool: it tells of every worker that dies."""

    def close(self) -> None:
        """Send the workers home; none has anything left to do."""
        self._pool.shutdown(wait=True)

    def dismiss(self) -> None:
        """End the workers at once, in the middle of their files."""
        processes = list((getattr(self._pool, "_processes", None) or {}).values())
        self._pool.shutdown(wait=False, cancel_futures=True)
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


def _are_worth(files: Sequence[Recognised], worth: int) -> bool:
    """Add up sizes until they are worth a pool; objects in memory are in no other process."""
    if any(known.file.startswith("memory://") for known in files):
        return False
    sizes = accumulate(size_of(known.file) for known in files)
    return any(total >= worth for total in sizes)
