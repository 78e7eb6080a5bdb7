"""The address of a Dask scheduler in → its workers as an executor, lent while files are read.

The workers need debubble, of this version, and the files under the same path or URL. Nothing but
`engine_at` knows that there are clusters.
"""

from __future__ import annotations

import logging
import os
import pydoc
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Executor, Future, InvalidStateError
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from debubble import __version__
from debubble.errors import EngineError, MissingExtra, UsageError
from debubble.trace.engine import LOCAL, Engine
from debubble.trace.format import TraceFile
from debubble.trace.source import is_url
from debubble.trace.workers import WorkerLost
from debubble.units import counted

if TYPE_CHECKING:
    from distributed import Client

# A scheduler answers in milliseconds; a wrong address should not cost a coffee.
_CONNECT_S = 5
# A worker that died is back in some seconds where its nanny starts it again.
_WITHOUT_WORKERS_S = 60.0
_TALKATIVE = ("distributed", "tornado")

# How often somebody looks whether the workers are still there.
_LOOK_S = 1.0
_CLUSTER_SCHEMES = ("tcp", "tls", "ws", "wss")

_Result = TypeVar("_Result")
_Words = ParamSpec("_Words")


def engine_at(address: str) -> Engine:
    """Return the engine of that name or address."""
    if address == "local":
        return LOCAL
    scheme, separator, rest = address.partition("://")
    if separator and rest.rpartition(":")[2].isdigit() and scheme in _CLUSTER_SCHEMES:
        return DaskEngine(address=address)
    raise UsageError(
        f"there is no engine {address!r}",
        hint="give local, or the address of a Dask scheduler such as tcp://scheduler:8786",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DaskEngine:
    """A Dask cluster, by the address of its scheduler."""

    address: str
    without_workers_s: float = _WITHOUT_WORKERS_S

    @contextmanager
    def lend(self, files: Sequence[TraceFile]) -> Iterator[DaskExecutor]:
        """Lend the cluster's workers once each is known to be able to do the work."""
        try:
            from distributed import Client  # noqa: PLC0415 (an extra)
        except ImportError as error:
            raise MissingExtra(
                "a cluster needs Dask", hint="pip install 'debubble[cluster]'"
            ) from error
        with _quiet_dask():
            try:
                client = Client(self.address, timeout=_CONNECT_S, set_as_default=False)
            except (OSError, ValueError, RuntimeError, TypeError) as error:
                why = " ".join(str(error).split()) or type(error).__name__
                raise EngineError(
                    f"{self.address}: no scheduler answers there ({why})",
                    hint="is it running, is the address right, and can this machine reach it?",
                ) from error
            try:
                with DaskExecutor(client, self) as executor:
                    executor.check(files)
                    yield executor
            finally:
                client.close(timeout=_CONNECT_S)


class DaskExecutor(Executor):
    """Workers of a cluster. What a worker had when it died goes to another by itself; a task that
    several died of comes back as `WorkerLost`; where nobody is left, all work ends in an error.
    """  # noqa: D205

    def __init__(self, client: Client, engine: DaskEngine) -> None:
        from distributed import KilledWorker  # noqa: PLC0415 (an extra)

        self._loss = KilledWorker
        self._client = client
        self._engine = engine
        self._executor = client.get_executor(pure=False)
        self._threads = self._count()
        self._alive_s = time.monotonic()
        self._checked: set[str] = set()
        self._paths: list[str] = []
        self._open: dict[Future[Any], Future[Any]] = {}
        self._lock = threading.Lock()
        self._is_over = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)

    def check(self, files: Sequence[TraceFile]) -> None:
        """Refuse a cluster that cannot do the work, before any is sent."""
        if not self._threads:
            raise EngineError(
                f"{self._engine.address}: the scheduler has no workers",
                hint="start some: dask worker " + self._engine.address,
            )
        self._paths = [_absolute(known.file) for known in files if not is_url(known.file)][:1]
        self._check_new()
        self._watcher.start()

    def _check_new(self) -> None:
        """Ask those who were not asked yet; who dies of it is asked again when back.

        Refused are workers that would read with another debubble, or none, and those that do not
        see this machine's files.
        """
        new = [worker for worker in self._threads if worker not in self._checked]
        if not new:
            return
        versions = self._ask(new, pydoc.locate, "debubble.__version__")
        install = f"pip install debubble=={__version__} where the workers run"
        without = [worker for worker, version in versions.items() if not isinstance(version, str)]
        if without:
            raise EngineError(f"debubble is not installed on {_name(without)}", hint=install)
        others = [worker for worker, version in versions.items() if version != __version__]
        if others:
            raise EngineError(
                f"debubble is {versions[others[0]]} on {_name(others)}, and {__version__} here",
                hint=install,
            )
        for path in self._paths:
            answers = self._ask(new, os.path.exists, path)
            blind = [worker for worker, seen in answers.items() if seen is not True]
            if blind:
                raise EngineError(
                    f"{path} is not there for {_name(blind)}",
                    hint="put traces on a file system that all machines share, "
                    "or into object storage",
                )
        self._checked.update(versions)

    def _ask(
        self, workers: Sequence[str], function: Callable[[str], object], word: str
    ) -> dict[str, object]:
        try:
            found = self._client.run(function, word, workers=workers, on_error="return")
        except (OSError, CancelledError) as error:
            raise _gone(self._engine.address) from error
        answers = found.items()
        return {worker: said for worker, said in answers if not isinstance(said, OSError)}

    @property
    def _max_workers(self) -> int:
        return max(1, sum(self._threads.values()))

    def submit(
        self, task: Callable[_Words, _Result], /, *words: _Words.args, **more: _Words.kwargs
    ) -> Future[_Result]:
        """Hand out work; a file under the path that it has for the workers as well."""
        sent = [
            replace(word, file=_absolute(word.file))
            if isinstance(word, TraceFile) and not is_url(word.file)
            else word
            for word in words
        ]
        outer: Future[_Result] = Future()
        inner = self._executor.submit(task, *sent, **more)
        with self._lock:
            self._open[outer] = inner
        outer.add_done_callback(self._drop)
        inner.add_done_callback(partial(self._hand_back, outer))
        return outer

    def _drop(self, outer: Future[Any]) -> None:
        """Take back from the cluster what is no longer wanted."""
        with self._lock:
            inner = self._open.pop(outer, None)
        if inner is not None and outer.cancelled():
            inner.cancel()

    def _hand_back(self, outer: Future[Any], inner: Future[Any]) -> None:
        """Give back what came of a task."""
        error: BaseException | None = _gone(self._engine.address)
        if not inner.cancelled():
            error = inner.exception()
        if isinstance(error, CancelledError):
            error = _gone(self._engine.address)
        elif isinstance(error, self._loss):
            error = WorkerLost(str(error))
        with suppress(InvalidStateError):  # it was taken back, or ended with all others
            if error is None:
                outer.set_result(inner.result())
            else:
                outer.set_exception(error)

    def _watch(self) -> None:
        """See who is there, and ask who is new; where nobody has been for long, all work ends."""
        while not self._is_over.wait(_LOOK_S):
            try:
                self._threads = self._count()
                self._check_new()
                self._look_for_anybody()
            except EngineError as error:
                with self._lock:
                    waiting = [outer for outer in self._open if not outer.done()]
                for outer in waiting:
                    with suppress(InvalidStateError):
                        outer.set_exception(error)
                return

    def _look_for_anybody(self) -> None:
        now = time.monotonic()
        if self._threads:
            self._alive_s = now
        elif now - self._alive_s > self._engine.without_workers_s:
            raise EngineError(
                f"{self._engine.address}: no worker is left",
                hint="look into the workers' logs; a worker that runs out of memory is ended",
            )

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: ARG002
        """Stop watching; the cluster goes on."""
        self._is_over.set()
        if self._watcher.ident is not None:
            self._watcher.join(timeout=_CONNECT_S)

    def _count(self) -> dict[str, int]:
        try:
            return dict(self._client.nthreads())
        except (OSError, CancelledError) as error:
            raise _gone(self._engine.address) from error


def _absolute(file: str) -> str:
    return os.path.abspath(file)  # noqa: PTH100 (plain strings serve paths and URLs alike)


def _name(workers: Sequence[str]) -> str:
    shown = ", ".join(workers[:3])
    more = ", …" if len(workers) > 3 else ""
    return f"{counted(len(workers), 'worker')} ({shown}{more})"


def _gone(address: str) -> EngineError:
    return EngineError(
        f"{address}: the scheduler was lost", hint="is it still running? then run this again"
    )


@contextmanager
def _quiet_dask() -> Iterator[None]:
    """Keep what Dask logs and warns of from the user's terminal: we say what matters."""
    loggers = [name for name in logging.root.manager.loggerDict if name.startswith(_TALKATIVE)]
    handlers = [handler for name in loggers for handler in logging.getLogger(name).handlers]
    talkers = [*handlers, logging.getLogger("asyncio")]
    for talker in talkers:
        talker.addFilter(_drop)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for talker in talkers:
            talker.removeFilter(_drop)


def _drop(_record: logging.LogRecord) -> bool:
    return False
