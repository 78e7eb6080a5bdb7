"""Follow the advice: bad runs, the first line of `plan` applied as it is emitted, run for real.

Each case is a model of sixteen layers, cut and run badly. It is measured and profiled; `plan` reads
the traces; its first line, as `--emit torch` writes it, is run by the same program; so are a few
other changes, to see whether something else would have been better. Promised stands beside what was
measured.

    python benchmarks/follow.py [CASE...]     # all of them

Where there is a GPU the layers are real, all ranks share it, and NCCL talks over loopback (with
`SLOW_HOP` naming a library that paces what a rank receives, a slow link is one of the cases). Else
ranks are processes on gloo whose layers take a set time, asleep: half of a backward pass is its
weight gradient, but for the case whose layers learn nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from tempfile import mkdtemp

if "--rank" not in sys.argv:  # a rank needs torch alone
    from debubble.plan.baseline import measure_baseline
    from debubble.plan.change import Change, Setting
    from debubble.plan.emit import emit
    from debubble.plan.lever import Permissions
    from debubble.plan.plan import make_plan
    from debubble.report.answers.change import describe
    from debubble.timeline.build import build_run
    from debubble.timeline.figures import measure_pipeline
    from debubble.trace.run import find_run, read_run

RANKS, LAYERS = 4, 16
STEPS, ACTIVE = 12, 4
# With four ranks on two cores that others use as well, a sleeper wakes so late, and no later.
LATE_S = 0.001


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run, and what else might be tried on it."""

    name: str
    split: tuple[int, ...] = (4, 4, 4, 4)
    microbatches: int = 8
    schedule: str = "1f1b"
    chunks: int = 1
    head: int = 0
    """Width of a head behind the last layer; as many layers' worth where layers sleep."""
    slow_rank: int | None = None
    """What this rank receives is paced."""
    learns: bool = True
    """Layers have weights: else a backward pass is one input gradient, and cannot be cut."""
    others: tuple[dict, ...] = ()
    """Changes that are run as well."""


EVEN, ZBV = {"split": (4, 4, 4, 4)}, {"schedule": "zbv", "chunks": 2}
CASES = (
    Case(name="uneven split", split=(3, 3, 3, 7), others=(EVEN, ZBV)),
    Case(name="head", head=32000, others=({"split": (5, 5, 4, 2)}, {"split": (5, 4, 4, 3)}, ZBV)),
    Case(name="few microbatches", microbatches=4, others=(ZBV, {"schedule": "gpipe"})),
    Case(name="no weights", microbatches=4, learns=False, others=({"schedule": "zb-h1"},)),
    Case(name="slow hop", slow_rank=2, others=(ZBV, {"split": (4, 5, 3, 4)})),
    Case(
        name="interleaved",
        schedule="interleaved-1f1b",
        chunks=2,
        split=(2,) * 8,
        others=({"schedule": "1f1b", "chunks": 1}, ZBV),
    ),
)


# --- a rank: torch and the standard library alone ---


