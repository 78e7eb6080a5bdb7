"""A real two-stage gloo pipeline that trains a little, as often as it is asked to.

Each line of stdin is a job: its folder and its settings. torch is imported once, for all of them,
and the ranks of each job are forked. A rank has its output in `outputN`, what it ended with is
printed.
"""

from __future__ import annotations

import atexit
import json
import os
import resource
import sys
import traceback
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
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


def run_rank(store, rank, settings):
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS)
    result = run(settings, rank)
    Path(f"{store}.result{rank}").write_text(json.dumps(result), "utf-8")
    dist.destroy_process_group()


def fork(folder, rank, settings):
    child = os.fork()
    if child:
        return child
    os.chdir(folder)
    output = os.open(f"output{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    code = 1
    try:
        run_rank(f"{folder}/store", rank, settings)
        code = 0
    except BaseException:  # noqa: BLE001 (a fork must not run on into its parent's code)
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main():
    for line in sys.stdin:
        folder, settings = json.loads(line)
        ranks = [fork(folder, rank, settings) for rank in range(RANKS)]
        codes = [os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks]
        sys.stdout.write(f"{json.dumps(codes)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
