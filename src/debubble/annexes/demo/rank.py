"""One rank of the demo: training steps, or a server's."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch
import torch.distributed as dist

from debubble.annexes.demo.layers import (
    RecordedStage,
    Recorder,
    Truth,
    build_groups,
    build_schedule,
    build_stage,
    listening,
    make_batch,
)
from debubble.annexes.demo.workload import PROFILER_WARMUP_STEPS, RunFiles, decode_workload

if TYPE_CHECKING:
    from types import TracebackType

    from debubble.annexes.demo.layers import Phase, TrueStep
    from debubble.annexes.demo.workload import Workload

# Large, so that a wrong gradient shows in the next step's loss.
LEARNING_RATE = 1.0

# Real steps clip their gradients; this one never has to, so a cut model learns like a whole one.
MOST_NORM = 1e6

# A token, say: what an answer weighs does not matter, when it comes does.
_ANSWER_SHAPE = (1,)


def main(folder: str, rank: str) -> None:
    """Run one rank; where it fails, note when, so that the first to fail is the one to blame."""
    files = RunFiles(folder=Path(folder))

    def leave_at_once(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        files.write(files.failure(int(rank)), str(time.time_ns()).encode())
        # sys.stderr is a buffer here: torch.distributed wraps this hook to prefix its output.
        traceback.print_exception(kind, error, trace, file=sys.__stderr__)
        os._exit(1)

    sys.excepthook = leave_at_once
    run_rank(files, int(rank))


def run_rank(files: RunFiles, rank: int) -> None:
    """Join the other ranks, run all steps, and write this rank's trace and truth."""
    workload = decode_workload(files.workload.read_bytes())
    _join(workload, rank, files.rendezvous)
    recorder = Recorder()
    kind = Rank if workload.in_flight is None else Server
    pipeline = kind(workload, rank, recorder)
    with listening(recorder.record_call):
        steps = run_steps(pipeline, files)
    stages = workload.stages_of(workload.position_of(rank))
    truth = Truth(rank=rank, stages=stages, workload=workload, steps=steps)
    files.write(files.truth(rank), msgspec.json.encode(truth))
    dist.destroy_process_group()


def run_unprofiled(workload: Workload, rank: int, rendezvous: Path) -> None:
    """Join the other ranks and run the steps, as a job does that knows of no profiler."""
    _join(workload, rank, rendezvous)
    pipeline = Rank(workload, rank, Recorder())
    for step in range(workload.steps):
        pipeline.run_step(step, "unprofiled")
    dist.destroy_process_group()


def _join(workload: Workload, rank: int, rendezvous: Path) -> None:
    torch.set_num_threads(1)
    # torch's own stubs leave FileStore out of what torch.distributed exports.
    store = dist.FileStore(str(rendezvous), workload.world)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=workload.world)


def run_steps(pipeline: Rank | Server, files: RunFiles) -> tuple[TrueStep, ...]:
    """Run the unprofiled steps, then the profiled ones."""
    workload = pipeline.workload
    steps: list[TrueStep] = []

    def run(phase: Phase) -> None:
        if phase == "profiled" and workload.fail_rank == pipeline.rank:
            raise RuntimeError(f"rank {pipeline.rank} was asked to fail")
        steps.append(pipeline.run_step(len(steps), phase))
        if pipeline.rank == 0:
            files.count_step()

    def export(profiler: torch.profiler.profile) -> None:
        with files.replacing(files.trace(pipeline.rank)) as partial:
            profiler.export_chrome_trace(str(partial))

    for _ in range(workload.warmup):
        run("unprofiled")
    marks = torch.profiler.schedule(
        wait=0, warmup=PROFILER_WARMUP_STEPS, active=workload.steps, repeat=1
    )
    profiler = torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU],
        record_shapes=True,
        profile_memory=True,
        schedule=marks if workload.mark_steps else None,
        on_trace_ready=export,
    )
    with profiler:
        for step in range(PROFILER_WARMUP_STEPS + workload.steps):
            warms_up = workload.mark_steps and step < PROFILER_WARMUP_STEPS
            run("profiler-warm-up" if warms_up else "profiled")
            if step == PROFILER_WARMUP_STEPS + workload.steps - 1:
                pipeline.settle()
            if workload.mark_steps:
                profiler.step()
    pipeline.finish()
    return tuple(steps)


