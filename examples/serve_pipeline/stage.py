"""One stage of the model, in a process of its own: receives a batch, computes it, passes it on.

Every rank hears of batches and of profiling from the front, over a pipe and in the same order;
tensors go from rank to rank.
"""

from __future__ import annotations

import os
from collections import deque
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

WIDTH = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How the model is cut, and where the ranks meet."""

    ranks: int
    layers: int
    """Of each stage."""
    store: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A request to be computed."""

    number: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Profile from the next batch on, so many of them or until told to stop."""

    folder: str
    batches: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """Write what was profiled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """No more will come."""


Order = Batch | Start | Stop | End


class Attention(torch.nn.Module):
    """One block: its cost grows with the tokens, and their square."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = torch.nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.wide = torch.nn.Linear(WIDTH, 4 * WIDTH)
        self.narrow = torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Let tokens see each other, then each think for itself."""
        x = x + self.mix(x, x, x, need_weights=False)[0]
        return x + self.narrow(torch.relu(self.wide(x)))


class Profiling:
    """This rank's profiler; it writes its trace whole or not at all."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.profiler: profile | None = None
        self.folder = Path()
        self.left: int | None = None
        self.number = 0

    def start(self, order: Start) -> None:
        """Begin; where one is under way, it goes on."""
        if self.profiler is None:
            self.folder, self.left = Path(order.folder), order.batches
            self.profiler = profile(activities=[ProfilerActivity.CPU], record_shapes=True)
            self.profiler.start()

    def count(self) -> bool:
        """Say that a batch went through; True where it was the last to be profiled."""
        if self.profiler is None or self.left is None:
            return False
        self.left -= 1
        return self.left == 0

    def stop(self) -> None:
        """End, and write."""
        if self.profiler is None:
            return
        self.profiler.stop()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.number += 1
        name = f"profile{self.number}-rank{self.rank}.json.gz"
        partial = self.folder / f".partial-{name}"
        self.profiler.export_chrome_trace(str(partial))
        partial.replace(self.folder / name)
        self.profiler = None


class Stage:
    """One rank and its part of the model."""

    def __init__(self, layout: Layout, rank: int, front: Connection) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(rank)
        self.rank = rank
        self.last = layout.ranks - 1
        self.most_in_flight = layout.ranks
        self.front = front
        self.model = torch.nn.Sequential(*(Attention() for _ in range(layout.layers))).eval()
        self.profiling = Profiling(rank)
        self.sent: deque[tuple[dist.Work | None, torch.Tensor]] = deque()
        self.waiting: deque[int] = deque()
        """On rank 0: batches without an answer yet."""

    def run(self) -> None:
        """Do as the front says, until it says that it is over."""
        while True:
            if self.waiting and not self.front.poll():
                self._take_answer()
                continue
            order = self._hear()
            if isinstance(order, Batch):
                self._compute(order)
                if self.profiling.count():
                    self._write_profile()
                continue
            self._settle()
            if isinstance(order, End):
                return
            if isinstance(order, Start):
                self.profiling.start(order)
            else:
                self._write_profile()
            self.front.send(("done", self.rank))

    def _hear(self) -> Order:
        try:
            order: Order = self.front.recv()
        except EOFError:  # the front was killed
            os._exit(1)
        return order

    def _compute(self, batch: Batch) -> None:
        if self.rank == 0:
            while len(self.waiting) >= self.most_in_flight:
                self._take_answer()
            self.waiting.append(batch.number)
        with torch.inference_mode():
            y = self.model(self._take(batch))
        answers = self.rank == self.last
        message = y[:, -1, 0].clone() if answers else y.clone()
        work = dist.isend(message, dst=0 if answers else self.rank + 1, tag=batch.number)
        self.sent.append((work, message))
        while self.sent and (self.sent[0][0] is None or self.sent[0][0].is_completed()):
            self.sent.popleft()

    def _take(self, batch: Batch) -> torch.Tensor:
        x = torch.zeros(1, batch.tokens, WIDTH)
        if self.rank:
            dist.recv(x, src=self.rank - 1, tag=batch.number)
        return x

    def _take_answer(self) -> None:
        number = self.waiting.popleft()
        dist.recv(torch.empty(1), src=self.last, tag=number)
        self.front.send(("answer", number))

    def _write_profile(self) -> None:
        self._settle()
        self.profiling.stop()

    def _settle(self) -> None:
        """Wait for all messages: none may outlive a profiler."""
        while self.waiting:
            self._take_answer()
        while self.sent:
            work, _ = self.sent.popleft()
            if work is not None:
                work.wait()


def run_stage(layout: Layout, rank: int, front: Connection) -> None:
    """Be one rank."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.FileStore(layout.store, layout.ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=layout.ranks)
    Stage(layout, rank, front).run()
    dist.destroy_process_group()
