"""The address of a Dask scheduler in → its workers as an executor, lent while files are read.

The workers need debubble, of this version, and the files under the same path or URL. Nothing but
`engine_at` knows that there are clusters.
"""

from __future__ import annotations

import logging
import os
import pydoc
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
_TALKATIVE = ("distributed", "tornado")

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
                threads = self._check_workers(client, files)
                yield DaskExecutor(client, self.address, threads)
            finally:
                client.close(timeout=_CONNECT_S)

    def _check_workers(self, client: Client, files: Sequence[TraceFile]) -> int:
        """Refuse a cluster that cannot do the work, before any is sent; return its threads.

        Refused are workers that would read with another debubble, or none, and those that do not
        see this machine's files.
        """
        threads = client.nthreads()
        if not threads:
            raise EngineError(
                f"{self.address}: the scheduler has no workers",
                hint="start some: dask worker " + self.address,
            )
        versions = client.run(pydoc.locate, "debubble.__version__", on_error="return")
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
        for path in [_absolute(known.file) for known in files if not is_url(known.file)][:1]:
            seen = client.run(os.path.exists, path)
            blind = [worker for worker, is_there in seen.items() if not is_there]
            if blind:
                raise EngineError(
                    f"{path} is not there for {_name(blind)}",
                    hint="put traces on a file system that all machines share, "
                    "or into object storage",
                )
        return sum(threads.values())


class DaskExecutor(Executor):
    """Workers of a cluster. What a worker had when it died goes to another by itself; a task that
    several died of comes back as `WorkerLost`.
    """  # noqa: D205

    def __init__(self, client: Client, address: str, threads: int) -> None:
        from distributed import KilledWorker  # noqa: PLC0415 (an extra)

        self._max_workers = threads
        self._address = address
        self._loss = KilledWorker
        self._executor = client.get_executor(pure=False)

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
        inner.add_done_callback(partial(self._hand_back, outer))
        # What is no longer wanted is taken back from the cluster.
        outer.add_done_callback(lambda done: inner.cancel() if done.cancelled() else None)
        return outer

    def _hand_back(self, outer: Future[Any], inner: Future[Any]) -> None:
        """Give back what came of a task."""
        error = None if inner.cancelled() else inner.exception()
        if inner.cancelled() or isinstance(error, CancelledError):
            error = EngineError(
                f"{self._address}: the scheduler was lost",
                hint="is it still running? then run this again",
            )
        elif isinstance(error, self._loss):
            error = WorkerLost(str(error))
        with suppress(InvalidStateError):  # it was taken back
            if error is None:
                outer.set_result(inner.result())
            else:
                outer.set_exception(error)


def _absolute(file: str) -> str:
    return os.path.abspath(file)  # noqa: PTH100 (plain strings serve paths and URLs alike)


def _name(workers: Sequence[str]) -> str:
    shown = ", ".join(workers[:3])
    more = ", …" if len(workers) > 3 else ""
    return f"{counted(len(workers), 'worker')} ({shown}{more})"


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
