"""The demo's pipeline as tests need it: profiled, and what its ranks saw written beside the traces.

Besides what the demo has: replicas, reductions within a stage, and a server's stream. The truth of
every pass and call is the yardstick for the analysis.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
import torch.distributed as dist
from support.jobs.forked_ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from debubble.annexes.demo import rank as demo_rank
from debubble.annexes.demo import workload as demo
from debubble.annexes.demo.layers import Part, build_stage, listening, make_batch

# The profiler's first step pays for its set-up; torch keeps that step out of the trace.
PROFILER_WARMUP_STEPS = 1
ELEMENT_BYTES = 4
# A token, say: what an answer weighs does not matter, when it comes does.
ANSWER_SHAPE = (1,)
# Hidden, as they are no traces.
RENDEZVOUS, WORKLOAD = ".rendezvous", ".workload.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload(demo.Workload):
    """A pipeline of the demo, and what is planted in it.

    `replicas` runs as many pipelines side by side and adds up their gradients; `reduce_kib` makes
    every forward pass of a stage end in an all-reduce of that size between them, as tensor
    parallelism does. With `in_flight` the
    ranks are a server: a step is one batch, and the first rank starts a new one whenever fewer than
    so many are unanswered. Without `mark_steps` the profiler is told nothing of steps, as in a
    serving engine.
    """

    warmup: int = 2
    replicas: int = 1
    reduce_kib: int = 0
    in_flight: int | None = None
    mark_steps: bool = True

    @property
    def world(self) -> int:
        """Processes over all pipelines."""
        return self.ranks * self.replicas

    @property
    def all_steps(self) -> int:
        """Steps that are run, in the trace or not."""
        return self.warmup + PROFILER_WARMUP_STEPS + self.steps

    def position_of(self, process: int) -> int:
        """Return a process's rank in its pipeline: replicas of a stage lie side by side."""
        return process // self.replicas

    def pipeline_of(self, process: int) -> tuple[int, ...]:
        """Return the processes that a process passes batches along with."""
        return tuple(range(process % self.replicas, self.world, self.replicas))

    def replicas_of(self, process: int) -> tuple[int, ...]:
        """Return the processes that hold the same stages."""
        first = self.position_of(process) * self.replicas
        return tuple(range(first, first + self.replicas))


