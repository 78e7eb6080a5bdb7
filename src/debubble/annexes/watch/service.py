"""The service: looks for captures, has them analysed, judges them, answers, alerts.

Each source is a thread: it captures its server when that is due, looks into its folder, and takes
the captures that it finds one after the other, in the order in which they were taken. Each analysis
runs in a process apart. Beside these there are a thread for each webhook, one that lays out what is
shown, and those that answer. What fails is named, waits, and is tried again, alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import queue
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from debubble.annexes.watch.analyse import Outcome, Task, Worker
from debubble.annexes.watch.board import SCHEMA, Health, read_board
from debubble.annexes.watch.config import Config, Server, Source
from debubble.annexes.watch.journal import Journal
from debubble.annexes.watch.judge import Alert, Capture, accept, judge
from debubble.annexes.watch.log import log
from debubble.annexes.watch.metrics import write_metrics
from debubble.annexes.watch.mix import ask_server, requests_between
from debubble.annexes.watch.page import capture_page, status_page
from debubble.annexes.watch.sources import ReadyCapture, Scanner, digest_place, remove_capture
from debubble.annexes.watch.web import listening
from debubble.capture.fetch import fetch
from debubble.capture.server import ServerOrder, capture_server, end_profile
from debubble.errors import CaptureError, DebubbleError, StoreAway, WatchError, mask_secrets

# Between two looks for alerts that are to be sent, and the age of what is shown.
_POLL_S = 1.0
# After a failure; then twice as long each time.
_RETRY_S, _LONGEST_RETRY_S = 1.0, 300.0
# Of the time between two captures, for a server that is pressed or away to be asked again.
_RETRY_SHARE = 0.1
# How long an engine's metrics are read before and after a capture, at most as long as it takes.
_AROUND_S = 2.0
# A webhook gets an alert within this time, or not at all.
_DELIVERY_S = 86_400.0
# A capture that was begun so often, and the service died each time, is given up.
_MOST_DEATHS = 5
_STOPPED_BY = {signal.SIGTERM, signal.SIGINT}


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long the service waits for what, in seconds."""

    analysis_s: float = 1800.0
    """For one analysis."""
    suspect_s: float = 10.0
    """Before a capture is begun again, for each further time that the service died of it: a service
    that dies of something else, again and again, has died by then."""
    grace_s: float = 10.0
    """After a stop, for analyses to end; then the next service begins them anew."""
    last_s: float = 60.0
    """And for servers to end their profiles: they may write for minutes, but were asked to."""


class ServerCaptures(msgspec.Struct, frozen=True, kw_only=True):
    """What is remembered of captures of a server."""

    began_s: float | None = None
    under_way: bool = False
    traffic: tuple[tuple[float, dict[int, float]], ...] = ()
    """When the last ones began, and the requests that the server counted meanwhile, by bucket."""

    def traffic_at(self, at_s: float) -> dict[int, float]:
        """Return what was counted around the capture whose files are of that time."""
        counts = [counted for began_s, counted in self.traffic if began_s <= at_s]
        return counts[-1] if counts else {}


_REMEMBERED_TRAFFIC = 20


