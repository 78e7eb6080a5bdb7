"""A job that has never heard of debubble: `torchrun … plain_job.py STEPS [KIND] [PAUSE_S]`."""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist

STEPS = int(sys.argv[1])
KIND = sys.argv[2] if len(sys.argv) > 2 else "schedule"
PAUSE_S = float(sys.argv[3]) if len(sys.argv) > 3 else 0.0
"""Between two steps: what is counted in seconds then takes few of them."""
WIDTH = 32


def with_schedule():
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B  # noqa: PLC0415

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = torch.nn.Linear(WIDTH, WIDTH)
    stage = PipelineStage(model, rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, 4, loss_fn=torch.nn.functional.mse_loss)
    optimizers = [torch.optim.SGD([weight], lr=0.1) for weight in model.parameters()]
    for _ in range(STEPS):
        time.sleep(PAUSE_S)
        batch = torch.ones(8, WIDTH)
        schedule.step(batch) if rank == 0 else schedule.step(target=batch)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    dist.destroy_process_group()


def with_optimizers():
    model = torch.nn.Linear(WIDTH, WIDTH)
    optimizers = [torch.optim.SGD([weight], lr=0.1) for weight in model.parameters()]
    for _ in range(STEPS):
        model(torch.ones(8, WIDTH)).sum().backward()
        for optimizer in optimizers:
            optimizer.step()


{"schedule": with_schedule, "optimizers": with_optimizers}[KIND]()
sys.stdout.write("the job's own words\n")
