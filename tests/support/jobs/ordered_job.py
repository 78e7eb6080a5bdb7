"""A real gloo pipeline of three ranks that trains by 1F1B, then by orders in files.

usage: ordered_job.py OUT [FILE FORMAT]...; OUT gets losses and gradients of each, a list a rank.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch.distributed.pipelining import PipelineStage, schedules

RANKS, MICROBATCHES, WIDTH, STEPS = 3, 6, 16, 2


def train(rank, order, form):
    torch.manual_seed(rank)
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(2 + rank)]
    model = torch.nn.Sequential(*layers, torch.nn.Tanh())
    stage = PipelineStage(model, rank, RANKS, torch.device("cpu"))
    loss_fn = torch.nn.functional.mse_loss
    if order:
        schedule = schedules._PipelineScheduleRuntime([stage], MICROBATCHES, loss_fn=loss_fn)
        schedule._load_csv(order, format=form)
    else:
        schedule = schedules.Schedule1F1B(stage, MICROBATCHES, loss_fn=loss_fn)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    history = []
    for step in range(STEPS):
        torch.manual_seed(100 + step)
        batch, target = torch.randn(2, 2 * MICROBATCHES, WIDTH)
        optimizer.zero_grad()
        losses = []
        if rank == 0:
            schedule.step(batch)
        elif rank == RANKS - 1:
            schedule.step(target=target, losses=losses)
        else:
            schedule.step()
        optimizer.step()
        history.append(
            {
                "losses": [float(loss) for loss in losses],
                "gradients": [float(own.grad.abs().sum()) for own in model.parameters()],
            }
        )
    return history


def work(rank, meeting, out, orders):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=RANKS)
    found = [train(rank, order, form) for order, form in orders]
    Path(f"{out}.{rank}").write_text(json.dumps(found), "utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    out, *words = sys.argv[1:]
    orders = [("", ""), *zip(words[::2], words[1::2], strict=True)]
    with tempfile.TemporaryDirectory() as folder:
        processes.start_processes(
            work, (f"file://{folder}/meet", out, orders), nprocs=RANKS, start_method="fork"
        )
