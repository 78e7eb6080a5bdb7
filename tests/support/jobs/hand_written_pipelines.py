"""Pipelines as somebody might write them by hand over gloo: all receives posted ahead, no labels.

`python hand_written_pipelines.py RANK FOLDER` runs a forward pass, a training step, and a ring of
context parallelism with no pipeline; a trace of each goes into FOLDER.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, schedule

RANKS, MICROBATCHES, STEPS, WIDTH = 3, 4, 2, 64
FORWARD_S, BACKWARD_S = 0.02, 0.04
KINDS = ("forward", "training", "ring")


class Timed(torch.autograd.Function):
    """A layer whose passes last as long as they are told."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        spin(FORWARD_S)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        spin(BACKWARD_S)
        return gradients[0] @ weight.T, x.T @ gradients[0]


def spin(seconds: float) -> None:
    """Compute for as long, in operators that show."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        torch.mm(SQUARE, SQUARE)


SQUARE = torch.ones(256, 256)


def run_step(rank: int, weight: torch.Tensor, *, trains: bool) -> None:
    last = RANKS - 1
    inputs = [torch.zeros(WIDTH, WIDTH, requires_grad=trains) for _ in range(MICROBATCHES)]
    gradients = [torch.zeros(WIDTH, WIDTH) for _ in range(MICROBATCHES)]
    arriving = [dist.irecv(x.detach(), rank - 1) for x in inputs] if rank else []
    returning = [dist.irecv(g, rank + 1) for g in gradients] if trains and rank < last else []
    outputs, sent = [], []
    for number, x in enumerate(inputs):
        if arriving:
            arriving[number].wait()
        with torch.set_grad_enabled(trains):
            outputs.append(Timed.apply(x, weight))
        if rank < last:
            sent.append(dist.isend(outputs[-1].detach(), rank + 1))
    for number in range(MICROBATCHES if trains else 0):
        if returning:
            returning[number].wait()
        outputs[number].backward(gradients[number])
        if rank:
            sent.append(dist.isend(inputs[number].grad, rank - 1))
    for work in sent:
        work.wait()
    dist.barrier()


def run_ring(rank: int) -> None:
    block = torch.ones(WIDTH, WIDTH)
    for _ in range(MICROBATCHES):
        sent = dist.isend(block, (rank + 1) % RANKS)
        following = torch.empty_like(block)
        arriving = dist.irecv(following, (rank - 1) % RANKS)
        spin(FORWARD_S)
        arriving.wait()
        sent.wait()
        block = following
    dist.barrier()


def main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'meeting'}",
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=60),
    )
    weight = torch.ones(WIDTH, WIDTH, requires_grad=True)
    for kind in KINDS:
        with profile(
            activities=[ProfilerActivity.CPU],
            schedule=schedule(wait=0, warmup=1, active=STEPS, repeat=1),
            record_shapes=True,
        ) as profiler:
            for _ in range(1 + STEPS):
                if kind == "ring":
                    run_ring(rank)
                else:
                    run_step(rank, weight, trains=kind == "training")
                profiler.step()
        (folder / kind).mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(folder / kind / f"rank{rank}.json"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