class Rank:
    """What one process holds between steps: its stages, its schedule, its optimizer."""

    def __init__(self, workload: Workload, rank: int, recorder: Recorder) -> None:
        self.workload = workload
        self.rank = rank
        self.recorder = recorder
        self.groups = build_groups(workload, rank)
        mine = workload.as_run_by(rank)
        self.stages = [
            RecordedStage(mine, stage, recorder, self.groups)
            for stage in workload.stages_of(workload.position_of(rank))
        ]
        self.schedule = build_schedule(workload, self.stages)
        self.weights = [weight for stage in self.stages for weight in stage.submod.parameters()]
        self.optimizer = (
            torch.optim.SGD(self.weights, lr=LEARNING_RATE) if workload.trains else None
        )

    def run_step(self, step: int, phase: Phase) -> TrueStep:
        """Run one batch through the pipeline and wait until every rank is through.

        Without the barrier the first rank of a forward-only pipeline runs ahead by whole steps,
        and the first to end a training step would export its trace while others still compute.
        """
        batch = make_batch(self.workload, step)
        start_ns = time.time_ns()
        with torch.set_grad_enabled(self.workload.trains):
            loss = self._run_schedule(*batch)
        if self.optimizer is not None:
            if self.workload.replicas > 1:
                self._average_gradients()
            torch.nn.utils.clip_grad_norm_(self.weights, MOST_NORM)
            self.optimizer.step()
            self.optimizer.zero_grad()
        dist.barrier()
        return self.recorder.end_step(
            step=step, phase=phase, start_ns=start_ns, end_ns=time.time_ns(), loss=loss
        )

    def _average_gradients(self) -> None:
        """Give all replicas the same gradient."""
        for weight in self.weights:
            if weight.grad is not None:
                dist.all_reduce(weight.grad, group=self.groups.data)
                weight.grad /= self.workload.replicas

    def settle(self) -> None:
        """Do nothing: the barrier after each step left nothing to wait for."""

    def finish(self) -> None:
        """Do nothing, for the same reason."""

    def _run_schedule(self, x: torch.Tensor, target: torch.Tensor) -> float | None:
        inputs = (x,) if any(stage.is_first for stage in self.stages) else ()
        if not self.workload.trains or not any(stage.is_last for stage in self.stages):
            self.schedule.step(*inputs)
            return None
        losses: list[torch.Tensor] = []
        self.schedule.step(*inputs, target=target, losses=losses)
        return float(torch.stack(losses).detach().mean())


class Server:
    """One stage that receives a batch, computes it and passes it on, batch after batch.

    Messages are tagged with the number of their batch, so that a trace tells which one each is for.
    """

    def __init__(self, workload: Workload, rank: int, recorder: Recorder) -> None:
        self.workload = workload
        self.rank = rank
        self.recorder = recorder
        self.stage = build_stage(workload, rank)
        self.last = workload.ranks - 1
        self.begun = 0
        self.answered = 0
        self.sent: deque[tuple[Any, torch.Tensor]] = deque()

    def run_step(self, step: int, phase: Phase) -> TrueStep:
        """Run one batch through this rank's stage; later ranks get to it in their own time."""
        start_ns = time.time_ns()
        with torch.no_grad():
            x = self._take(step)
            with self.recorder.record_pass("F", self.rank, 0):
                y = self.stage(x)
            self._pass_on(y)
        self.begun += 1
        return self.recorder.end_step(
            step=step, phase=phase, start_ns=start_ns, end_ns=time.time_ns(), loss=None
        )

    def settle(self) -> None:
        """Wait for what was sent.

        Messages that outlived the profiler are what we suspect of a crash in a later profiler of
        the same process (`free(): invalid size`, seen once; not again since they are waited for).
        """
        for work, _ in self.sent:
            work.wait()

    def finish(self) -> None:
        """Take the answers that are still to come."""
        while self.rank == 0 and self.answered < self.begun:
            self._take_answer()

    def _take(self, step: int) -> torch.Tensor:
        batch, _ = make_batch(self.workload, step)
        if self.rank:
            # Over what every rank could make for itself.
            dist.recv(batch, src=self.rank - 1, tag=self.begun)
            return batch
        while self.begun - self.answered >= (self.workload.in_flight or 1):
            self._take_answer()
        return batch

    def _take_answer(self) -> None:
        dist.recv(torch.empty(_ANSWER_SHAPE), src=self.last, tag=self.answered)
        self.answered += 1

    def _pass_on(self, y: torch.Tensor) -> None:
        """Send without waiting: the next stage may be busy with an earlier batch."""
        answers = self.rank == self.last
        message = torch.zeros(_ANSWER_SHAPE) if answers else y
        work = dist.isend(message, dst=0 if answers else self.rank + 1, tag=self.begun)
        self.sent.append((work, message))
        while self.sent and self.sent[0][0].is_completed():
            self.sent.popleft()


if __name__ == "__main__":
    main(*sys.argv[1:])
