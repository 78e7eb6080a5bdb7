"""The front's side of the pipeline: starts the ranks, plans batches, takes sampled tokens.

As serving engines do it: so many batches are in flight at once, each with its own requests. A batch
that came back goes out again with a token of each of its answers, beside one chunk of one prompt.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import queue
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from metrics import Metrics
from orders import Batch, End, Layout, Order, Start, Stop

# One process imports torch, and all ranks come of it: that is quicker than each on its own.
_FORKED = multiprocessing.get_context("forkserver")
# Ranks that do not end when they are told to are ended.
_PATIENCE_S = 10.0


def _be_a_rank(layout: Layout, rank: int, front: Connection, lifeline: Connection) -> None:
    from stage import run_stage  # noqa: PLC0415 (imports torch, which the front does without)

    threading.Thread(target=_end_with, args=(lifeline,), daemon=True).start()
    run_stage(layout, rank, front)


def _end_with(lifeline: Connection) -> None:
    """End this process when the other end is gone: it may be waiting for ranks that never come."""
    with suppress(EOFError, OSError):
        lifeline.recv()
    os._exit(1)


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """A prompt, and the answer so far."""

    prompt: tuple[int, ...]
    wanted: int
    """Tokens of its answer."""
    came_s: float
    done: int = 0
    """Tokens of the prompt that were computed."""
    answer: list[int] = field(default_factory=list)
    last_s: float = 0.0
    tokens: queue.SimpleQueue[int | None] = field(default_factory=queue.SimpleQueue)

    def words(self) -> Iterator[int]:
        """Yield the answer's tokens as they come."""
        while (token := self.tokens.get()) is not None:
            yield token


@dataclass(frozen=True, slots=True, kw_only=True)
class Flight:
    """A batch on its way, and when it left."""

    batch: Batch
    left_s: float
    requests: tuple[Request, ...]
    """Whose tokens come back: the prompt's, then each answer's."""
    profiled: bool


