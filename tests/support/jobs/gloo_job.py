"""A real two-stage gloo pipeline that trains a little, as often as it is asked to."""

from __future__ import annotations

import json
import os
import resource
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from support.jobs.forked_ranks import run_ranks
from torch.distributed.pipelining import PipelineStage, schedules

import debubble

RANKS = 2
WIDTH = 48
METHODS = ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk")


def build(settings, rank):
    stages = []
    chunks = settings.get("chunks", 1)
    for stage in range(rank, RANKS * chunks, RANKS):
        torch.manual_seed(stage)
        model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(3)))
        stages.append(PipelineStage(model, stage, RANKS * chunks, torch.device("cpu")))
    make = getattr(schedules, settings.get("schedule", "Schedule1F1B"))
    given = stages if chunks > 1 else stages[0]
    return stages, make(given, 4, loss_fn=torch.nn.functional.mse_loss)


def run(settings, rank):
    stages, schedule = build(settings, rank)
    weights = [weight for stage in stages for weight in stage.submod.parameters()]
    optimizer = torch.optim.SGD(weights, lr=0.1)
    given = schedule if settings.get("give") == "schedule" else None
    wanted = settings.get("capture")
    around = nullcontext() if wanted is None else debubble.capture(given, **wanted)
    history = []
    with around as session:
        for step in range(settings["steps"]):
            if (step, rank) == (settings.get("die_at"), 1):
                os._exit(9)
            if step == settings.get("full_disk_at"):
                resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
            if step == settings.get("free_disk_at"):
                resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
            history.append(train(schedule, stages, optimizer, step))
            debubble.step()
    left = [name for stage in stages for name in METHODS if name in vars(stage)]
    left += [name for name in vars(schedule) if name == "_maybe_compute_loss"]
    problems = [] if wanted is None else session.problems
    return {"losses": history, "wrapped": left, "problems": problems}


def train(schedule, stages, optimizer, step):
    torch.manual_seed(1000 + step)
    batch, target = torch.randn(16, WIDTH), torch.randn(16, WIDTH)
    inputs = (batch,) if any(stage.is_first for stage in stages) else ()
    losses = []
    if any(stage.is_last for stage in stages):
        schedule.step(*inputs, target=target, losses=losses)
    else:
        schedule.step(*inputs)
    optimizer.step()
    optimizer.zero_grad()
    return [loss.item().hex() for loss in losses]


def run_rank(folder, rank, settings):
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    result = run(settings, rank)
    (folder / f"result{rank}").write_text(json.dumps(result), "utf-8")
    dist.destroy_process_group()


@dataclass
class Job:
    codes: list[int]
    results: list[dict | None]
    output: list[str]
    out: Path

    def captures(self):
        return sorted(path.name for path in self.out.iterdir())

    def files(self):
        return sorted(
            str(path.relative_to(self.out)) for path in self.out.rglob("*") if path.is_file()
        )


def run_job(folder, **settings):
    """Run both ranks to their end; captures go to `folder/out`."""
    out = folder / "out"
    if settings.get("capture") is not None:
        settings["capture"] = {"out": str(out), **settings["capture"]}
    codes, output = run_ranks(f"{__name__}:run_rank", RANKS, folder, settings=settings)
    files = [folder / f"result{rank}" for rank in range(RANKS)]
    results = [json.loads(file.read_text()) if file.exists() else None for file in files]
    return Job(codes=codes, results=results, output=output, out=out)