Kind = Literal["F", "B", "I", "W"]
Phase = Literal["unprofiled", "profiler-warm-up", "profiled"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrueCall:
    """One timed call: a layer's forward, input or weight gradient, or a reduction after it."""

    kind: Kind
    part: Part
    stage: int
    microbatch: int
    layer: int
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TruePass:
    """One pass of one microbatch through one stage, from call to return."""

    kind: Kind
    stage: int
    microbatch: int
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrueStep:
    """One batch through the pipeline, optimizer and closing barrier included."""

    step: int
    phase: Phase
    start_ns: int
    end_ns: int
    loss: float | None
    passes: tuple[TruePass, ...]
    calls: tuple[TrueCall, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Truth:
    """All steps of one rank; times are nanoseconds since the epoch, as in `time.time_ns`."""

    rank: int
    stages: tuple[int, ...]
    workload: Workload
    steps: tuple[TrueStep, ...]

    @property
    def profiled(self) -> tuple[TrueStep, ...]:
        """The steps that are in the trace."""
        return tuple(step for step in self.steps if step.phase == "profiled")


def read_truth(file: Path) -> Truth:
    """Read what a rank wrote beside its trace."""
    return msgspec.json.decode(file.read_bytes(), type=Truth)


class Recorder:
    """Collects passes and calls as they happen, and hands them out step by step."""

    def __init__(self) -> None:
        self.passes: list[TruePass] = []
        self.calls: list[TrueCall] = []
        self._running: tuple[Kind, int, int] | None = None

    @contextmanager
    def record_pass(self, kind: Kind, stage: int, microbatch: int) -> Iterator[None]:
        """Record one pass; the calls within are its own."""
        start_ns = time.time_ns()
        self._running = (kind, stage, microbatch)
        try:
            yield
        finally:
            self._running = None
        self.passes.append(
            TruePass(
                kind=kind,
                stage=stage,
                microbatch=microbatch,
                start_ns=start_ns,
                end_ns=time.time_ns(),
            )
        )

    def record_call(self, part: Part, layer: int, start_ns: int, end_ns: int) -> None:
        """Record one operator. Outside a pass, torch is inferring shapes: that is no work."""
        if self._running is None:
            return
        kind, stage, microbatch = self._running
        self.calls.append(
            TrueCall(
                kind=kind,
                part=part,
                stage=stage,
                microbatch=microbatch,
                layer=layer,
                start_ns=start_ns,
                end_ns=end_ns,
            )
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """The process groups of one process; None is the world."""

    pipeline: Any = None
    data: Any = None


def build_groups(workload: Workload, process: int) -> Groups:
    """Make the groups of all pipelines and all replicas, as every process must, in one order."""
    if workload.replicas == 1:
        return Groups()
    pipelines = sorted({workload.pipeline_of(other) for other in range(workload.world)})
    copies = sorted({workload.replicas_of(other) for other in range(workload.world)})
    made = {
        ranks: dist.new_group(list(ranks), group_desc=name)
        for name, groups in (("mesh_pp", pipelines), ("mesh_dp", copies))
        for ranks in groups
    }
    return Groups(
        pipeline=made[workload.pipeline_of(process)], data=made[workload.replicas_of(process)]
    )


class Reduction(nn.Module):
    """An all-reduce between replicas at the end of a stage; it changes no value."""

    def __init__(
        self,
        workload: Workload,
        layer: int,
        group: Any,
        listener: Callable[[Part, int, int, int], None],
    ) -> None:
        super().__init__()
        self.layer = layer
        self.group = group
        self.listener = listener
        self.payload = torch.zeros(workload.reduce_kib * 1024 // ELEMENT_BYTES)

    def forward(self, x: Tensor) -> Tensor:
        """Reduce, and pass the input on."""
        start_ns = time.time_ns()
        dist.all_reduce(self.payload, group=self.group)
        self.listener("reduce", self.layer, start_ns, time.time_ns())
        return x


class RecordedStage(PipelineStage):
    """A stage that writes down when each of its passes began and ended."""

    def __init__(self, workload: Workload, stage: int, recorder: Recorder, groups: Groups) -> None:
        model = build_stage(workload, stage)
        if workload.reduce_kib:
            layer = workload.layers_of(stage)[-1]
            model.append(Reduction(workload, layer, groups.data, recorder.record_call))
        super().__init__(model, stage, workload.stages, torch.device("cpu"), group=groups.pipeline)
        self.recorder = recorder

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Run F."""
        with self.recorder.record_pass("F", self.stage_index, fwd_chunk_id):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Any = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> Any:
        """Run B, or I where the schedule splits the backward pass."""
        kind: Kind = "B" if full_backward else "I"
        with self.recorder.record_pass(kind, self.stage_index, bwd_chunk_id):
            return super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> Any:
        """Run W."""
        with self.recorder.record_pass("W", self.stage_index, bwd_chunk_id):
            return super().backward_weight_one_chunk(bwd_chunk_id, last_backward)


def run_several(workloads: dict[str, Workload], root: Path) -> None:
    """Run each workload, by name, into a folder of that name."""
    for name, workload in workloads.items():
        folder = root / name
        folder.mkdir(parents=True)
        (folder / WORKLOAD).write_bytes(msgspec.json.encode(workload))
        codes, output = run_ranks(f"{__name__}:run_recorded", workload.world, folder)
        assert not any(codes), output


def main(folder: str, rank: str) -> None:
    """Run one process of a workload: `python recorded_pipeline.py FOLDER RANK`."""
    run_recorded(Path(folder), int(rank))


def run_recorded(folder: Path, process: int) -> None:
    """Join the other processes, run all steps, and write this one's trace and truth."""
    workload = msgspec.json.decode((folder / WORKLOAD).read_bytes(), type=Workload)
    demo_rank.join(folder / RENDEZVOUS, process, workload.world)
    recorder = Recorder()
    kind = RecordedRank if workload.in_flight is None else Server
    pipeline = kind(workload, process, recorder)
    with listening(recorder.record_call):
        steps = run_steps(pipeline, folder / f"rank{process}.pt.trace.json.gz")
    stages = workload.stages_of(workload.position_of(process))
    truth = Truth(rank=process, stages=stages, workload=workload, steps=steps)
    (folder / f"truth{process}.json").write_bytes(msgspec.json.encode(truth))
    dist.destroy_process_group()


def run_steps(pipeline: RecordedRank | Server, trace: Path) -> tuple[TrueStep, ...]:
    """Run the unprofiled steps, then the profiled ones."""
    workload = pipeline.workload
    steps: list[TrueStep] = []

    def run(phase: Phase) -> None:
        recorder, start_ns = pipeline.recorder, time.time_ns()
        loss = pipeline.run_step(len(steps))
        steps.append(
            TrueStep(
                step=len(steps),
                phase=phase,
                start_ns=start_ns,
                end_ns=time.time_ns(),
                loss=loss,
                passes=tuple(recorder.passes),
                calls=tuple(recorder.calls),
            )
        )
        recorder.passes, recorder.calls = [], []

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
        on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(trace)),
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


class RecordedRank(demo_rank.Rank):
    """A rank of the demo, recorded; its replicas have one gradient."""

    def __init__(self, workload: Workload, process: int, recorder: Recorder) -> None:
        self.recorder = recorder
        self.groups = build_groups(workload, process)
        stages = workload.stages_of(workload.position_of(process))
        super().__init__(
            workload, [RecordedStage(workload, stage, recorder, self.groups) for stage in stages]
        )

    def learn(self, optimizer: torch.optim.Optimizer) -> None:
        """Give all replicas the same gradient."""
        if self.workload.replicas > 1:
            for weight in self.weights:
                if weight.grad is not None:
                    dist.all_reduce(weight.grad, group=self.groups.data)
                    weight.grad /= self.workload.replicas
        super().learn(optimizer)

    def settle(self) -> None:
        """Do nothing: the barrier after each step left nothing to wait for."""

    def finish(self) -> None:
        """Do nothing, for the same reason."""


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

    def run_step(self, step: int) -> None:
        """Run one batch through this rank's stage; later ranks get to it in their own time."""
        with torch.no_grad():
            x = self._take(step)
            with self.recorder.record_pass("F", self.rank, 0):
                y = self.stage(x)
            self._pass_on(y)
        self.begun += 1

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
        dist.recv(torch.empty(ANSWER_SHAPE), src=self.last, tag=self.answered)
        self.answered += 1

    def _pass_on(self, y: torch.Tensor) -> None:
        """Send without waiting: the next stage may be busy with an earlier batch."""
        answers = self.rank == self.last
        message = torch.zeros(ANSWER_SHAPE) if answers else y
        work = dist.isend(message, dst=0 if answers else self.rank + 1, tag=self.begun)
        self.sent.append((work, message))
        while self.sent and self.sent[0][0].is_completed():
            self.sent.popleft()


if __name__ == "__main__":
    main(*sys.argv[1:])
