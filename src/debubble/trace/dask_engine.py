"""The address of a Dask scheduler in → its workers, lent while files are read.

The workers need debubble, of this version, and the files under the same path or URL. What an
engine and its crew must be able to do is said in `engine.py`, which alone knows that this one
exists.
"""

from __future__ import annotations

import logging
import os
import pydoc
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from debubble import __version__
from debubble.errors import EngineError, MissingExtra
from debubble.trace.format import TraceFile
from debubble.trace.source import Limits, is_url
from debubble.units import counted

if TYPE_CHECKING:
    from distributed import Client

# A scheduler answers in milliseconds; a wrong address should not cost a coffee.
_CONNECT_S = 5
# A worker that died is back in some seconds where its nanny starts it again.
_WITHOUT_WORKERS_S = 60.0
_TALKATIVE = ("distributed", "tornado")
# Names enough to know where to look.
_WORKERS_SHOWN = 3

_Known = TypeVar("_Known", bound=TraceFile)
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class DaskEngine:
    """A Dask cluster, by the address of its scheduler."""

    address: str
    without_workers_s: float = _WITHOUT_WORKERS_S

    @contextmanager
    def hire(self, files: Sequence[TraceFile]) -> Iterator[DaskCrew]:
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
                crew = DaskCrew(client, self)
                crew.check(files)
                yield crew
            finally:
                client.close(timeout=_CONNECT_S)


class DaskCrew:
    """Workers of a cluster. What a worker had when it died goes to another by itself; a task that
    several died of comes back as `KilledWorker`.
    """  # noqa: D205

    attempts = 1

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

    def check(self, files: Sequence[TraceFile]) -> None:
        """Refuse a cluster that cannot do the work, before any is sent."""
        if not self._threads:
            raise EngineError(
                f"{self._engine.address}: the scheduler has no workers",
                hint="start some: dask worker " + self._engine.address,
            )
        self._paths = [_absolute(known.file) for known in files if not is_url(known.file)][:1]
        self._check_new()

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

    def workers(self) -> int:
        """Return how many files can be in work at once."""
        return max(1, sum(self._threads.values()))

    def submit(
        self, task: Callable[[_Known, Limits], _Result], known: _Known, limits: Limits
    ) -> Future[_Result]:
        """Hand out one file, under the path that it has for the workers as well."""
        if not is_url(known.file):
            known = replace(known, file=_absolute(known.file))
        future: Future[_Result] = self._executor.submit(task, known, limits)
        return future

    def is_loss(self, error: BaseException) -> bool:
        """Tell the loss of workers from an error of the task, and from the loss of all."""
        if isinstance(error, CancelledError):
            raise _gone(self._engine.address) from error
        return isinstance(error, self._loss)

    def renew(self) -> bool:
        """Leave it to the cluster: nannies start workers again."""
        return True

    def look_around(self) -> None:
        """See who is there, and ask who is new; raise where nobody has been for long."""
        self._threads = self._count()
        self._check_new()
        now = time.monotonic()
        if self._threads:
            self._alive_s = now
        elif now - self._alive_s > self._engine.without_workers_s:
            raise EngineError(
                f"{self._engine.address}: no worker is left",
                hint="look into the workers' logs; a worker that runs out of memory is ended",
            )

    def _count(self) -> dict[str, int]:
        try:
            return dict(self._client.nthreads())
        except (OSError, CancelledError) as error:
            raise _gone(self._engine.address) from error


def _absolute(file: str) -> str:
    return os.path.abspath(file)  # noqa: PTH100 (plain strings serve paths and URLs alike)


def _name(workers: Sequence[str]) -> str:
    shown = ", ".join(workers[:_WORKERS_SHOWN])
    more = ", …" if len(workers) > _WORKERS_SHOWN else ""
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
