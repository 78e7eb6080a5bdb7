"""The service: looks for captures, has them analysed, judges them, answers, alerts. One process.

The event loop only waits. Whatever takes time, reading folders and the store among it, runs in
threads; analysis runs in worker processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import multiprocessing
import os
import random
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from debubble.capture.server import ServerOrder, capture_server, end_profile
from debubble.errors import CaptureError, DebubbleError, StoreError, WatchError
from debubble.watch.analyse import Outcome, Task, analyse, prepare_worker
from debubble.watch.config import Config, Source, Trigger
from debubble.watch.http import Server
from debubble.watch.journal import Claim, Journal
from debubble.watch.judge import Judge
from debubble.watch.log import log
from debubble.watch.metrics import Counts
from debubble.watch.routes import Routes
from debubble.watch.sources import ReadyCapture, Scanner, digest_place, prune
from debubble.watch.traffic import (
    after_quiet_hours,
    ask_server,
    back_off,
    next_capture,
    requests_between,
)
from debubble.watch.webhooks import Webhooks

_T = TypeVar("_T")

# Whatever a worker's libraries leave behind goes with it after so many captures.
_CAPTURES_A_WORKER = 200
# Before a store that is away is asked again.
_STORE_PAUSE_S = 5.0
# However often a source is to be looked into: a scan reads the whole folder.
_SHORTEST_POLL_S = 0.05
# How old what is shown may be.
_REFRESH_S = 1.0
# The longest sleep between two looks at the clock: it may be set, and the machine may sleep.
_LONGEST_SLEEP_S = 30.0


class Service:
    """Everything that goes on between start and stop."""

    def __init__(self, config: Config, journal: Journal) -> None:
        self.config = config
        self.journal = journal
        self._targets = tuple(webhook.url for webhook in config.webhooks)
        self.judge = Judge(journal=journal, settings=config.drift, targets=self._targets)
        self.counts = Counts()
        self.routes = Routes(config, journal, self.judge, self.counts)
        self._stopping = asyncio.Event()
        self._stop_captures = threading.Event()
        self._slots = asyncio.Semaphore(config.analysis.workers)
        self._storing = asyncio.Lock()
        self._capturing = asyncio.Lock()
        self._under_capture = {source.name: asyncio.Lock() for source in config.sources}
        self._pool: Executor | None = None

    def stop(self) -> None:
        """Finish what is under way, and end."""
        self._stopping.set()
        self._stop_captures.set()

    async def run(self) -> None:
        """Serve until stopped."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        async with Server(self.routes.answer, self.config.listen).listening() as url:
            try:
                await self._in_thread(self.routes.refresh)
                log("started", url=url, sources=[source.name for source in self.config.sources])
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(self._take_up())
                    tasks.create_task(self._refresh())
                    for source in self.config.sources:
                        tasks.create_task(self._watch(source))
                        if source.trigger is not None:
                            tasks.create_task(self._trigger(source, source.trigger))
                    tasks.create_task(Webhooks(self.journal, self._targets).run(self._stopping))
            except ExceptionGroup as group:
                first: Exception = group  # what went wrong first, out of groups within groups
                while isinstance(first, ExceptionGroup):
                    first = first.exceptions[0]
                raise first from group
            finally:
                if self._pool is not None:
                    self._pool.shutdown(wait=True, cancel_futures=True)
        log("stopped")

    async def _in_thread(self, call: Callable[..., _T], *words: object) -> _T:
        """Call what takes time; a store that is away is waited for."""
        while True:
            try:
                return await asyncio.to_thread(call, *words)
            except StoreError as error:
                if self._stopping.is_set():
                    raise
                log("store_away", level="error", problem=str(error))
            await self._sleep(_STORE_PAUSE_S)

    async def _sleep(self, seconds: float) -> None:
        """Sleep, or less where the service stops."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, seconds)):
                await self._stopping.wait()

    async def _refresh(self) -> None:
        """Keep what is shown current, without a look into the store for every reader."""
        while not self._stopping.is_set():
            await self._sleep(_REFRESH_S)
            if self.routes.is_stale or self.counts.is_newer():
                await self._in_thread(self.routes.refresh)

    # Captures that are there.

    async def _take_up(self) -> None:
        """Go on with what a killed service had begun."""
        by_name = {source.name: source for source in self.config.sources}
        claims = await self._in_thread(
            lambda: self.journal.unfinished(list(by_name), now_s=time.time())
        )
        for claim in claims:
            if self._stopping.is_set():
                return
            log("taken_up", source=claim.source, capture=claim.key, attempt=claim.attempts)
            async with self._slots:
                await self._analyse(by_name[claim.source], claim, None)

    async def _watch(self, source: Source) -> None:
        """Look for captures until stopped; a folder that is away for a while is said once."""
        scanner = Scanner(source, self.config.analysis.limits, time.monotonic)
        troubled = ""
        while not self._stopping.is_set():
            try:
                async with self._under_capture[source.name]:
                    known = await self._in_thread(self.journal.known_keys, source.name)
                    found = await self._in_thread(scanner.scan, known)
                if troubled:
                    log("source_back", source=source.name)
                troubled = ""
                self.counts.scanned(source.name, time.time())
            except (DebubbleError, OSError) as error:
                found = ()
                if str(error) != troubled:
                    troubled = str(error)
                    log("source_away", level="error", source=source.name, problem=troubled)
            async with asyncio.TaskGroup() as tasks:
                for ready in found:
                    await self._slots.acquire()
                    if self._stopping.is_set():
                        self._slots.release()
                        break
                    tasks.create_task(self._take(source, ready))
            if found:
                limits = self.config.analysis.limits
                count = await self._in_thread(prune, source, self.journal, limits)
                if count:
                    log("pruned", source=source.name, captures=count)
            await self._sleep(max(_SHORTEST_POLL_S, source.poll_s))

    async def _take(self, source: Source, ready: ReadyCapture) -> None:
        """Claim a capture and see it through; the caller gave it a slot."""
        try:
            claim = await self._in_thread(
                lambda: self.journal.claim(source.name, ready.key, ready.files, now_s=time.time())
            )
            if claim is not None:
                await self._analyse(source, claim, ready.newest_s)
        finally:
            self._slots.release()

    async def _analyse(self, source: Source, claim: Claim, newest_s: float | None) -> None:
        traffic: dict[int, float] = {}
        if source.trigger is not None:
            at_s = claim.found_s if newest_s is None else newest_s
            traffic = await self._in_thread(self.journal.traffic_at, source.name, at_s)
        task = Task(
            files=claim.files,
            limits=self.config.analysis.limits,
            timeout_s=self.config.analysis.timeout_s,
            traffic=traffic,
            digests=await self._in_thread(digest_place, source),
        )
        analysis = await self._compute(task)
        if analysis is None:
            return  # stopping: the next service takes it up
        raised: list[tuple[str, str]] = []
        now_s = time.time()
        async with self._storing:
            stored = await self._in_thread(
                lambda: self.journal.finish(
                    claim,
                    analysis,
                    now_s=now_s,
                    follow=lambda connection, finding: raised.extend(
                        self.judge.follow(connection, claim, finding, now_s=now_s)
                    ),
                )
            )
        if not stored:
            return
        self.routes.is_stale = True
        self.counts.analysed(analysis.seconds)
        outcome, level = ("analysed", "info") if analysis.finding else ("unreadable", "warning")
        problem = {"problem": analysis.problem} if analysis.problem else {}
        log(outcome, level=level, source=source.name, capture=claim.key, **problem)
        for kind, message in raised:
            log("alert", level="warning", source=source.name, kind=kind, message=message)

    async def _compute(self, task: Task) -> Outcome | None:
        """Have a worker analyse; where one dies, once more alone: then it was the capture."""
        loop = asyncio.get_running_loop()
        pool = self._pool = self._pool or _new_pool(self.config.analysis.workers)
        try:
            return await loop.run_in_executor(pool, analyse, task)
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
        with _new_pool(1) as alone:
            try:
                return await loop.run_in_executor(alone, analyse, task)
            except BrokenProcessPool:
                return Outcome(problem="the analysis died twice, perhaps for want of memory")
            except Exception as error:  # noqa: BLE001 (the same)
                return _bug(error)

    # Servers that are captured on a schedule.

    async def _trigger(self, source: Source, trigger: Trigger) -> None:
        refusals = 0
        await self._end_left_on(source, trigger)
        last = await self._in_thread(self.journal.last_trigger, source.name)
        due = next_capture(trigger, last, time.time(), random.random())  # noqa: S311 (jitter)
        while not self._stopping.is_set():
            left = due - time.time()
            if left > 0:
                await self._sleep(min(left, _LONGEST_SLEEP_S))
                continue
            async with self._capturing:
                if self._stopping.is_set():
                    return
                problem = await self._capture(source, trigger)
            if problem:
                log("not_captured", level="warning", source=source.name, problem=problem)
                self.counts.refused(source.name)
                due = after_quiet_hours(trigger, time.time() + back_off(trigger, refusals))
                refusals += 1
            else:
                refusals = 0
                due = next_capture(trigger, time.time(), time.time(), random.random())  # noqa: S311

    async def _end_left_on(self, source: Source, trigger: Trigger) -> None:
        """End the profile that a killed service left on."""
        number = await self._in_thread(self.journal.unended_trigger, source.name)
        if number is None:
            return
        problem = "the service died meanwhile"
        try:
            await self._in_thread(end_profile, _order(source, trigger))
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
            before = await self._in_thread(ask_server, trigger.url)
        except DebubbleError as error:
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
                sleep = self._interruptible if order.steps is None else self._unless_stopped
                await self._in_thread(lambda: capture_server(order, sleep=sleep))
                after = await self._in_thread(ask_server, trigger.url)
                traffic = requests_between(before, after)
            except DebubbleError as error:
                problem = str(error)
            await self._in_thread(
                lambda: self.journal.end_trigger(
                    number, now_s=time.time(), traffic=traffic, problem=problem
                )
            )
        return problem

    def _interruptible(self, seconds: float) -> None:
        """Sleep in the capture's thread; a stop ends the profile early, never leaves it on."""
        self._stop_captures.wait(seconds)

    def _unless_stopped(self, seconds: float) -> None:
        """Sleep while a server counts its steps; a stop does not wait for their end."""
        if self._stop_captures.wait(seconds):
            raise CaptureError("the service stops")


def _order(source: Source, trigger: Trigger) -> ServerOrder:
    return ServerOrder(
        url=trigger.url,
        kind=trigger.kind,
        out=Path(source.folder),
        seconds=trigger.seconds,
        steps=trigger.steps,
    )


def _new_pool(workers: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(
        workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=prepare_worker,
        max_tasks_per_child=_CAPTURES_A_WORKER,
    )


def _bug(error: BaseException) -> Outcome:
    log("bug", level="error", problem="".join(traceback.format_exception(error)))
    return Outcome(problem=f"debubble failed on it: {type(error).__name__}: {error}")


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