def run_rank(rank: int, job: dict) -> None:  # noqa: C901, PLR0915 (a whole program)
    """Build what the emitted code says, time steps without the profiler, then record some."""
    import torch  # noqa: PLC0415 (a rank's own)
    import torch.distributed as dist  # noqa: PLC0415
    from torch import nn  # noqa: PLC0415
    from torch.profiler import ProfilerActivity, profile, schedule  # noqa: PLC0415

    on_gpu = job["device"] == "cuda"
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(0)
        dist.init_process_group("nccl", device_id=device)
    else:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
    width, head = (4096, job["head"]) if on_gpu else (32, 0)
    number = torch.bfloat16 if on_gpu else torch.float32
    learns = job["learns"]
    rest, weigh = _sleeping_layer(learns=learns) if not on_gpu else (None, None)

    class Block(nn.Module):
        def __init__(self, times: float) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(width, dtype=number)
            if on_gpu:
                self.up = nn.Linear(width, 4 * width, bias=False, dtype=number)
                self.down = nn.Linear(4 * width, width, bias=False, dtype=number)
                self.up.requires_grad_(learns)
                self.down.requires_grad_(learns)
            elif learns:
                self.weight = nn.Parameter(torch.ones(width))
            self.times = times

        def forward(self, x):  # noqa: ANN001, ANN202
            if rest is not None:
                # In this order the input gradient comes before the weight gradient.
                weight = weigh(self.weight, self.times) if learns else None
                rested = rest(self.norm(x), self.times)
                return rested if weight is None else rested * weight
            return x + self.down(nn.functional.gelu(self.up(self.norm(x))))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            extra = 1 + 2 * bool(job["head"]) if not on_gpu else 1
            self.layers = nn.ModuleList(
                Block(extra if n == LAYERS - 1 else 1) for n in range(LAYERS)
            )
            if head:
                self.head = nn.Linear(width, head, bias=False, dtype=number)
                self.back = nn.Linear(head, width, bias=False, dtype=number)

        def forward(self, x):  # noqa: ANN001, ANN202
            for layer in self.layers:
                x = layer(x)
            return self.back(self.head(x)) if head else x

    tokens, count = job["tokens"], job["microbatches"]
    with torch.device("meta"):  # of the whole model a rank holds its stages alone
        model, example = Model(), torch.randn(tokens, width, dtype=number)
    names = {
        "model": model,
        "example": example,
        "device": device,
        "pp_rank": rank,
        "pp_group": dist.group.WORLD,
        "loss_fn": lambda out, target: (out.float() - target.float()).pow(2).mean(),
    }
    os.chdir(job["place"])
    exec(compile(job["code"], "emitted", "exec"), names)  # noqa: S102 (that is the point)
    ran, stages = names["schedule"], names["stages"]
    for stage in stages:
        stage.submod.to_empty(device=device)
        for weight in stage.submod.parameters():
            torch.nn.init.normal_(weight, std=0.02)
    batch = torch.randn(count * tokens, width, dtype=number, device=device)
    first = any(stage.is_first for stage in stages)
    last = any(stage.is_last for stage in stages)

    def step() -> None:
        ran.step(*((batch,) if first else ()), **({"target": batch} if last else {}))
        for stage in stages:
            stage.submod.zero_grad()

    def wait() -> None:
        if on_gpu:
            torch.cuda.synchronize()
        else:
            dist.barrier()

    for _ in range(3):
        step()
    walls = []
    for _ in range(STEPS):
        wait()
        begin = time.perf_counter()
        step()
        wait()
        walls.append(time.perf_counter() - begin)
    kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu
    out = Path(job["out"])
    with profile(
        activities=kinds,
        record_shapes=True,
        profile_memory=on_gpu,
        schedule=schedule(wait=1, warmup=1, active=ACTIVE, repeat=1),
        on_trace_ready=lambda done: done.export_chrome_trace(str(out / f"rank{rank}.json.gz")),
    ) as profiler:
        for _ in range(2 + ACTIVE):
            step()
            profiler.step()
    if rank == 0:
        (out / "walls.txt").write_text(json.dumps(walls))
    dist.barrier()
    dist.destroy_process_group()


def _sleeping_layer(*, learns: bool):  # noqa: ANN202 (functions of torch)
    """Return a layer that takes 4 ms forward and 8 backward, however busy the machine is.

    And its weight, whose gradient takes 4 of the 8: an operator of its own, for torch runs the
    whole backward of one twice where I and W are apart. As on a device, layers follow each other
    at once: what a host is late by, up to `LATE_S`, the next one sleeps less.
    """
    import torch  # noqa: PLC0415

    awake = [0.0]  # when the last layer should have been done

    def asleep(seconds: float):  # noqa: ANN202 (as torch wants it)
        def sleep(x, times):  # noqa: ANN001, ANN202
            if seconds:  # to sleep for no time at all hands the core to others
                now = time.perf_counter()
                begin = awake[0] if now - awake[0] < LATE_S else now
                awake[0] = begin + seconds * times
                time.sleep(max(awake[0] - now, 0.0))
            return x.clone()

        return sleep

    def operator(name: str, forward_s: float, backward_s: float):  # noqa: ANN202
        schema = "(Tensor x, float times) -> Tensor"
        make = torch.library.custom_op
        there = make(f"follow::{name}", asleep(forward_s), mutates_args=(), schema=schema)
        back = make(f"follow::{name}_back", asleep(backward_s), mutates_args=(), schema=schema)
        there.register_fake(lambda x, _: torch.empty_like(x))
        back.register_fake(lambda x, _: torch.empty_like(x))
        there.register_autograd(
            lambda context, gradient: (back(gradient, context.times), None),
            setup_context=lambda ctx, inputs, output: setattr(ctx, "times", inputs[1]),  # noqa: ARG005
        )
        return there

    return operator("rest", 0.004, 0.004 if learns else 0.008), operator("weight", 0.0, 0.004)


