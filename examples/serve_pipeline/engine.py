"""The front's side of the pipeline: starts the ranks, tells them of requests, takes answers."""

from __future__ import annotations

import multiprocessing
import tempfile
import threading
from multiprocessing.connection import Connection
from pathlib import Path

from stage import Batch, End, Layout, Order, Start, Stop, run_stage

_SPAWN = multiprocessing.get_context("spawn")


class Engine:
    """A pipeline of processes that answers requests in the order they came."""

    def __init__(self, *, ranks: int, layers: int, folder: Path) -> None:
        self.folder = folder
        self.place = tempfile.TemporaryDirectory(prefix="serve-pipeline-")
        layout = Layout(ranks=ranks, layers=layers, store=f"{self.place.name}/store")
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(ranks):
            mine, theirs = _SPAWN.Pipe()
            process = _SPAWN.Process(target=run_stage, args=(layout, rank, theirs), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(mine)
            self.processes.append(process)
        self.telling = threading.Lock()
        """All ranks hear the same, in the same order."""
        self.profiling = threading.Lock()
        self.answers: dict[int, threading.Event] = {}
        self.done = threading.Semaphore(0)
        self.number = 0
        for pipe in self.pipes:
            threading.Thread(target=self._listen, args=(pipe,), daemon=True).start()

    def complete(self, tokens: int) -> None:
        """Run one request of so many tokens through the pipeline, and wait for its answer."""
        with self.telling:
            self.number += 1
            answer = self.answers[self.number] = threading.Event()
            self._tell(Batch(number=self.number, tokens=tokens))
        answer.wait()

    def start_profile(self, batches: int | None = None, folder: str | None = None) -> None:
        """Have all ranks profile, until told to stop or for so many requests."""
        self._order(Start(folder=folder or str(self.folder), batches=batches))

    def stop_profile(self) -> None:
        """Have all ranks write their traces; they are there when this returns."""
        self._order(Stop())

    def close(self) -> None:
        """End all ranks."""
        with self.telling:
            self._tell(End())
        for process in self.processes:
            process.join()
        self.place.cleanup()

    def _order(self, order: Order) -> None:
        with self.profiling:
            with self.telling:
                self._tell(order)
            for _ in self.pipes:
                self.done.acquire()

    def _tell(self, order: Order) -> None:
        for pipe in self.pipes:
            pipe.send(order)

    def _listen(self, pipe: Connection) -> None:
        while True:
            try:
                what, number = pipe.recv()
            except (EOFError, OSError):
                return
            if what == "answer":
                self.answers.pop(number).set()
            else:
                self.done.release()
