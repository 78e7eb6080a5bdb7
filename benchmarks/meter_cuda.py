"""The meter on CUDA: `python benchmarks/meter_cuda.py --out OUT`, torch and stdlib alone.

A pipeline of torch.distributed.pipelining. By default it has one rank, in steps of some 250, 50
and 10 ms; `--ranks 4 --one-gpu --load long` has four on one GPU (MPS, NCCL over loopback, a test
rig).

on and off   blocks of steps with the meter and without, in turns: what a step takes, and the
             processor time of its host, and of the job's thread alone
together     with several ranks, a few steps under the meter and torch's profiler at once:
             OUT/LOAD/traces and OUT/LOAD/meter, held together by `benchmarks/meter.py --held`

Prints one JSON object a load, of rank 0.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import torch
import torch.distributed as dist
from torch.distributed import pipelining
from torch.profiler import ProfilerActivity, profile, schedule

import debubble

LOADS = {
    # One rank alone: no message's jitter is in the way of a thousandth. The last block is without
    # the meter, as the first is: each block with it stands between two without.
    "alone": {"width": 4096, "tokens": 6144, "layers": 4, "blocks": 29, "settle": 2, "steps": 5},
    "alone-middle": {
        "width": 4096,
        "tokens": 1280,
        "layers": 4,
        "blocks": 17,
        "settle": 4,
        "steps": 8,
    },
    "alone-short": {
        "width": 1024,
        "tokens": 512,
        "layers": 2,
        "blocks": 21,
        "settle": 20,
        "steps": 60,
    },
    # Four ranks on one GPU.
    "long": {"width": 4096, "tokens": 768, "layers": 4, "blocks": 13, "settle": 2, "steps": 5},
    "short": {"width": 1024, "tokens": 128, "layers": 1, "blocks": 21, "settle": 20, "steps": 40},
    "tiny": {"width": 32, "tokens": 16, "layers": 1, "blocks": 5, "settle": 1, "steps": 3},
}
MICROBATCHES, PROFILED, SETTLING = 8, 4, 1
HAS_CUDA = torch.cuda.is_available()


class Block(torch.nn.Module):
    """A feed-forward block."""

    def __init__(self, width: int, kind: torch.dtype) -> None:
        super().__init__()
        self.up = torch.nn.Linear(width, 4 * width, bias=False, dtype=kind)
        self.down = torch.nn.Linear(4 * width, width, bias=False, dtype=kind)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add what the block makes of its input."""
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


class Job:
    """One rank of the pipeline."""

    def __init__(self, load: dict[str, int], rank: int, world: int) -> None:
        kind = torch.bfloat16 if HAS_CUDA else torch.float32
        device = torch.device("cuda", torch.cuda.current_device()) if HAS_CUDA else "cpu"
        self.device = torch.device(device)
        blocks = [Block(load["width"], kind) for _ in range(load["layers"])]
        model = torch.nn.Sequential(*blocks).to(self.device)
        self.rank, self.last = rank, rank == world - 1
        stage = pipelining.PipelineStage(model, rank, world, self.device)
        self.schedule = pipelining.Schedule1F1B(
            stage,
            MICROBATCHES,
            loss_fn=lambda out, want: (out.float() - want.float()).square().mean(),
        )
        self.model = model
        shape = MICROBATCHES * load["tokens"], load["width"]
        self.batch = torch.randn(shape, device=self.device, dtype=kind)

    def step(self) -> None:
        """Run one batch through the pipeline."""
        given = (self.batch,) if self.rank == 0 else ()
        wanted = {"target": self.batch} if self.last else {}
        self.schedule.step(*given, **wanted)
        self.model.zero_grad()


def settle() -> None:
    if HAS_CUDA:
        torch.cuda.synchronize()
    dist.barrier()