class Service:
    """Everything that goes on between start and stop."""

    def __init__(self, config: Config, journal: Journal, patience: Patience) -> None:
        self.config = config
        self.journal = journal
        self.patience = patience
        self.store_problems: dict[str, str] = {}
        """Why the store cannot be used now, by the part that tried last."""
        self._health = {source.name: Health() for source in config.sources}
        self._news = threading.Event()
        self._stopping = threading.Event()
        self._too_late = threading.Event()
        self._capturing = threading.Lock()
        self._workers: queue.SimpleQueue[Worker] = queue.SimpleQueue()

    def run(self) -> None:
        """Serve until stopped."""
        # Blocked in all threads, so that they reach this one, which waits for them.
        signal.pthread_sigmask(signal.SIG_BLOCK, _STOPPED_BY)
        workers = [Worker() for _ in range(self.config.workers)]
        for worker in workers:
            self._workers.put(worker)
        self._refresh()
        with listening(self.config.listen.address, self) as url:
            log("started", url=url, sources=[source.name for source in self.config.sources])
            parts = [
                ("page", self._show, None),
                *(("webhook", partial(self._deliver, url), None) for url in self.config.webhooks),
                *((source.name, partial(self._watch, source), source.name)
                  for source in self.config.sources),
            ]  # fmt: skip
            # Threads that hang must not hold up the end.
            threads = [
                threading.Thread(target=self._supervise, args=part, daemon=True) for part in parts
            ]
            for thread in threads:
                thread.start()
            signal.sigwait(_STOPPED_BY)
            self._stopping.set()
            asked_s = time.monotonic()
            for patience_s, then in (
                (self.patience.grace_s, self._too_late.set),
                (self.patience.last_s, lambda: None),
            ):
                for thread in threads:
                    thread.join(max(0.0, asked_s + patience_s - time.monotonic()))
                then()
            for worker in workers:
                worker.end()
        log("stopped")

    def _sleep(self, seconds: float) -> None:
        """Sleep, or less where the service stops."""
        self._stopping.wait(max(0.0, seconds))

    def _supervise(self, part: str, work: Callable[[], None], pipeline: str | None) -> None:
        """Run a part until the service stops; after a failure again, later and later."""
        failures = 0
        while not self._stopping.is_set():
            began = time.monotonic()
            try:
                work()
            except StoreAway as error:
                self._away(part, error)
            except Exception as error:  # noqa: BLE001 (one part must not take the service down)
                if time.monotonic() - began > 2 * _LONGEST_RETRY_S:  # it was well
                    failures = 0
                wait_s = min(_RETRY_S * 2**failures, _LONGEST_RETRY_S)
                failures += 1
                if pipeline is not None:
                    self._trouble(pipeline, "service", f"{type(error).__name__}: {error}")
                problem = traceback.format_exc()
                log("failed", level="error", part=part, problem=problem, again_in_s=wait_s)
                self._sleep(wait_s)

    def _away(self, part: str, error: StoreAway) -> None:
        """Wait for the store."""
        self.store_problems[part] = str(error)
        log("store_away", level="error", part=part, problem=str(error))
        self._sleep(_POLL_S)

    def _trouble(self, pipeline: str, part: str, problem: str) -> None:
        """Note what is the matter with a part of a source, or that nothing is."""
        health = self._health[pipeline]
        if problem and problem != health.troubles.get(part):
            log("source_trouble", level="error", source=pipeline, part=part, problem=problem)
        health.trouble(part, problem)
        self._news.set()

    # What is shown, and what is asked for.

    def _refresh(self) -> None:
        """Lay out what is shown, so that no reader has the store looked into."""
        self.board = read_board(self.config, self.journal, self._health)
        self.page, self.metrics = status_page(self.board).encode(), write_metrics(self.board)

    def _show(self) -> None:
        while not self._stopping.is_set():
            self._sleep(_POLL_S)
            if self._news.is_set() or "page" in self.store_problems:
                self._news.clear()
                self._refresh()
                self.store_problems.pop("page", None)

    def capture_page(self, number: int) -> str | None:
        """Draw the report of a capture; None where there is none."""
        known = self.journal.capture(number)
        return None if known is None else capture_page(*known)

    def acknowledge(self, number: int) -> bool:
        """Close an alert: what it is about is the new normal."""
        done = self.journal.acknowledge(number, now_s=time.time(), accept=accept)
        self._refresh()
        return done

    def retry(self, number: int) -> bool:
        """Have a failed capture found and analysed again."""
        done = self.journal.retry([*self._health], number)
        self._refresh()
        return bool(done)

    def _deliver(self, target: str) -> None:
        """Send a webhook its alerts; one that refuses them is asked again later."""
        while not self._stopping.is_set():
            refusals = []
            since_s = time.time() - _DELIVERY_S
            for alert in self.journal.undelivered(target, since_s=since_s):
                try:
                    post(alert, target)
                except CaptureError as error:
                    refusals.append(error)
                else:
                    self.journal.delivered(alert, target, now_s=time.time())
                    log("webhook_sent", target=urlsplit(target).hostname, alert=alert.id)
            self.store_problems.pop("webhook", None)
            if refusals:
                raise refusals[0]
            self._sleep(_POLL_S)

    # Sources.

    def _watch(self, source: Source) -> None:
        """Capture a source's server when that is due, and take the captures in its folder."""
        scanner = Scanner(source, time.monotonic)
        due_s = 0.0 if source.server is None else self._first_due(source, source.server)
        while not self._stopping.is_set():
            if source.server is not None and time.time() >= due_s:
                due_s = time.time() + self._capture(source, source.server)
            for ready in self._scan(source, scanner):
                self._take(source, ready)
                if self._stopping.is_set() or (source.server and time.time() >= due_s):
                    break
            self._prune(source)
            self._trouble(source.name, "service", "")
            self.store_problems.pop(source.name, None)
            wait_s = source.poll_s
            self._sleep(min(wait_s, due_s - time.time()) if source.server else wait_s)

    def _scan(self, source: Source, scanner: Scanner) -> tuple[ReadyCapture, ...]:
        """Look for captures; a folder that is away for a while is said once."""
        ended = self.journal.ended_keys(source.name)
        try:
            ready = scanner.scan(ended)
        except (DebubbleError, OSError) as error:
            self._trouble(source.name, "folder", str(error))
            return ()
        self._trouble(source.name, "folder", "")
        self._health[source.name].scanned_s = time.time()
        return ready

    def _take(self, source: Source, ready: ReadyCapture) -> None:
        """See a capture through: claim it, have it analysed, store what came of it."""
        capture = self.journal.claim(source.name, ready.key, ready.files, now_s=time.time())
        deaths = capture.attempts
        outcome: Outcome | None
        if deaths >= _MOST_DEATHS:
            problem = f"the service died {deaths} times while it was analysed"
            outcome = Outcome(problem=problem)
        else:
            if deaths:
                log("taken_up", source=source.name, capture=capture.key, deaths=deaths)
                self._sleep(self.patience.suspect_s * (deaths - 1))
            if self._stopping.is_set():
                return
            self.journal.begin(capture)
            outcome = self._analyse(source, ready, capture.found_s)
        if outcome is None:  # stopping: the next service takes it up, and nothing died
            self.journal.put_back(capture)
            return
        raised = self._finish(capture, outcome)
        self._news.set()
        if raised is None:
            return
        event, level = ("analysed", "info") if outcome.finding else ("not_analysed", "warning")
        log(
            event,
            level=level,
            source=source.name,
            capture=capture.key,
            problem=outcome.problem or None,
        )
        for alert in raised:
            kind, message = alert.kind, alert.message
            log("alert", level="warning", source=source.name, kind=kind, message=message)

    def _analyse(self, source: Source, ready: ReadyCapture, found_s: float) -> Outcome | None:
        """Have a worker analyse a capture; None where the service stops meanwhile."""
        at_s = found_s if ready.newest_s is None else ready.newest_s
        taken = self.journal.state(source.name, ServerCaptures)
        task = Task(
            files=ready.files,
            traffic=taken.traffic_at(at_s),
            digests=digest_place(source),
            written_s=ready.newest_s,
        )
        worker = self._workers.get()
        try:
            if self._stopping.is_set():
                return None
            return worker.analyse(task, self.patience.analysis_s, self._too_late)
        finally:
            self._workers.put(worker)

    def _finish(self, capture: Capture, outcome: Outcome) -> list[Alert] | None:
        """Store what came of a capture, also where the store is away for a while."""
        while True:
            try:
                return self.journal.finish(
                    capture,
                    outcome,
                    now_s=time.time(),
                    judge=partial(judge, settings=self.config.drift),
                    targets=self.config.webhooks,
                )
            except StoreAway as error:
                if self._stopping.is_set():
                    raise
                self._away(capture.pipeline, error)

    def _prune(self, source: Source) -> None:
        """Remove raw traces that are not to be kept, and whose digests are."""
        if source.keep is None:
            return
        for capture in self.journal.prunable(source.name, keep=source.keep):
            has_digests = capture.finding is not None and capture.finding.has_digests
            if source.digests is None or has_digests:
                remove_capture(source, capture.files)
                self.journal.forget_files(capture)
                log("pruned", source=source.name, capture=capture.key)

    # Servers that are captured on a schedule.

    def _first_due(self, source: Source, server: Server) -> float:
        """Return when a server is due; end a profile that a killed service left on."""
        taken = self.journal.state(source.name, ServerCaptures)
        if taken.under_way:
            try:
                end_profile(_order(source, server))
                log("profile_ended", source=source.name)
            except DebubbleError as error:
                log("not_ended", level="warning", source=source.name, problem=str(error))
            self.journal.remember(source.name, msgspec.structs.replace(taken, under_way=False))
        # The clock may have been set back since then.
        return min(taken.began_s or 0.0, time.time()) + (server.every_s if taken.began_s else 0.0)

    def _capture(self, source: Source, server: Server) -> float:
        """Capture a server that is not pressed; return how long it is left alone then."""
        # Two at once would hold each other up where they share a machine.
        with self._capturing:
            if self._stopping.is_set():
                return 0.0
            try:
                before = ask_server(server.url)
                problem = ""
                if before.waiting > server.most_waiting:
                    problem = f"{before.waiting:g} requests wait: the server is under pressure"
                else:
                    taken = self.journal.state(source.name, ServerCaptures)
                    began_s = time.time()
                    taken = msgspec.structs.replace(taken, began_s=began_s, under_way=True)
                    self.journal.remember(source.name, taken)
                    log("capturing", source=source.name, server=server.url)
                    traffic: dict[int, float] = {}
                    try:
                        # A stop ends the profile early, and never leaves it on.
                        capture_server(_order(source, server), sleep=self._sleep)
                        traffic = requests_between(before, ask_server(server.url))
                    finally:
                        counted = (*taken.traffic, (began_s, traffic))[-_REMEMBERED_TRAFFIC:]
                        taken = ServerCaptures(began_s=began_s, traffic=counted)
                        self.journal.remember(source.name, taken)
                self._trouble(source.name, "server", "")
            except (CaptureError, OSError) as error:
                problem = str(error)
                self._trouble(source.name, "server", problem)
        if not problem:
            return float(server.every_s)
        self._health[source.name].refused += 1
        log("not_captured", level="warning", source=source.name, problem=problem)
        return _RETRY_SHARE * server.every_s