# --- the one who asks ---


@dataclass(frozen=True, kw_only=True)
class Ran:
    """What a run took."""

    folder: Path
    batch_ms: float
    microbatches_per_s: float
    """Counted in microbatches of the size of the case."""


def launch(job: dict, *, slow_rank: int | None) -> list[float]:
    """Run all ranks; return what steps took, in seconds."""
    place = Path(job["place"])
    (place / "job.json").write_text(json.dumps(job))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = []
    for rank in range(RANKS):
        own = {
            **os.environ,
            "RANK": str(rank),
            "WORLD_SIZE": str(RANKS),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "NCCL_HOSTID": f"stage{rank}",
            "NCCL_SOCKET_IFNAME": "lo",
            "NCCL_IB_DISABLE": "1",
            "NCCL_SOCKET_NTHREADS": "4",
            "NCCL_NSOCKS_PERTHREAD": "4",
            "OMP_NUM_THREADS": "2",
            "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(96 // RANKS),
        }
        if rank == slow_rank and "SLOW_HOP" in os.environ:
            own["LD_PRELOAD"] = os.environ["SLOW_HOP"]
        command = [sys.executable, __file__, "--rank", str(rank), "--job", str(place / "job.json")]
        log = (place / f"rank{rank}.log").open("w")
        processes.append(subprocess.Popen(command, env=own, stdout=log, stderr=log))
    codes = [process.wait(timeout=180) for process in processes]
    if any(codes):
        said = (place / f"rank{codes.index(max(codes, key=abs))}.log").read_text()
        raise SystemExit(f"a rank failed:\n{said[-2000:]}")
    return json.loads((Path(job["out"]) / "walls.txt").read_text())


def run_changed(case: Case, change, setting, place: Path, *, device: str, healthy: bool = False):  # noqa: ANN001, ANN201, PLR0913
    """Run a case with a change, as emitted."""
    place.mkdir(parents=True)
    whole, code = code_of(case, change, setting)
    if setting.order_file in code:
        order = replace(whole, split=None)
        (place / setting.order_file).write_text(emit("csv", order, setting))
    usual = 1024 if device == "cuda" else 64
    shrinks = change.hold == "batch" and change.microbatches
    tokens = usual * case.microbatches // change.microbatches if shrinks else usual
    out = place / "traces"
    out.mkdir()
    job = {
        "code": code,
        "device": device,
        "head": case.head,
        "learns": case.learns,
        "tokens": tokens,
        "microbatches": whole.microbatches,
        "place": str(place),
        "out": str(out),
    }
    walls = launch(job, slow_rank=None if healthy else case.slow_rank)
    batch = median(walls)
    work = whole.microbatches * tokens / usual
    return Ran(folder=out, batch_ms=batch * 1e3, microbatches_per_s=work / batch)


def code_of(case: Case, change: Change, setting: Setting) -> tuple[Change, str]:
    """Return a change with all that stays said as well, and what torch is told of it."""
    whole = replace(
        change,
        split=change.split or _spread(case, change),
        microbatches=change.microbatches or case.microbatches,
        schedule=change.schedule or case.schedule,
        chunks=change.chunks or (case.chunks if change.schedule is None else 1),
        repaired=None,
    )
    return whole, emit("torch", whole, setting)


def setting_of(case: Case) -> Setting:
    """Return what emitters need to know of a case."""
    return Setting(
        ranks=RANKS,
        layers=LAYERS,
        microbatches=case.microbatches,
        schedule=case.schedule,
        chunks=case.chunks,
        data_parallel=1,
    )


