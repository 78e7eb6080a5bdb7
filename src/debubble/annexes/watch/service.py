"""The service: looks for captures, has them analysed, judges them, answers, alerts. One process.

The event loop only waits. Whatever takes time, reading folders and the store among it, runs in
threads; analysis runs in worker processes. Each source's folder and server is a part of its own
(supervise.py): one that fails is named, waits, and is tried again.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from debubble.annexes.watch.analyse import Outcome, Task, analyse, prepare_worker
from debubble.annexes.watch.config import Config, Source, Trigger
from debubble.annexes.watch.journal import Claim, Journal
from debubble.annexes.watch.judge import Judge
from debubble.annexes.watch.metrics import Counts
from debubble.annexes.watch.mix import ask_server, requests_between
from debubble.annexes.watch.routes import Routes, Server
from debubble.annexes.watch.sources import ReadyCapture, Scanner, digest_place, prune
from debubble.annexes.watch.supervise import PATIENCE, Patience, in_daemon, log, supervise
from debubble.annexes.watch.webhooks import MOST_ATTEMPTS, deliver
from debubble.capture.server import ServerOrder, capture_server, end_profile
from debubble.errors import DebubbleError, StoreAway, WatchError

_T = TypeVar("_T")

# Whatever a worker's libraries leave behind goes with it after so many captures.
_CAPTURES_A_WORKER = 200


class Service:
    """Everything that goes on between start and stop."""

    def __init__(self, config: Config, journal: Journal, patience: Patience = PATIENCE) -> None:
        self.config = config
        self.patience = patience
        self.journal = journal
        self._targets = tuple(webhook.url for webhook in config.webhooks)
        self.judge = Judge(journal=journal, settings=config.drift, targets=self._targets)
        self.counts = Counts()
        self.routes = Routes(config, journal, self.judge, self.counts, patience)
        self._stopping = asyncio.Event()
        self._too_late = asyncio.Event()
        self._stop_captures = threading.Event()
        self._workers = config.analysis.workers
        self._slots = asyncio.Semaphore(self._workers)
        self._storing = asyncio.Lock()
        self._capturing = asyncio.Lock()
        self._under_capture = {source.name: asyncio.Lock() for source in config.sources}
        self._pool: Executor | None = None
        self._parts: list[asyncio.Task[None]] = []

    def stop(self) -> None:
        """Finish what is under way, for a while, and end."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        self._stop_captures.set()
        loop = asyncio.get_running_loop()
        loop.call_later(self.patience.grace_s, self._too_late.set)
        loop.call_later(self.patience.last_s, lambda: [part.cancel() for part in self._parts])

    async def run(self) -> None:
        """Serve until stopped."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        server = Server(self.routes.answer, self.config.listen, self.patience)
        async with server.listening() as url:
            try:
                await self._first_look()
                log("started", url=url, sources=[source.name for source in self.config.sources])
                names = [source.name for source in self.config.sources]
                claims = await self._in_thread(
                    lambda: self.journal.unfinished(names, now_s=time.time())
                )
                self._begin("take_up", partial(self._take_up, claims))
                self._begin("page", self._refresh)
                for target in self._targets:
                    self._begin("webhook", partial(self._deliver, target))
                for source in self.config.sources:
                    scanner = Scanner(source, time.monotonic)
                    self._begin("folder", partial(self._watch, source, scanner), source)
                    if source.trigger is not None:
                        work = partial(self._trigger, source, source.trigger)
                        self._begin("server", work, source)
                await asyncio.gather(*self._parts, return_exceptions=True)
            finally:
                self._end_workers()
        log("stopped")

    def _begin(
        self, part: str, work: Callable[[], Awaitable[None]], source: Source | None = None
    ) -> None:
        """Begin a part of the service, of a source or of its own."""

        def note(problem: str) -> None:
            if source is not None:
                self.counts.trouble(source.name, part, problem)

        running = supervise(
            f"{source.name}/{part}" if source else part,
            work,
            sleep=self._sleep,
            stopping=self._stopping,
            on_failure=note,
        )
        self._parts.append(asyncio.get_running_loop().create_task(running))

    async def _first_look(self) -> None:
        """Have something to show from the start; where that fails, it is tried again later."""
        try:
            await self._in_thread(self.routes.refresh)
        except Exception as error:  # noqa: BLE001 (said, and tried again in its turn)
            self.counts.changed()
            log("failed", level="error", part="page", problem=f"{type(error).__name__}: {error}")

    def _end_workers(self) -> None:
        """End analyses that are not through: the next service begins them anew."""
        if self._too_late.is_set():
            for worker in multiprocessing.active_children():
                worker.kill()
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    async def _in_thread(self, call: Callable[..., _T], *words: object) -> _T:
        """Call what takes time; a store that is away is waited for."""
        while True:
            try:
                found = await in_daemon(call, *words)
            except StoreAway as error:
                self.routes.store_problem = str(error)
                if self._stopping.is_set():
                    raise
                log("store_away", level="error", problem=str(error))
            else:
                return found
            await self._sleep(self.patience.poll_s)

    async def _sleep(self, seconds: float) -> None:
        """Sleep, or less where the service stops."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, seconds)):
                await self._stopping.wait()

    async def _refresh(self) -> None:
        """Keep what is shown current, without a look into the store for every reader."""
        while not self._stopping.is_set():
            await self._sleep(self.patience.poll_s)
            if self.counts.is_newer():
                await self._in_thread(self.routes.refresh)
            await self._in_thread(self.routes.check_store)

    async def _deliver(self, target: str) -> None:
        """Send a webhook its alerts; one that hangs holds up itself alone."""
        while not self._stopping.is_set():
            due = await self._in_thread(
                lambda: self.journal.due(target, now_s=time.time(), most_attempts=MOST_ATTEMPTS)
            )
            for delivery in due:
                if not self._stopping.is_set():
                    await self._in_thread(deliver, self.journal, delivery)
            await self._sleep(self.patience.poll_s)

    # Captures that are there.

    async def _take_up(self, claims: Sequence[Claim]) -> None:
        """Go on with what a killed service had begun, then with what is asked for once more."""
        by_name = {source.name: source for source in self.config.sources}
        event, began = "taken_up", time.monotonic()
        while not self._stopping.is_set():
            for claim in claims:
                await self._sleep(began + self.patience.suspect_s * claim.deaths - time.monotonic())
                async with self._slots:
                    if self._stopping.is_set():
                        return
                    log(event, source=claim.source, capture=claim.key, deaths=claim.deaths)
                    await self._in_thread(self.journal.count_death, claim)
                    await self._see_through(by_name[claim.source], claim, None)
            await self._sleep(self.patience.poll_s)
            event, claims = "retried", await self._in_thread(self.journal.asked_again, [*by_name])

    async def _watch(self, source: Source, scanner: Scanner) -> None:
        """Look for captures until stopped; a folder that is away for a while is said once."""
        problem = ""
        while not self._stopping.is_set():
            previous, ready = problem, tuple[ReadyCapture, ...]()
            try:
                async with self._under_capture[source.name]:
                    known = await self._in_thread(self.journal.known_keys, source.name)
                    ready = await in_daemon(scanner.scan, known)
                problem = scanner.unreadable_names
                self.counts.scanned(source.name, time.time())
            except (DebubbleError, OSError) as error:
                problem = str(error)
            if problem and problem != previous:
                self.counts.trouble(source.name, "folder", problem)
                log("source_trouble", level="error", source=source.name, problem=problem)
            elif not problem:
                self.counts.well(source.name, "folder")
                if previous:
                    log("source_back", source=source.name)
            async with asyncio.TaskGroup() as tasks:
                for capture in ready:
                    await self._slots.acquire()
                    if self._stopping.is_set():
                        self._slots.release()
                        break
                    tasks.create_task(self._take(source, capture))
            if ready:
                count = await self._in_thread(prune, source, self.journal)
                if count:
                    log("pruned", source=source.name, captures=count)
            await self._sleep(source.poll_s)

    async def _take(self, source: Source, ready: ReadyCapture) -> None:
        """Claim a capture and see it through; the caller gave it a slot."""
        try:
            claim = await self._in_thread(
                lambda: self.journal.claim(source.name, ready.key, ready.files, now_s=time.time())
            )
            if claim is not None:
                await self._see_through(source, claim, ready.newest_s)
        except Exception as error:  # noqa: BLE001 (its neighbours must not go with it)
            self.counts.trouble(source.name, "folder", f"{type(error).__name__}: {error}")
            _say_bug(error)
        finally:
            self._slots.release()

    async def _see_through(self, source: Source, claim: Claim, newest_s: float | None) -> None:
        """Analyse a capture and store what came of it: at the worst, that nothing did."""
        try:
            await self._analyse(source, claim, newest_s)
        except Exception as error:  # noqa: BLE001 (it must not stay claimed for ever)
            if self._stopping.is_set():
                return
            outcome = _bug(error)
            await self._in_thread(
                lambda: self.journal.finish(
                    claim, outcome, now_s=time.time(), follow=lambda _connection, _finding: None
                )
            )

    async def _analyse(self, source: Source, claim: Claim, newest_s: float | None) -> None:
        traffic: dict[int, float] = {}
        if source.trigger is not None:
            at_s = claim.found_s if newest_s is None else newest_s
            traffic = await self._in_thread(self.journal.traffic_at, source.name, at_s)
        task = Task(
            files=claim.files,
            timeout_s=self.config.analysis.timeout_s,
            traffic=traffic,
            digests=await self._in_thread(digest_place, source),
            written_s=newest_s,
        )
        analysis = await self._compute(task)
        if analysis is None:  # stopping: the next service takes it up, and nothing died
            await self._in_thread(self.journal.put_back, claim)
            return
        raised: list[tuple[str, str]] = []
        async with self._storing:
            stored = await self._in_thread(
                lambda: self.journal.finish(
                    claim,
                    analysis,
                    now_s=time.time(),
                    follow=lambda connection, finding: raised.extend(
                        self.judge.follow(connection, claim, finding)
                    ),
                )
            )
        if not stored:
            return
        self.counts.analysed(analysis.seconds)
        outcome, level = ("analysed", "info") if analysis.finding else ("unreadable", "warning")
        outcome = "given_up" if analysis.given_up else outcome
        problem = {"problem": analysis.problem} if analysis.problem else {}
        log(outcome, level=level, source=source.name, capture=claim.key, **problem)
        for kind, message in raised:
            log("alert", level="warning", source=source.name, kind=kind, message=message)

    async def _compute(self, task: Task) -> Outcome | None:
        """Have a worker analyse; where one dies, once more alone: then it was the capture."""
        pool = self._pool = self._pool or _new_pool(self._workers)
        try:
            return await self._in_worker(pool, task)
        except BrokenProcessPool:
            if self._stopping.is_set():
                return None
            if self._pool is pool:
                self._pool = None
            log("worker_died", level="error", files=list(task.files))
        except asyncio.CancelledError:
            raise
        except Exception as error:  # noqa: BLE001 (a bug must not take the service down)
            return _bug(error)
        alone = _new_pool(1)
        try:
            return await self._in_worker(alone, task)
        except BrokenProcessPool:
            died = "the analysis died twice, perhaps for want of memory"
            return Outcome(problem=died, given_up=True)
        except Exception as error:  # noqa: BLE001 (the same)
            return _bug(error)
        finally:
            alone.shutdown(wait=False)

    async def _in_worker(self, pool: Executor, task: Task) -> Outcome | None:
        """Wait for a worker; None where the service stops and waited long enough."""
        future = asyncio.get_running_loop().run_in_executor(pool, analyse, task)
        future.add_done_callback(lambda done: done.cancelled() or done.exception())
        stop = asyncio.ensure_future(self._too_late.wait())
        both: set[asyncio.Future[Any]] = {future, stop}
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        return future.result() if future.done() else None

    # Servers that are captured on a schedule.

    async def _trigger(self, source: Source, trigger: Trigger) -> None:
        await self._end_left_on(source, trigger)
        last_s = await self._in_thread(self.journal.last_trigger, source.name)
        due = 0.0 if last_s is None else last_s + trigger.every_s
        # The clock may have been set back since then.
        due = min(due, time.time() + trigger.every_s)
        while not self._stopping.is_set():
            left = due - time.time()
            if left > 0:
                await self._sleep(min(left, self.patience.poll_s))
                continue
            async with self._capturing:
                if self._stopping.is_set():
                    return
                problem = await self._capture(source, trigger)
            if problem:
                log("not_captured", level="warning", source=source.name, problem=problem)
                self.counts.refused(source.name)
                due = time.time() + self.patience.retry_share * trigger.every_s
            else:
                due = time.time() + trigger.every_s

    async def _end_left_on(self, source: Source, trigger: Trigger) -> None:
        """End the profile that a killed service left on."""
        number = await self._in_thread(self.journal.unended_trigger, source.name)
        if number is None:
            return
        problem = "the service died meanwhile"
        try:
            await in_daemon(end_profile, _order(source, trigger))
            log("profile_ended", source=source.name)
        except DebubbleError as error:
            problem = str(error)
            log("not_ended", level="warning", source=source.name, problem=problem)
        await self._in_thread(
            lambda: self.journal.end_trigger(number, now_s=time.time(), traffic={}, problem=problem)
        )

    async def _capture(self, source: Source, trigger: Trigger) -> str:
        """Capture a server that is not pressed; return what was in the way."""
        try:
            before = await in_daemon(ask_server, trigger.url)
        except DebubbleError as error:
            self.counts.trouble(source.name, "server", str(error))
            return str(error)
        if before.waiting > trigger.most_waiting:
            return f"{before.waiting:g} requests wait at the server: it is under pressure"
        order = _order(source, trigger)
        async with self._under_capture[source.name]:
            number = await self._in_thread(
                lambda: self.journal.begin_trigger(source.name, now_s=time.time())
            )
            log("capturing", source=source.name, server=trigger.url)
            problem, traffic = "", dict[int, float]()
            try:
                # A stop ends the profile early, and never leaves it on.
                await in_daemon(lambda: capture_server(order, sleep=self._sleep_in_thread))
                after = await in_daemon(ask_server, trigger.url)
                traffic = requests_between(before, after)
            except (DebubbleError, OSError) as error:
                problem = str(error)
            await self._in_thread(
                lambda: self.journal.end_trigger(
                    number, now_s=time.time(), traffic=traffic, problem=problem
                )
            )
        if problem and not self._stopping.is_set():
            self.counts.trouble(source.name, "server", problem)
        else:
            self.counts.well(source.name, "server")
        return problem

    def _sleep_in_thread(self, seconds: float) -> None:
        self._stop_captures.wait(seconds)


def _order(source: Source, trigger: Trigger) -> ServerOrder:
    return ServerOrder(
        url=trigger.url,
        kind=trigger.kind,
        out=Path(source.folder),
        seconds=trigger.seconds,
        around_s=trigger.around_s,
    )


def _new_pool(workers: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(
        workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=prepare_worker,
        initargs=(os.getpid(),),
        max_tasks_per_child=_CAPTURES_A_WORKER,
    )


def _say_bug(error: BaseException) -> None:
    log("bug", level="error", problem="".join(traceback.format_exception(error)))


def _bug(error: BaseException) -> Outcome:
    _say_bug(error)
    said = f"debubble failed on it: {type(error).__name__}: {error}"
    return Outcome(problem=said, given_up=True)


@contextmanager
def only_service(lock: Path) -> Iterator[None]:
    """Hold the lock of a configuration: claims of a dead service are then nobody else's."""
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise WatchError(
            f"the lock cannot be made: {error.strerror}", file=str(lock), hint="set lock = …"
        ) from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise WatchError(
                "another service runs with this configuration",
                file=str(lock),
                hint="stop it first, or give this one a configuration of its own",
            ) from error
        yield
    finally:
        os.close(descriptor)
