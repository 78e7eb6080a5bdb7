"""A workload in → its processes, one a rank, and the traces and truths that they leave behind."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from debubble.errors import DemoError, MissingExtra, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


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


ORDER_FILE = ".csv"
"""How the name of a schedule ends that is the path of an order of passes."""


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
    scales = workload.layer_scale or (), workload.replica_scale or ()
    times = (workload.forward_ms, workload.backward_ms, *scales[0], *scales[1])
    # Written so that a NaN fails too.
    if not all(0 <= time < float("inf") for time in times):
        raise UsageError("a layer's time must be zero or more", hint="give times in milliseconds")
    if workload.layer_scale is not None and len(scales[0]) != sum(workload.layers):
        raise UsageError(
            f"layer_scale has {len(scales[0])} entries for {sum(workload.layers)} layers",
            hint="give one multiplier for each layer of the model",
        )


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


# Everything a run writes, so that a forced run removes an older one and nothing else.
RESULTS = ("rank*.pt.trace.json.gz", "truth*.json")
LOGS = ("rank*.log",)
SCRATCH = (".debubble-demo.*",)

# Short against a step of the demo, long against what a poll costs.
POLL_S = 0.05

# The end of a Python traceback, with the line that failed.
LOG_TAIL_LINES = 6

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFiles:
    """One folder: a trace and a truth for each rank; logs and scratch files until it succeeded."""

    folder: Path

    @property
    def workload(self) -> Path:
        """What the ranks are to run."""
        return self.folder / ".debubble-demo.workload.json"

    @property
    def rendezvous(self) -> Path:
        """Where the ranks find each other: a file, so that no port can be taken."""
        return self.folder / ".debubble-demo.rendezvous"

    @property
    def counter(self) -> Path:
        """One byte for each step that rank 0 has ended."""
        return self.folder / ".debubble-demo.steps"

    def trace(self, rank: int) -> Path:
        """Return the profiler's trace of a rank."""
        return self.folder / f"rank{rank}.pt.trace.json.gz"

    def truth(self, rank: int) -> Path:
        """Return what a rank itself wrote down."""
        return self.folder / f"truth{rank}.json"

    def log(self, rank: int) -> Path:
        """Return what a rank printed."""
        return self.folder / f"rank{rank}.log"

    def failure(self, rank: int) -> Path:
        """Return where a rank notes when it failed."""
        return self.folder / f".debubble-demo.failed{rank}"

    def failed_at(self, rank: int) -> int:
        """Return when a rank noted that it failed, in nanoseconds; 0 where it could not."""
        note = self.failure(rank)
        return int(note.read_text()) if note.exists() else 0

    @contextmanager
    def replacing(self, file: Path) -> Iterator[Path]:
        """Give a name beside the file to write to; rename it when all is written."""
        partial = self.folder / f".debubble-demo.{file.name}"
        yield partial
        partial.replace(file)

    def write(self, file: Path, content: bytes) -> None:
        """Write a file so that nobody ever sees half of it."""
        with self.replacing(file) as partial:
            partial.write_bytes(content)

    def count_step(self) -> None:
        """Note that one more step ended."""
        with self.counter.open("ab") as counter:
            counter.write(b".")

    def steps_done(self) -> int:
        """Return how many steps have ended."""
        return self.counter.stat().st_size if self.counter.exists() else 0

    def remove(self, *groups: tuple[str, ...]) -> None:
        """Remove the run's own files of these groups; others in the folder stay."""
        for group in groups:
            for pattern in group:
                for file in self.folder.glob(pattern):
                    file.unlink(missing_ok=True)


def run_workload(
    workload: Workload,
    out: Path,
    *,
    timeout_s: float = 120,
    on_progress: Callable[[int, int], None] | None = None,
    force: bool = False,
) -> tuple[Path, ...]:
    """Run a workload on this machine and return its traces, one for each rank.

    `on_progress` is told how many steps have ended, and of how many. When a rank fails or the
    time runs out, all of them are killed; their logs stay in the folder.
    """
    if importlib.util.find_spec("torch") is None:
        raise MissingExtra(
            "the demo runs a real pipeline, which needs torch", hint="pip install 'debubble[torch]'"
        )
    files = _prepare(out, force=force)
    files.write(files.workload, encode_workload(workload))
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(workload.world):
            processes.append(_start(files, rank))  # noqa: PERF401  (each is known once started)
        deadline_s = time.monotonic() + timeout_s
        while _running(processes, files):
            if on_progress is not None:
                on_progress(files.steps_done(), workload.all_steps)
            _refuse_after(deadline_s, timeout_s, files)
            time.sleep(POLL_S)
    except BaseException:
        _kill(processes)
        # What a broken run wrote must not be taken for a run; its logs say why it broke.
        files.remove(RESULTS, SCRATCH)
        raise
    files.remove(LOGS, SCRATCH)
    return tuple(files.trace(rank) for rank in range(workload.world))


def _prepare(out: Path, *, force: bool) -> RunFiles:
    """Return an empty folder; with `force`, one that an earlier run was cleared out of."""
    files = RunFiles(folder=out.resolve())
    if out.exists() and not out.is_dir():
        raise UsageError(f"{out} is a file", hint="give the name of a folder")
    if not force and out.exists() and any(out.iterdir()):
        raise UsageError(
            f"{out} is not empty", hint="give another folder, or --force to replace an earlier run"
        )
    out.mkdir(parents=True, exist_ok=True)
    files.remove(RESULTS, LOGS, SCRATCH)
    return files


def _start(files: RunFiles, rank: int) -> subprocess.Popen[bytes]:
    """Start one rank in a process group of its own, which can be killed as a whole."""
    # -P: a folder called torch where the user stands must not be taken for torch.
    command = [
        sys.executable,
        "-P",
        "-m",
        "debubble.annexes.demo.rank",
        str(files.folder),
        str(rank),
    ]
    settings = {"GLOO_SOCKET_IFNAME": LOOPBACK, "OMP_NUM_THREADS": "1"}
    with files.log(rank).open("wb") as log:
        return subprocess.Popen(  # noqa: S603  (our own module, no shell)
            command,
            env=os.environ | settings,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _running(processes: list[subprocess.Popen[bytes]], files: RunFiles) -> bool:
    """Say whether any rank still runs; raise for the first that failed."""
    codes = [process.poll() for process in processes]
    failed = [rank for rank, code in enumerate(codes) if code]
    if not failed:
        return None in codes
    # A rank that could not say when was killed from outside: its peers only followed.
    rank = min(failed, key=files.failed_at)
    code, log = codes[rank] or 0, files.log(rank)
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    raise DemoError(
        "\n".join([f"the process ended with {how}", *lines[-LOG_TAIL_LINES:]]),
        rank=rank,
        hint=f"its whole output is in {log}",
    )


def _refuse_after(deadline_s: float, timeout_s: float, files: RunFiles) -> None:
    if time.monotonic() > deadline_s:
        raise DemoError(
            f"the pipeline is not through after {timeout_s:g} s; {files.steps_done()} steps ended",
            hint="give it more time, or fewer or shorter layers",
        )


def _kill(processes: list[subprocess.Popen[bytes]]) -> None:
    """End every rank that still runs, with whatever it started, and wait for it."""
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    for process in processes:
        process.wait()