def _spread(case: Case, change) -> tuple[int, ...]:  # noqa: ANN001
    """Return the split in use, or an even one where the stages are others."""
    stages = RANKS * (change.chunks or 1) if change.schedule else len(case.split)
    return case.split if stages == len(case.split) else (LAYERS // stages,) * stages


def follow(case: Case, root: Path, *, device: str) -> dict:
    """Run a case, take the first line of its plan, run that, and some others."""
    setting = setting_of(case)
    now = run_changed(case, Change(), setting, root / "now", device=device)
    timeline = build_run(read_run(find_run([str(now.folder)])))
    figures = measure_pipeline(timeline, 0)
    baseline = measure_baseline(timeline, figures, layers=case.split)
    plan = make_plan(baseline, timeline, allowed=Permissions(framework="torch"))
    best = plan.best
    said = {"case": case.name, "now_ms": now.batch_ms, "misfit": baseline.misfit}
    if best is None:
        return said | {"first": None}
    healthy = bool(best.change.repaired)
    then = run_changed(case, best.change, setting, root / "then", device=device, healthy=healthy)
    again = run_changed(case, Change(), setting, root / "again", device=device)
    usual = (now.microbatches_per_s + again.microbatches_per_s) / 2
    tried = {}
    for number, other in enumerate(case.others):
        ran = run_changed(case, Change(**other), setting, root / f"other{number}", device=device)
        tried[describe(Change(**other))] = ran.microbatches_per_s / usual - 1
    return said | {
        "again_ms": again.batch_ms,
        "first": describe(best.change),
        "promised": best.throughput_gain,
        "low": best.throughput_low,
        "high": best.throughput_high,
        "measured": then.microbatches_per_s / usual - 1,
        "others": tried,
    }


def show(found: dict) -> None:
    """Print one case."""
    if found["first"] is None:
        print(f"{found['case']:18} {found['now_ms']:6.1f} ms: nothing is recommended")
        return
    inside = found["low"] <= found["measured"] <= found["high"]
    verdict = ("inside" if inside else "outside") + (
        ", gains" if found["measured"] > 0 else ", LOSES"
    )
    print(
        f"{found['case']:18} {found['now_ms']:6.1f} and {found['again_ms']:6.1f} ms:"
        f" {found['first']}\n{'':18} promised {found['promised']:+.0%}"
        f" ({found['low']:+.0%} to {found['high']:+.0%}),"
        f" measured {found['measured']:+.0%}: {verdict}"
    )
    for change, gain in found["others"].items():
        print(f"{'':18} besides: {change} {gain:+.0%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--job", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help="a folder for what was found, and the traces")
    parser.add_argument("--seconds", type=float, help="begin no case later than this")
    parser.add_argument("--alone", action="store_true", help="run no other changes beside it")
    parser.add_argument("--tiny", action="store_true", help="a moment's work: does it still run?")
    given = parser.parse_args()
    if given.rank is not None:
        run_rank(given.rank, json.loads(given.job.read_text()))
        return
    if given.tiny:
        for case in CASES:
            code = code_of(case, Change(), setting_of(case))[1]
            compile(code, case.name, "exec")
            print(f"{case.name:18} {len(code.splitlines())} lines")
        return
    import torch  # noqa: PLC0415 (a rank imports it by itself)

    device = "cuda" if torch.cuda.is_available() else "cpu"
    root = given.out or Path(mkdtemp(prefix="follow-"))
    begin, found = time.monotonic(), []
    for case in CASES:
        if given.cases and case.name not in given.cases:
            continue
        if case.slow_rank is not None and "SLOW_HOP" not in os.environ:
            print(f"{case.name:18} not run: SLOW_HOP names no library that paces a hop")
            continue
        if given.seconds and time.monotonic() - begin > given.seconds:
            print(f"{case.name:18} not run: out of time")
            continue
        asked = replace(case, others=()) if given.alone else case
        found.append(follow(asked, root / case.name.replace(" ", "-"), device=device))
        show(found[-1])
        (root / "found.json").write_text(json.dumps(found, indent=1))
    followed = [one for one in found if one["first"]]
    gained = sum(one["measured"] > 0 for one in followed)
    inside = sum(one["low"] <= one["measured"] <= one["high"] for one in followed)
    print(f"{gained} of {len(followed)} gain, {inside} inside the interval")


if __name__ == "__main__":
    main()
