"""A task and many files in → what came of each, through an engine, a few a worker at a time."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, CancelledError, Future, wait
from contextlib import closing
from dataclasses import dataclass
from typing import Generic, TypeVar

from debubble.errors import TraceError, TraceTooLarge
from debubble.trace.engine import Crew, Engine, Task
from debubble.trace.formats import Recognised
from debubble.trace.source import Limits

# A connection may break, a disk stutter; what fails three times is broken.
_TRIES = 3
# How often somebody looks whether the workers are still there.
_LOOK_S = 1.0

_Known = TypeVar("_Known", bound=Recognised)
_Result = TypeVar("_Result")
Progress = Callable[[int, int], None]


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
    with engine.hire(files) as crew:
        if crew is None:
            outcomes = _here(task, files, limits)
        else:
            outcomes = _Shift(task, files, crew, limits).outcomes()
        with closing(_counted(outcomes, len(files), on_progress)) as counted:
            arranged = _in_order(counted) if ordered else counted
            for number, outcome in arranged:
                yield files[number], outcome


def _counted(
    outcomes: Iterator[tuple[int, _Result | TraceError]], total: int, report: Progress | None
) -> Generator[tuple[int, _Result | TraceError]]:
    for done, outcome in enumerate(outcomes, start=1):
        if report is not None:
            report(done, total)
        yield outcome


def _in_order(
    outcomes: Iterator[tuple[int, _Result | TraceError]],
) -> Iterator[tuple[int, _Result | TraceError]]:
    """Hold back what comes too early."""
    held: dict[int, _Result | TraceError] = {}
    following = 0
    for number, outcome in outcomes:
        held[number] = outcome
        while following in held:
            yield following, held.pop(following)
            following += 1


def _here(
    task: Task[_Known, _Result], files: Sequence[_Known], limits: Limits
) -> Iterator[tuple[int, _Result | TraceError]]:
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
        self._looks_at_s = time.monotonic() + _LOOK_S

    def outcomes(self) -> Iterator[tuple[int, _Result | TraceError]]:
        """Yield the number of each file with what came of it."""
        try:
            while self._waiting or self._suspects or self._flying:
                yield from self._hand_out()
                done, _ = wait(self._flying, timeout=_LOOK_S, return_when=FIRST_COMPLETED)
                self._look_around()
                for future in done:
                    yield from self._settle(self._flying.pop(future), future)
        finally:
            for future in self._flying:
                future.cancel()

    def _look_around(self) -> None:
        now = time.monotonic()
        if now >= self._looks_at_s:
            self._looks_at_s = now + _LOOK_S
            self._crew.look_around()

    def _hand_out(self) -> Iterator[tuple[int, TraceError]]:
        """Fill the crew's hands; a suspect goes alone."""
        if self._is_broken and self._flying:
            return
        if self._is_broken and not self._crew.renew():
            for order in (*self._waiting, *self._suspects):
                yield order.number, lost(order.known)
            self._waiting.clear()
            self._suspects.clear()
            return
        self._is_broken = False
        while self._waiting and len(self._flying) < self._crew.room() and not self._is_broken:
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
        error = CancelledError() if future.cancelled() else future.exception()
        if error is None:
            yield order.number, future.result()
        elif isinstance(error, TraceError):
            yield order.number, error
        elif isinstance(error, MemoryError):
            yield order.number, too_large(order.known)
        elif self._crew.is_loss(error):
            yield from self._lose(order, error)
        elif isinstance(error, OSError):
            yield from self._fail(order, error)
        else:
            raise error

    def _lose(
        self, order: _Order[_Known], error: BaseException
    ) -> Iterator[tuple[int, TraceError]]:
        """Set a file aside whose worker died; give it up where it was alone often enough."""
        self._is_broken |= isinstance(error, BrokenExecutor)
        order.losses += 1
        if order.alone and order.losses >= self._crew.attempts:
            yield order.number, lost(order.known)
        else:
            self._suspects.append(order)

    def _fail(self, order: _Order[_Known], error: OSError) -> Iterator[tuple[int, TraceError]]:
        order.tries += 1
        if order.tries < _TRIES:
            self._waiting.append(order)
        else:
            yield order.number, failed(order.known, error)


def lost(known: Recognised) -> TraceError:
    """Say that whoever reads a file dies of it."""
    return TraceError(
        "was not read: a worker process died, perhaps for want of memory",
        hint="read fewer files at once, or on a larger machine",
        file=known.file,
        rank=known.rank,
    )


def failed(known: Recognised, error: OSError) -> TraceError:
    """Say that a file was tried often enough."""
    return TraceError(
        f"was not read: failed {_TRIES} times, the last time with: {error or type(error).__name__}",
        hint="check the disks and the network of the workers",
        file=known.file,
        rank=known.rank,
    )


def too_large(known: Recognised) -> TraceTooLarge:
    """Say that a file does not fit."""
    return TraceTooLarge(
        "does not fit into memory",
        hint="record fewer steps, or read it on a larger machine",
        file=known.file,
        rank=known.rank,
    )
