"""One stage of the model, in a process of its own: receives a batch, computes it, passes it on.

Every rank hears of batches and of profiling from the front, over a pipe and in the same order, as
workers of serving engines do; activations go from rank to rank over gloo; sampled tokens go back to
the front over the last rank's pipe. So the way back is on the host, and no trace shows it.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from orders import Batch, End, Layout, Order, Start
from torch import Tensor, nn
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile, record_function

HEADS, WORDS = 4, 256
# Keys and values of answers are looked at in pieces of this length: shapes recur.
_ALIGNED = 128
# A sleep ends some 80 us late on an idle 2-core machine.
_SLEEP_LATENESS_NS = 80_000


def _wait_until(x: Tensor, until_ns: int) -> Tensor:
    """Let time pass, as if a slower device still worked."""
    left_ns = until_ns - time.perf_counter_ns() - _SLEEP_LATENESS_NS
    if left_ns > 0:
        time.sleep(left_ns / 1e9)
    while time.perf_counter_ns() < until_ns:
        pass
    return x.clone()


# An operator, so that the profiler sees it as compute. It lives as long as the library object does.
_REGISTRY: Any = torch.library  # which torch leaves untyped
_LIBRARY = _REGISTRY.Library("serve_pipeline", "DEF")
_LIBRARY.define("work_until(Tensor x, int until_ns) -> Tensor")
_LIBRARY.impl("work_until", _wait_until, "CPU")


class Block(nn.Module):
    """Attention over a slot's cache, then an MLP; prompts and answers side by side."""

    def __init__(self, layout: Layout) -> None:
        super().__init__()
        self.layout = layout
        width, self.head = layout.width, layout.width // HEADS
        self.norm_first, self.norm_second = nn.LayerNorm(width), nn.LayerNorm(width)
        # One head of keys and values serves all heads of queries.
        self.queries_keys_values = nn.Linear(width, width + 2 * self.head, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        room = (layout.slots, layout.seats, layout.longest, self.head)
        self.keys, self.values = torch.zeros(room), torch.zeros(room)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """Let tokens see what came before them, then each think for itself."""
        began = time.perf_counter_ns()
        sizes = (self.layout.width, self.head, self.head)
        queries, keys, values = self.queries_keys_values(self.norm_first(x)).split(sizes, -1)
        queries = queries.view(-1, HEADS, self.head)
        seen = []
        if batch.chunk:
            seen.append(self._look_at_prompt(batch, queries, keys, values))
        if batch.rows:
            seen.append(self._look_at_answers(batch, queries, keys, values))
        x = x + self.out(torch.cat(seen))
        x = x + self.narrow(functional.gelu(self.wide(self.norm_second(x))))
        least_us = self.layout.layer_us + batch.tokens * self.layout.token_us
        if least_us:
            x = torch.ops.serve_pipeline.work_until(x, began + 1000 * least_us)
        return x

    def _look_at_prompt(
        self, batch: Batch, queries: Tensor, keys: Tensor, values: Tensor
    ) -> Tensor:
        count, end = batch.chunk, batch.at + batch.chunk
        mine_keys = self.keys[batch.slot, batch.seat]
        mine_values = self.values[batch.slot, batch.seat]
        mine_keys[batch.at : end], mine_values[batch.at : end] = keys[:count], values[:count]
        earlier = torch.ones(count, end, dtype=torch.bool).tril(batch.at)
        looked = functional.scaled_dot_product_attention(
            queries[:count].transpose(0, 1),
            mine_keys[:end].expand(HEADS, -1, -1),
            mine_values[:end].expand(HEADS, -1, -1),
            attn_mask=earlier,
        )
        return looked.transpose(0, 1).reshape(count, -1)

    def _look_at_answers(
        self, batch: Batch, queries: Tensor, keys: Tensor, values: Tensor
    ) -> Tensor:
        rows, lengths = torch.tensor(batch.rows), torch.tensor(batch.lengths)
        self.keys[batch.slot, rows, lengths] = keys[batch.chunk :]
        self.values[batch.slot, rows, lengths] = values[batch.chunk :]
        top = min(-(-(max(batch.lengths) + 1) // _ALIGNED) * _ALIGNED, self.layout.longest)
        earlier = (torch.arange(top)[None] <= lengths[:, None])[:, None, None]
        looked = functional.scaled_dot_product_attention(
            queries[batch.chunk :, :, None],
            self.keys[batch.slot, rows, :top][:, None].expand(-1, HEADS, -1, -1),
            self.values[batch.slot, rows, :top][:, None].expand(-1, HEADS, -1, -1),
            attn_mask=earlier,
        )
        return looked.reshape(len(batch.rows), -1)


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
        self.layout, self.rank, self.front = layout, rank, front
        self.is_first, self.is_last = rank == 0, rank == layout.ranks - 1
        self.blocks = nn.ModuleList(Block(layout) for _ in range(layout.layers[rank])).eval()
        self.embedding = nn.Embedding(WORDS, layout.width) if self.is_first else None
        self.head = nn.Linear(layout.width, WORDS, bias=False) if self.is_last else None
        self.profiling = Profiling(rank)
        self.sent: deque[tuple[dist.Work | None, Tensor]] = deque()

    def run(self) -> None:
        """Do as the front says, until it says that it is over."""
        while True:
            order = self._hear()
            if isinstance(order, Batch):
                with self._named(order), torch.inference_mode():
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

    @contextlib.contextmanager
    def _named(self, batch: Batch) -> Iterator[None]:
        with record_function(batch.label) if self.layout.labels else contextlib.nullcontext():
            yield

    def _compute(self, batch: Batch) -> None:
        if self.embedding is not None:
            x = self.embedding(torch.tensor(batch.words))
        else:
            x = torch.empty(batch.tokens, self.layout.width)
            dist.recv(x, src=self.rank - 1)
        for block in self.blocks:
            x = block(x, batch)
        if self.head is None:
            self.sent.append((dist.isend(x, dst=self.rank + 1), x))
            while self.sent and (self.sent[0][0] is None or self.sent[0][0].is_completed()):
                self.sent.popleft()
            return
        # Of a prompt only its last token says what comes next.
        asked = [batch.chunk - 1] * (batch.chunk > 0) + list(range(batch.chunk, batch.tokens))
        self.front.send(("tokens", self.head(x[asked]).argmax(-1).tolist()))

    def _write_profile(self) -> None:
        self._settle()
        self.profiling.stop()

    def _settle(self) -> None:
        """Wait for all messages: none may outlive a profiler."""
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