def on_and_off(job: Job, load: dict[str, int], out: Path) -> dict[str, object]:
    """Time blocks of steps with the meter and without, in turns."""
    wall: dict[bool, list[float]] = {True: [], False: []}
    host: dict[bool, list[float]] = {True: [], False: []}
    thread: dict[bool, list[float]] = {True: [], False: []}
    for block in range(load["blocks"]):
        metered = block % 2 == 1
        meter = debubble.meter(out=out / "overhead", on_drift=False) if metered else None
        # A meter's first steps make marks; a job that goes on uses them again.
        for _ in range(load["settle"]):
            job.step()
        settle()
        began, worked = time.perf_counter(), time.process_time()
        for _ in range(load["steps"]):
            alone = time.thread_time()
            job.step()
            thread[metered].append(time.thread_time() - alone)
        if HAS_CUDA:
            torch.cuda.synchronize()
        wall[metered].append((time.perf_counter() - began) / load["steps"])
        host[metered].append((time.process_time() - worked) / load["steps"])
        settle()
        if meter is not None:
            if meter.problem:
                raise RuntimeError(meter.problem)
            meter.close()
        settle()
    # Against the mean of the blocks before and after: a device that warms up drifts.
    around = [(before + after) / 2 for before, after in pairwise(wall[False])]
    apart = sorted(on / off - 1 for on, off in zip(wall[True], around, strict=True))
    middle = len(apart) // 2
    # The interval of a median by order statistics, about 95 %.
    half = max(1, round(len(apart) ** 0.5))
    return {
        "step_off_s": statistics.median(wall[False]),
        "step_on_s": statistics.median(wall[True]),
        "overhead_fraction": statistics.median(apart),
        "overhead_low": apart[max(0, middle - half)],
        "overhead_high": apart[min(len(apart) - 1, middle + half)],
        "host_off_s": statistics.median(host[False]),
        "host_on_s": statistics.median(host[True]),
        "thread_off_s": statistics.median(thread[False]),
        "thread_on_s": statistics.median(thread[True]),
        "pairs": [round(value, 6) for value in apart],
    }


def together(job: Job, out: Path) -> None:
    """Meter and profile the same steps."""
    meter = debubble.meter(out=out / "meter", segment=10**6, on_drift=False)
    for _ in range(SETTLING):
        job.step()
    settle()

    def export(profiler: profile) -> None:
        (out / "traces").mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(out / "traces" / f"rank{job.rank}.json.gz"))

    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if HAS_CUDA else [])]
    plan = schedule(wait=1, warmup=1, active=PROFILED, repeat=1)
    with profile(
        activities=kinds, record_shapes=True, schedule=plan, on_trace_ready=export
    ) as profiler:
        for _ in range(2 + PROFILED):
            job.step()
            if HAS_CUDA:
                torch.cuda.synchronize()
            profiler.step()
    for _ in range(SETTLING):
        job.step()
    settle()
    if meter.problem:
        raise RuntimeError(meter.problem)
    meter.close()
    (out / "steps.txt").write_text(f"{SETTLING + 2} {PROFILED}\n")


def work(names: list[str], out: Path, *, one_gpu: bool) -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    if HAS_CUDA:
        torch.cuda.set_device(0 if one_gpu else int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl", device_id=torch.device("cuda", torch.cuda.current_device()))
    else:
        dist.init_process_group("gloo")
    for name in names:
        load = LOADS[name]
        job = Job(load, rank, world)
        for _ in range(SETTLING):
            job.step()
        settle()
        found = on_and_off(job, load, out / name)
        if world > 1:
            together(job, out / name)
        if rank == 0:
            print(json.dumps({"load": name, **found}), flush=True)
        (out / name / f"overhead{rank}.json").write_text(json.dumps(found))
        settle()
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--load", action="append", choices=list(LOADS))
    parser.add_argument("--one-gpu", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="a moment's work, to see that it runs")
    told = parser.parse_args()
    if "RANK" in os.environ:
        work(told.load, told.out, one_gpu=told.one_gpu)
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        out = told.out or Path(scratch) / "out"
        names = ["tiny"] if told.tiny else told.load or ["alone", "alone-middle", "alone-short"]
        ranks = 2 if told.tiny else told.ranks
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        shared = told.one_gpu and HAS_CUDA
        if shared:
            environment |= {
                "NCCL_SOCKET_IFNAME": "lo",
                "NCCL_IB_DISABLE": "1",
                "CUDA_MPS_PIPE_DIRECTORY": f"{scratch}/mps",
                "CUDA_MPS_LOG_DIRECTORY": f"{scratch}/mps-log",
                "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(96 // ranks),
            }
            for folder in ("mps", "mps-log"):
                (Path(scratch) / folder).mkdir()
            subprocess.run(["nvidia-cuda-mps-control", "-d"], env=environment, check=True)  # noqa: S607
        words = [__file__, "--out", str(out), *(f"--load={name}" for name in names)]
        words += ["--one-gpu"] if told.one_gpu else []
        processes = []
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = os.environ.get("MASTER_PORT", str(free.getsockname()[1]))
        try:
            for rank in range(ranks):
                # A host name of its own lets NCCL accept several ranks on one device.
                place = {
                    **environment,
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(ranks),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": port,
                    **({"NCCL_HOSTID": f"stage{rank}"} if shared else {}),
                }
                processes.append(subprocess.Popen([sys.executable, *words], env=place))
            codes = [process.wait() for process in processes]
        finally:
            for process in processes:
                process.kill()
            if shared:
                subprocess.run(
                    ["nvidia-cuda-mps-control"],  # noqa: S607
                    input=b"quit\n",
                    env=environment,
                    check=False,
                    timeout=20,
                )
        return max(codes)


if __name__ == "__main__":
    sys.exit(main())