class Engine:
    """A pipeline of processes that answers requests, many at a time.

    One thread plans; whoever wants something of it puts that into its inbox.
    """

    def __init__(self, layout: Layout, *, chunk: int, folder: Path, log: Path | None) -> None:
        self.layout, self.chunk, self.folder = layout, chunk, folder
        self.metrics = Metrics()
        self.log = None if log is None else log.open("w", encoding="utf-8")
        self.unix_s = time.time() - time.perf_counter()
        self.inbox: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self.waiting: deque[Request] = deque()
        self.slots: list[list[Request | None]] = [
            [None] * layout.seats for _ in range(layout.slots)
        ]
        self.flights: dict[int, Flight] = {}
        """By slot; in the order in which they left, which is the order in which they land."""
        self.number = 0
        self.profiles = False
        """Whether batches that leave now are profiled, as far as the front was told."""
        self.profiling = threading.Lock()
        self.done = threading.Semaphore(0)
        self.closing = False
        self.pipes: list[Connection] = []
        self.lifelines: list[Connection] = []
        self.processes: list[Any] = []
        self._start_ranks()
        self.planner = threading.Thread(target=self._plan, daemon=True)
        self.planner.start()

    def complete(self, prompt: tuple[int, ...], wanted: int) -> Request:
        """Take a request; its tokens come as they are sampled."""
        request = Request(prompt=prompt, wanted=wanted, came_s=time.perf_counter())
        self.inbox.put(("request", request))
        return request

    def start_profile(self, batches: int | None = None, folder: str | None = None) -> None:
        """Have all ranks profile, until told to stop or for so many batches."""
        self._order(Start(folder=folder or str(self.folder), batches=batches))

    def stop_profile(self) -> None:
        """Have all ranks write their traces; they are there when this returns."""
        self._order(Stop())

    def close(self) -> None:
        """End all ranks."""
        self.closing = True
        self.inbox.put(("end", None))
        self.planner.join(_PATIENCE_S)
        for process in self.processes:
            process.join(_PATIENCE_S)
            if process.is_alive():
                process.kill()
        self.place.cleanup()

    def _start_ranks(self) -> None:
        # Where it looks for modules is told by the environment alone, before Python 3.12.
        paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)
        _FORKED.set_forkserver_preload(["stage"])
        self.place = tempfile.TemporaryDirectory(prefix="serve-pipeline-")
        layout = replace(self.layout, store=f"{self.place.name}/store")
        for rank in range(layout.ranks):
            mine, theirs = _FORKED.Pipe()
            # Nothing is ever sent over it: it breaks when the front ends, however that comes.
            front, lifeline = _FORKED.Pipe()
            self.pipes += [mine]
            self.lifelines += [front]
            told = (layout, rank, theirs, lifeline)
            process = _FORKED.Process(target=_be_a_rank, args=told, daemon=True)
            process.start()
            theirs.close()
            lifeline.close()
            self.processes.append(process)
            threading.Thread(target=self._listen, args=(rank, mine), daemon=True).start()

    def _listen(self, rank: int, pipe: Connection) -> None:
        while True:
            try:
                self.inbox.put(pipe.recv())
            except (EOFError, OSError):
                break
        if not self.closing:
            sys.stderr.write(f"rank {rank} died\n")
            os._exit(1)

    def _order(self, order: Order) -> None:
        with self.profiling:
            self.inbox.put(("order", order))
            for _ in self.pipes:
                self.done.acquire()

    def _plan(self) -> None:
        """Do what the inbox says; then send out every batch that has something to do."""
        while True:
            what, value = self.inbox.get()
            if what == "request":
                self.waiting.append(value)
            elif what == "tokens":
                self._land(value)
            elif what == "order":
                self.profiles = isinstance(value, Start)
                self._tell(value)
            elif what == "done":
                self.done.release()
            else:
                self._tell(End())
                return
            self._seat()
            for slot in range(self.layout.slots):
                if slot not in self.flights:
                    self._launch(slot)

    def _seat(self) -> None:
        """Give those that wait a place, in the batch that has the fewest requests."""
        while self.waiting:
            counts = [sum(one is not None for one in seats) for seats in self.slots]
            slot = counts.index(min(counts))
            if counts[slot] == self.layout.seats:
                break
            self.slots[slot][self.slots[slot].index(None)] = self.waiting.popleft()
        running = sum(one is not None for seats in self.slots for one in seats)
        self.metrics.queues(running=running, waiting=len(self.waiting))

    def _launch(self, slot: int) -> None:
        """Send out a batch: its answers go on by a token, beside one chunk of one prompt."""
        seated = [(seat, one) for seat, one in enumerate(self.slots[slot]) if one is not None]
        answering = [(seat, one) for seat, one in seated if one.done == len(one.prompt)]
        reading = [(seat, one) for seat, one in seated if one.done < len(one.prompt)]
        if not seated:
            return
        self.number += 1
        seat, at = 0, 0
        words: tuple[int, ...] = ()
        owners: list[Request] = []
        if reading:
            seat, owner = min(reading, key=lambda pair: pair[1].came_s)
            at, words = owner.done, owner.prompt[owner.done : owner.done + self.chunk]
            owners.append(owner)
        batch = Batch(
            number=self.number,
            slot=slot,
            seat=seat,
            at=at,
            chunk=len(words),
            rows=tuple(seat for seat, _ in answering),
            lengths=tuple(len(one.prompt) + len(one.answer) - 1 for _, one in answering),
            words=(*words, *(one.answer[-1] for _, one in answering)),
        )
        owners += [one for _, one in answering]
        self.flights[slot] = Flight(
            batch=batch,
            left_s=time.perf_counter(),
            requests=tuple(owners),
            profiled=self.profiles,
        )
        self._tell(batch)

    def _land(self, tokens: list[int]) -> None:
        """Take what was sampled: requests move on, those that ended leave their seats."""
        slot = next(iter(self.flights))
        flight, now = self.flights.pop(slot), time.perf_counter()
        batch = flight.batch
        for place, (request, token) in enumerate(zip(flight.requests, tokens, strict=True)):
            if batch.chunk and place == 0:
                request.done += batch.chunk
                if request.done < len(request.prompt):
                    continue
                self.metrics.first_token(prompt=request.done, after_s=now - request.came_s)
            else:
                self.metrics.next_token(after_s=now - request.last_s)
            request.answer.append(token)
            request.last_s = now
            request.tokens.put(token)
            if len(request.answer) == request.wanted:
                self.slots[slot][self.slots[slot].index(request)] = None
                request.tokens.put(None)
                self.metrics.served(
                    prompt=request.done, answer=request.wanted, after_s=now - request.came_s
                )
        if self.log is not None:
            row: dict[str, float] = {
                "number": batch.number,
                "slot": slot,
                "chunk": batch.chunk,
                "at": batch.at,
                "answers": len(batch.rows),
                "left_unix_s": flight.left_s + self.unix_s,
                "landed_unix_s": now + self.unix_s,
                "profiled": flight.profiled,
            }
            self.log.write(json.dumps(row) + "\n")
            self.log.flush()

    def _tell(self, order: Order) -> None:
        """All ranks hear the same, in the same order; the tokens are for the first alone."""
        for rank, pipe in enumerate(self.pipes):
            bare = replace(order, words=()) if rank and isinstance(order, Batch) else order
            pipe.send(bare)
