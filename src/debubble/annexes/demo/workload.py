"""What the demo runs: a pipeline of layers whose time is set, and the words of its job."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from debubble.errors import UsageError

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


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


ORDER_FILE = ".csv"
"""How the name of a schedule ends that is the path of an order of passes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A pipeline of layers whose time is set, so that its bubble is known beforehand.

    `layers` counts the layers of each stage; schedules with two chunks a rank have twice as many
    stages as ranks.
    """

    ranks: int = 4
    layers: tuple[int, ...] = (4, 4, 4, 4)
    microbatches: int = 8
    schedule: str = "1f1b"
    forward_ms: float = 4.0
    backward_ms: float = 8.0
    tokens: int = 64
    width: int = 32
    steps: int = 2

    def __post_init__(self) -> None:
        # Below two ranks nothing is passed along, so there is no pipeline to show.
        least = {"ranks": 2, "microbatches": 1, "tokens": 1, "width": 1, "steps": 1}
        for name, bound in least.items():
            size = getattr(self, name)
            if size < bound:
                raise UsageError(f"{name} is {size}", hint=f"give at least {bound}")
        if any(layers < 1 for layers in self.layers):
            raise UsageError(
                f"a stage without layers: {self.layers}", hint="give every stage one layer or more"
            )
        # Written so that a NaN fails too.
        if not all(0 <= time < float("inf") for time in (self.forward_ms, self.backward_ms)):
            raise UsageError(
                "a layer's time must be zero or more", hint="give times in milliseconds"
            )
        _check_layout(self)

    @property
    def stages(self) -> int:
        """Slices that the model is cut into, over all ranks."""
        return len(self.layers)

    @property
    def torch_schedule(self) -> TorchSchedule | None:
        """What torch runs it by: a schedule of its own, or an order in a file; None: nothing."""
        if not self.schedule.endswith(ORDER_FILE):
            return SCHEDULES.get(self.schedule)
        layout: Literal["loop", "v"] = "v" if self.stages == 2 * self.ranks else "loop"
        return TorchSchedule(torch_class="_PipelineScheduleRuntime", layout=layout)

    @property
    def trains(self) -> bool:
        """Whether there is a backward pass."""
        return self.schedule != "forward-only"

    def rank_of(self, stage: int) -> int:
        """Return the rank that holds a stage."""
        chunk, rank = divmod(stage, self.ranks)
        known = self.torch_schedule
        if known is not None and known.layout == "v" and chunk % 2:
            return self.ranks - 1 - rank
        return rank

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages that a rank holds, in the order of the model."""
        return tuple(stage for stage in range(self.stages) if self.rank_of(stage) == rank)

    def layers_of(self, stage: int) -> range:
        """Return the layers of a stage, counted through the whole model."""
        first = sum(self.layers[:stage])
        return range(first, first + self.layers[stage])


def _check_layout(workload: Workload) -> None:
    known = workload.torch_schedule
    if known is None:
        raise UsageError(
            f"torch has no schedule {workload.schedule!r}",
            hint=f"one of {', '.join(SCHEDULES)}, or an order of passes: a {ORDER_FILE} file",
        )
    if workload.schedule not in SCHEDULES and not Path(workload.schedule).is_file():
        raise UsageError(
            f"no order of passes is in {workload.schedule}", hint="give the path of its file"
        )
    ranks, stages = workload.ranks, workload.stages
    wanted = {"single": stages == ranks, "v": stages == 2 * ranks, "loop": stages % ranks == 0}
    if not stages or not wanted[known.layout]:
        rule = {"single": f"{ranks}", "v": f"{2 * ranks}", "loop": f"a multiple of {ranks}"}
        raise UsageError(
            f"layers names {stages} stages, which {workload.schedule} cannot lay on {ranks} ranks",
            hint=f"give one count of layers for each stage; {rule[known.layout]} stages here",
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
    """Return the words of the demo's job, with placeholders for what changes."""
    return (
        *(
            "-m",
            "debubble.annexes.demo.job",
            "--split",
            "{split}",
            "--microbatches",
            "{microbatches}",
        ),
        *("--schedule", workload.schedule, "--steps", str(ALL_STEPS)),
        *("--forward-ms", f"{workload.forward_ms:g}"),
        *("--backward-ms", f"{workload.backward_ms:g}"),
    )
