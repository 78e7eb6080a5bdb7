"""What the demo runs, and what it ran before the change."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import msgspec

from debubble.errors import UsageError

NS_PER_MS = 1_000_000

# The profiler's first step pays for its set-up; torch keeps that step out of the trace.
PROFILER_WARMUP_STEPS = 1

# Below two ranks nothing is passed along, so there is no pipeline to show.
LEAST_RANKS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchSchedule:
    """Where torch.distributed.pipelining keeps a schedule, and how it lays stages on ranks."""

    torch_class: str
    layout: Literal["single", "loop", "v"]


SCHEDULES = {
    "forward-only": TorchSchedule(torch_class="_ScheduleForwardOnly", layout="single"),
    "gpipe": TorchSchedule(torch_class="ScheduleGPipe", layout="single"),
    "1f1b": TorchSchedule(torch_class="Schedule1F1B", layout="single"),
    "interleaved-1f1b": TorchSchedule(torch_class="ScheduleInterleaved1F1B", layout="loop"),
    "looped-bfs": TorchSchedule(torch_class="ScheduleLoopedBFS", layout="loop"),
    "interleaved-zb": TorchSchedule(torch_class="ScheduleInterleavedZeroBubble", layout="loop"),
    "zbv": TorchSchedule(torch_class="ScheduleZBVZeroBubble", layout="v"),
    "dualpipe-v": TorchSchedule(torch_class="ScheduleDualPipeV", layout="v"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A pipeline of layers whose time is set, so that its bubble is known beforehand.

    `layers` counts the layers of each stage; schedules with two chunks a rank have twice as many
    stages as ranks. `layer_scale` stretches single layers, to plant an imbalance. `replicas` runs
    as many pipelines side by side and adds up their gradients; `reduce_kib` makes every forward
    pass of a stage end in an all-reduce of that size between them, as tensor parallelism does;
    `replica_scale` stretches all layers of single replicas.

    With `in_flight` the ranks are a server: a step is one batch, and the first rank starts a new
    one whenever fewer than so many are unanswered. Without `mark_steps` the profiler is told
    nothing of steps, as in a serving engine. `fail_rank` makes that rank crash in its first
    profiled step; it is there for tests.
    """

    ranks: int = 4
    layers: tuple[int, ...] = (4, 4, 4, 4)
    microbatches: int = 8
    schedule: str = "1f1b"
    forward_ms: float = 4.0
    backward_ms: float = 8.0
    layer_scale: tuple[float, ...] | None = None
    tokens: int = 64
    width: int = 32
    steps: int = 2
    warmup: int = 2
    replicas: int = 1
    reduce_kib: int = 0
    replica_scale: tuple[float, ...] | None = None
    in_flight: int | None = None
    mark_steps: bool = True
    fail_rank: int | None = None

    def __post_init__(self) -> None:
        _check_sizes(self)
        _check_times(self)
        _check_layout(self)
        _check_microbatches(self)
        _check_replicas(self)
        _check_server(self)

    @property
    def world(self) -> int:
        """Processes over all pipelines."""
        return self.ranks * self.replicas

    @property
    def stages(self) -> int:
        """Slices that the model is cut into, over all ranks."""
        return len(self.layers)

    @property
    def all_steps(self) -> int:
        """Steps that are run, in the trace or not."""
        return self.warmup + PROFILER_WARMUP_STEPS + self.steps

    @property
    def trains(self) -> bool:
        """Whether there is a backward pass."""
        return self.schedule != "forward-only"

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

    def as_run_by(self, process: int) -> Workload:
        """Return the workload as a process's replica runs it: no slower than the others, or so."""
        if self.replica_scale is None:
            return self
        scale = self.replica_scale[process % self.replicas]
        return replace(
            self, forward_ms=self.forward_ms * scale, backward_ms=self.backward_ms * scale
        )

    def rank_of(self, stage: int) -> int:
        """Return the rank that holds a stage."""
        chunk, place = divmod(stage, self.ranks)
        if SCHEDULES[self.schedule].layout == "v" and chunk % 2:
            return self.ranks - 1 - place
        return place

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages that a rank holds, in the order of the model."""
        return tuple(stage for stage in range(self.stages) if self.rank_of(stage) == rank)

    def layers_of(self, stage: int) -> range:
        """Return the layers of a stage, counted through the whole model."""
        first = sum(self.layers[:stage])
        return range(first, first + self.layers[stage])

    def forward_ns(self, layer: int) -> int:
        """Return how long the forward pass of a layer takes."""
        return round(self.forward_ms * self._scale(layer) * NS_PER_MS)

    def backward_ns(self, layer: int) -> int:
        """Return how long the full backward pass of a layer takes: input and weight gradient."""
        return round(self.backward_ms * self._scale(layer) * NS_PER_MS)

    def _scale(self, layer: int) -> float:
        return 1.0 if self.layer_scale is None else self.layer_scale[layer]


def encode_workload(workload: Workload) -> bytes:
    """Write a workload as JSON, for the processes that run it."""
    return msgspec.json.encode(workload)


def decode_workload(text: bytes) -> Workload:
    """Read back what `encode_workload` wrote."""
    try:
        return msgspec.json.decode(text, type=Workload)
    except msgspec.MsgspecError as error:
        raise UsageError(
            f"this is no workload: {error}", hint="write it with encode_workload"
        ) from error


def _check_sizes(workload: Workload) -> None:
    least = {
        "ranks": LEAST_RANKS,
        "microbatches": 1,
        "tokens": 1,
        "width": 1,
        "steps": 1,
        "warmup": 1,  # the first step infers shapes and connects the ranks
        "replicas": 1,
        "reduce_kib": 0,
    }
    for name, bound in least.items():
        size = getattr(workload, name)
        if size < bound:
            raise UsageError(f"{name} is {size}", hint=f"give at least {bound}")
    if any(layers < 1 for layers in workload.layers):
        raise UsageError(
            f"a stage without layers: {workload.layers}", hint="give every stage one layer or more"
        )
    if workload.fail_rank is not None and not 0 <= workload.fail_rank < workload.world:
        raise UsageError(
            f"fail_rank is {workload.fail_rank}", hint=f"ranks count from 0 to {workload.world - 1}"
        )


def _check_times(workload: Workload) -> None:
    scale = workload.layer_scale or ()
    times = (
        workload.forward_ms,
        workload.backward_ms,
        *scale,
        *(workload.replica_scale or ()),
    )
    # Written so that a NaN fails too.
    if not all(0 <= time < float("inf") for time in times):
        raise UsageError("a layer's time must be zero or more", hint="give times in milliseconds")
    if workload.layer_scale is not None and len(scale) != sum(workload.layers):
        raise UsageError(
            f"layer_scale has {len(scale)} entries for {sum(workload.layers)} layers",
            hint="give one multiplier for each layer of the model",
        )


def _check_layout(workload: Workload) -> None:
    known = SCHEDULES.get(workload.schedule)
    if known is None:
        raise UsageError(
            f"torch has no schedule {workload.schedule!r}", hint=f"one of {', '.join(SCHEDULES)}"
        )
    ranks, stages = workload.ranks, workload.stages
    wanted = {"single": stages == ranks, "v": stages == 2 * ranks, "loop": stages % ranks == 0}
    if not stages or not wanted[known.layout]:
        rule = {"single": f"{ranks}", "v": f"{2 * ranks}", "loop": f"a multiple of {ranks}"}
        raise UsageError(
            f"layers names {stages} stages, which {workload.schedule} cannot lay on {ranks} ranks",
            hint=f"give one count of layers for each stage; {rule[known.layout]} stages here",
        )


def _check_microbatches(workload: Workload) -> None:
    """Refuse what torch's schedules refuse, before four processes are started for it."""
    microbatches, ranks = workload.microbatches, workload.ranks
    least = {"1f1b": ranks, "dualpipe-v": workload.stages}.get(workload.schedule, 1)
    if microbatches < least:
        raise UsageError(
            f"{workload.schedule} needs {least} microbatches or more, not {microbatches}",
            hint=f"give {least} microbatches, or the schedule gpipe",
        )
    rounds = max(1, microbatches // ranks)
    if workload.schedule in {"interleaved-1f1b", "interleaved-zb"} and microbatches % rounds:
        raise UsageError(
            f"{workload.schedule} cannot cut {microbatches} microbatches into {rounds} rounds",
            hint=f"give a multiple of {ranks} microbatches",
        )


def _check_replicas(workload: Workload) -> None:
    if workload.reduce_kib and workload.replicas == 1:
        raise UsageError("reduce_kib needs replicas to reduce between", hint="give replicas=2")
    scale = workload.replica_scale
    if scale is not None and len(scale) != workload.replicas:
        raise UsageError(
            f"replica_scale has {len(scale)} entries for {workload.replicas} replicas",
            hint="give one multiplier for each replica",
        )


def _check_server(workload: Workload) -> None:
    if workload.in_flight is None:
        if not workload.mark_steps:
            raise UsageError("steps without marks are for a server", hint="give in_flight=1")
        return
    if workload.in_flight < 1:
        raise UsageError(f"in_flight is {workload.in_flight}", hint="give at least 1")
    if (workload.schedule, workload.microbatches, workload.replicas) != ("forward-only", 1, 1):
        raise UsageError(
            "a server runs one forward pass a batch in one pipeline",
            hint="give schedule='forward-only', microbatches=1 and replicas=1 with in_flight",
        )


# Its last stage has more than twice the layers of the others. Layers are long against what a busy
# machine adds to a sleep, and short enough for a minute in all.
BEFORE = Workload(layers=(3, 3, 3, 7), microbatches=4, forward_ms=6.0, backward_ms=12.0)
# Beyond this the batch takes longer than anyone looks on.
MOST_MICROBATCHES = 8
# The first steps connect the ranks and infer shapes; five to profile have four step times, the
# fewest that a verdict can be tested with.
WAIT, STEPS = 2, 5
# Those that are timed before the profiler starts, its own first one, and one to end the last.
ALL_STEPS = WAIT + 2 * STEPS + 2


def job_words(workload: Workload) -> tuple[str, ...]:
    """Return what `python -m debubble.demo.job` is told, with placeholders for what changes."""
    return (
        *("-m", "debubble.demo.job", "--split", "{split}", "--microbatches", "{microbatches}"),
        *("--schedule", workload.schedule, "--steps", str(ALL_STEPS)),
        *("--forward-ms", f"{workload.forward_ms:g}"),
        *("--backward-ms", f"{workload.backward_ms:g}"),
    )
