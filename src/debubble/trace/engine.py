"""A task and files in → what came of each, also where a worker dies.

Work goes to a `concurrent.futures.Executor`: processes of this machine, where the files are worth
them, or whatever an engine lends; `debubble.annexes.cluster` lends the workers of a Dask cluster.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Protocol, TypeVar

from debubble.errors import TraceError, TraceTooLarge
from debubble.trace.format import TraceFile
from debubble.trace.source import Limits, size_of

if TYPE_CHECKING:
    from concurrent.futures import Executor

# Below this, starting worker processes takes longer than reading (4 ranks of 5 MB: 0.2 s).
_WORTH_A_POOL_BYTES = 8 * 1024 * 1024

_Known = TypeVar("_Known", bound=TraceFile)
_Result = TypeVar("_Result")
Task = Callable[[_Known, Limits], _Result]
Progress = Callable[[int, int], None]


class Engine(Protocol):
    """Lends an executor for some files; nothing is left running once it is given back."""

    def lend(self, files: Sequence[TraceFile]) -> AbstractContextManager[Executor | None]:
        """Lend an executor, or None where the files are best read right here."""
        ...


def map_files(
    task: Task[_Known, _Result],
    files: Sequence[_Known],
    engine: Engine,
    limits: Limits,
    on_progress: Progress | None = None,
) -> Generator[tuple[_Known, _Result | TraceError]]:
    """Yield what comes of each file, in the files' order.

    A `TraceError` of the task, want of memory and a worker that dies of a file are the outcome of
    that file alone. Left early, the iterator cancels what is queued.
    """
    early: dict[int, _Result | TraceError] = {}
    following = 0
    with engine.lend(files) as executor:
        if executor is None:
            outcomes = _work_here(task, files, limits)
        else:
            from debubble.trace.workers import hand_out  # noqa: PLC0415 (slow to load)

            outcomes = hand_out(task, files, executor, limits)
        with closing(outcomes):
            for done, (number, outcome) in enumerate(outcomes, start=1):
                if on_progress is not None:
                    on_progress(done, len(files))
                early[number] = outcome
                while following in early:
                    yield files[following], early.pop(following)
                    following += 1


def _work_here(
    task: Task[_Known, _Result], files: Sequence[_Known], limits: Limits
) -> Generator[tuple[int, _Result | TraceError]]:
    """Do the work in this process, one file after the other."""
    for number, known in enumerate(files):
        yield number, outcome_of(known, partial(task, known, limits))


def outcome_of(known: TraceFile, result: Callable[[], _Result]) -> _Result | TraceError:
    """Return a result, or the error that is told of its file alone."""
    try:
        return result()
    except TraceError as error:
        return error
    except MemoryError:
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
    def lend(self, files: Sequence[TraceFile]) -> Iterator[Executor | None]:
        """Lend a process pool, where the files are worth one and other processes can see them."""
        worth = _WORTH_A_POOL_BYTES if self.worth_bytes is None else self.worth_bytes
        in_memory = any(known.file.startswith("memory://") for known in files)
        sizes = accumulate(size_of(known.file) for known in files)  # asked for until it is enough
        if len(files) < 2 or in_memory or not any(total >= worth for total in sizes):
            yield None
            return
        from debubble.trace.workers import Pool  # noqa: PLC0415 (slow to load)

        with Pool(min(len(files), self.workers or os.cpu_count() or 1)) as pool:
            yield pool


LOCAL = LocalEngine()


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenEngine:
    """An executor of the caller's, who also shuts it down; None: this process."""

    executor: Executor | None

    @contextmanager
    def lend(self, files: Sequence[TraceFile]) -> Iterator[Executor | None]:  # noqa: ARG002
        """Lend the executor as it is."""
        yield self.executor