def _order(source: Source, server: Server) -> ServerOrder:
    return ServerOrder(
        url=str(server.url),
        kind=server.kind,
        out=Path(source.folder),
        seconds=float(server.seconds),
        around_s=float(min(_AROUND_S, server.seconds)),
    )


def post(alert: Alert, target: str) -> None:
    """Send an alert as JSON; its key stays the same, for targets that tell doubles."""
    body = mask_secrets(msgspec.json.encode({"schema": SCHEMA, "alert": alert}).decode())
    headers = {
        "Content-Type": "application/json",
        "User-Agent": "debubble",
        "Idempotency-Key": f"debubble-alert-{alert.id}",
    }
    # An address may hold a secret: only its host is told.
    host = urlsplit(target).hostname
    try:
        reply = fetch(target, body=body.encode(), headers=headers)
    except CaptureError as error:
        raise CaptureError(error.message.replace(target, str(host))) from error
    if not reply.ok:
        raise CaptureError(f"{host} answered {reply.status}")


@contextmanager
def only_service(config: Path) -> Iterator[None]:
    """Hold a lock on a configuration: claims of a dead service are then nobody else's."""
    try:  # some network file systems lock only what can be written
        descriptor = os.open(config, os.O_RDWR)
    except OSError:
        descriptor = os.open(config, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise WatchError(
                "another service runs with this configuration",
                file=str(config),
                hint="stop it first, or give this one a configuration of its own",
            ) from error
        yield
    finally:
        with contextlib.suppress(OSError):
            os.close(descriptor)
