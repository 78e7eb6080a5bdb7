"""One rank of the demo: its stages, schedule and optimizer; training steps, or forward passes."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage

from debubble.annexes.demo.layers import build_schedule, build_stage, make_batch
from debubble.annexes.demo.workload import Workload

# Large, so that a wrong gradient shows in the next step's loss.
LEARNING_RATE = 1.0

# Real steps clip their gradients; this one never has to, so a cut model learns like a whole one.
MOST_NORM = 1e6


def run_rank(workload: Workload, rank: int, rendezvous: Path) -> None:
    """Join the other ranks and run the steps."""
    join(rendezvous, rank, workload.ranks)
    stages = [
        PipelineStage(build_stage(workload, stage), stage, workload.stages, torch.device("cpu"))
        for stage in workload.stages_of(rank)
    ]
    pipeline = Rank(workload, stages)
    for step in range(workload.steps):
        pipeline.run_step(step)
    dist.destroy_process_group()


def join(rendezvous: Path, rank: int, world: int) -> None:
    """Meet the other ranks at a file, so that no port can be taken."""
    torch.set_num_threads(1)
    # torch's own stubs leave FileStore out of what torch.distributed exports.
    store = dist.FileStore(str(rendezvous), world)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)


class Rank:
    """What one process holds between steps: its stages, its schedule, its optimizer."""

    def __init__(self, workload: Workload, stages: list[PipelineStage]) -> None:
        self.workload = workload
        self.stages = stages
        self.schedule = build_schedule(workload, stages)
        self.weights = [weight for stage in stages for weight in stage.submod.parameters()]
        self.optimizer = (
            torch.optim.SGD(self.weights, lr=LEARNING_RATE) if workload.trains else None
        )

    def run_step(self, step: int) -> float | None:
        """Run one batch through the pipeline, wait until every rank is through, return the loss.

        Without the barrier the first rank of a forward-only pipeline runs ahead by whole steps,
        and the first to end a training step would export its trace while others still compute.
        """
        batch = make_batch(self.workload, step)
        with torch.set_grad_enabled(self.workload.trains):
            loss = self._run_schedule(*batch)
        if self.optimizer is not None:
            self.learn(self.optimizer)
        dist.barrier()
        return loss

    def learn(self, optimizer: torch.optim.Optimizer) -> None:
        """Change the weights by their gradients."""
        torch.nn.utils.clip_grad_norm_(self.weights, MOST_NORM)
        optimizer.step()
        optimizer.zero_grad()

    def _run_schedule(self, x: torch.Tensor, target: torch.Tensor) -> float | None:
        inputs = (x,) if any(stage.is_first for stage in self.stages) else ()
        if not self.workload.trains or not any(stage.is_last for stage in self.stages):
            self.schedule.step(*inputs)
            return None
        losses: list[torch.Tensor] = []
        self.schedule.step(*inputs, target=target, losses=losses)
        return float(torch.stack(losses).detach().mean())
