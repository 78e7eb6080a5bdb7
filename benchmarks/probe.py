"""How well a probe of one process tells what four ranks take: real runs here, and recorded ones.

The demo's layers are timed by themselves, in one process with as many threads as a rank has; a link
is measured between two. Pipelines simulated from that alone are held against the same ones run for
real, four ranks over gloo: the median window of unprofiled steps. Bar: within 10 %.

    python benchmarks/probe.py                 # here
    python benchmarks/probe.py --starts        # a quarter of an H200 on two days, runs of each
    python benchmarks/probe.py --recorded DATA # the same probes, and runs of other days
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from debubble.annexes.probe.measured import Probe
from debubble.annexes.probe.pipeline import Pipelines, Setting, Wire, read_probe
from debubble.links.live import read_measured, run_here

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.jobs.recorded_pipeline import Workload, read_truth, run_several

BAR = 0.10
PROBES = Path(__file__).parents[1] / "tests" / "data" / "probe"
USUAL = Workload(steps=1, warmup=5)
TINY = Workload(
    ranks=2, layers=(1, 1), microbatches=2, forward_ms=1, backward_ms=2, steps=1, warmup=2
)
HERE = (
    {},
    {"schedule": "gpipe"},
    {"layers": (7, 3, 3, 3)},
    {"microbatches": 16},
    {"schedule": "zbv", "layers": (2,) * 8},
)


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """A recorded run, and the probe that has its dimensions."""

    probe: str
    name: str
    tokens: int
    microbatches: int
    schedule: str = "1f1b"
    split: tuple[int, ...] = (4, 4, 4, 4)
    ms: float | None = None
    """What it took, where the recordings' notes alone have it."""


RECORDED = (
    Recorded(probe="d4096", name="h200/1f1b_m8", tokens=1024, microbatches=8),
    Recorded(
        probe="d4096",
        name="h200/1f1b_m8_split3337",
        tokens=1024,
        microbatches=8,
        split=(3, 3, 3, 7),
    ),
    Recorded(probe="d4096", name="h200/gpipe_m8", tokens=1024, microbatches=8, schedule="gpipe"),
    Recorded(
        probe="d4096",
        name="h200/zbv_m8",
        tokens=1024,
        microbatches=8,
        schedule="zbv",
        split=(2,) * 8,
    ),
    *(
        Recorded(
            probe="d4096",
            name=f"h200/{name}",
            tokens=tokens,
            microbatches=count,
            schedule="forward-only",
        )
        for name, tokens, count in (
            ("fwd_closed_m4", 1024, 4),
            ("fwd_closed_m8", 1024, 8),
            ("fwd_closed_m8_t512", 512, 8),
        )
    ),
    Recorded(
        probe="d4096",
        name="h200_free/c_fwd_m6",
        tokens=768,
        microbatches=6,
        schedule="forward-only",
    ),
    Recorded(
        probe="d4096",
        name="h200_free/c_fwd_m6_7333",
        tokens=768,
        microbatches=6,
        schedule="forward-only",
        split=(7, 3, 3, 3),
    ),
    Recorded(probe="d3072", name="h200_free/a_1f1b_m8", tokens=1536, microbatches=8),
    Recorded(
        probe="d3072",
        name="h200_free/a_i1f1b_m8",
        tokens=1536,
        microbatches=8,
        schedule="interleaved-1f1b",
        split=(2,) * 8,
    ),
    Recorded(probe="d3072", name="as a_1f1b_m8, m 20", tokens=1536, microbatches=20, ms=579),
    Recorded(probe="d3072", name="as a_1f1b_m8, m 32", tokens=1536, microbatches=32, ms=898),
    Recorded(
        probe="d3072",
        name="as a_1f1b_m8, 6,4,3,3",
        tokens=1536,
        microbatches=8,
        ms=276,
        split=(6, 4, 3, 3),
    ),
    Recorded(
        probe="d3072",
        name="as a_1f1b_m8, GPipe",
        tokens=1536,
        microbatches=8,
        ms=272,
        schedule="gpipe",
    ),
    Recorded(probe="d3072", name="as a_1f1b_m8, m 16 of 768", tokens=768, microbatches=16, ms=267),
    Recorded(
        probe="d3072",
        name="as a_1f1b_m8, ZBV",
        tokens=1536,
        microbatches=8,
        ms=248,
        schedule="zbv",
        split=(2,) * 8,
    ),
)


def build() -> tuple[list[Any], Callable[[int], Any]]:
    """Return the demo's layers, and its microbatches: what the probe is given."""
    return _layers_of(USUAL)


def build_tiny() -> tuple[list[Any], Callable[[int], Any]]:
    """Return the layers of a moment's work."""
    return _layers_of(TINY)


def _layers_of(workload: Workload) -> tuple[list[Any], Callable[[int], Any]]:
    import torch  # noqa: PLC0415 (only where layers are built)

    from debubble.annexes.demo.layers import TimedLayer  # noqa: PLC0415

    layers = [TimedLayer(workload, layer) for layer in range(sum(workload.layers))]
    return layers, lambda tokens: torch.randn(1, tokens, workload.width)


def time_layers(name: str, workload: Workload, folder: Path) -> Probe:
    """Probe the demo's layers in a process of their own."""
    out = folder / "probe.json"
    words = [sys.executable, "-m", "debubble.annexes.probe.device", f"{__file__}:{name}"]
    words += ["--tokens", f"{workload.tokens},{2 * workload.tokens}", "--out", str(out)]
    on_one_core = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run(words, check=True, capture_output=True, env=on_one_core)
    return read_probe(str(out))


def measure_wire(folder: Path) -> Wire:
    """Measure a link of this machine, by its shortest and its longest message."""
    out = folder / "links.json"
    words = ["--largest", "1MiB", "--backend", "gloo"]
    run_here(2, words, out, on_progress=lambda _done, _total: None)
    rungs = read_measured(json.loads(out.read_text("utf-8")), str(out)).rungs
    small, large = (
        (size, median(rung.one_way.median_s for rung in rungs if rung.size_bytes == size))
        for pick in (min, max)
        for size in [pick(rung.size_bytes for rung in rungs)]
    )
    return Wire(
        latency_s=small[1], bytes_per_s=(large[0] - small[0]) / max(large[1] - small[1], 1e-9)
    )


def window_s(workload: Workload, folder: Path) -> float:
    """Run a pipeline for real; return its median window, of steps without a profiler."""
    run_several({folder.name: workload}, folder.parent)
    truths = [read_truth(folder / f"truth{rank}.json") for rank in range(workload.world)]
    windows = []
    for number, step in enumerate(truths[0].steps):
        if step.phase == "unprofiled" and number:  # the first infers shapes
            passes = [one for truth in truths for one in truth.steps[number].passes]
            begin, end = min(one.start_ns for one in passes), max(one.end_ns for one in passes)
            windows.append((end - begin) / 1e9)
    return median(windows)


def run_here_for_real(*, tiny: bool) -> Iterator[tuple[str, float, float]]:
    """Yield pipelines of this machine: their name, what was simulated and what was measured."""
    usual, name = (TINY, "build_tiny") if tiny else (USUAL, "build")
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        wire = measure_wire(folder)
        before = time_layers(name, usual, folder)
        for number, changed in enumerate(HERE[:1] if tiny else HERE):
            workload = replace(usual, **changed)
            measured = window_s(workload, folder / str(number))
            # What else the machine does then falls on both alike.
            after = before if tiny else time_layers(name, usual, folder)
            setting = Setting(
                stages=workload.ranks,
                microbatches=workload.microbatches,
                tokens=workload.tokens,
                schedule=workload.schedule,
                split=workload.layers,
            )
            said = median(
                Pipelines(probe=probe, wire=wire).simulate(setting).part.batch_latency_s
                for probe in (before, after)
            )
            words = f"{workload.schedule}, m {workload.microbatches}, {workload.layers}"
            yield words, said, measured
            before = after


def probes() -> dict[str, Probe]:
    """Return probes of a quarter of an H200, copies at work beside, by the width of the model."""
    return {
        name: read_probe(str(PROBES / f"h200_quarter_{name}.json"))
        for name in ("d3072", "d4096", "d4096_later")
    }


def simulate(probe: Probe, run: Recorded) -> float:
    """Return what a pipeline of four ranks would take, from its probe alone."""
    setting = Setting(
        stages=4,
        microbatches=run.microbatches,
        tokens=run.tokens,
        schedule=run.schedule,
        split=run.split,
    )
    probe = replace(probe, trains=run.schedule != "forward-only")
    return Pipelines(probe=probe).simulate(setting).part.batch_latency_s


def against_starts(*starts: str) -> Iterator[tuple[str, float, float]]:
    """Yield runs of the machine's start that the probes are of, or of another on their day."""
    found = probes()
    rows = json.loads((PROBES / "h200_quarter_runs.json").read_text("utf-8"))
    for start in starts:
        for row in rows[start]:
            run = Recorded(**{**row, "split": tuple(row["split"])})
            name = f"{run.name}, {start.replace('_', ' ')}"
            yield name, simulate(found[run.probe], run), row["ms"] / 1e3


def against_recorded(data: Path) -> Iterator[tuple[str, float, float]]:
    """Yield runs of other days: their name, what was simulated and what was measured."""
    found = probes()
    for run in RECORDED:
        measured = None if run.ms is None else run.ms / 1e3
        if measured is None:
            truth = json.loads((data / run.name / "truth0.json").read_text("utf-8"))
            measured = median(truth["wall_s"])
        yield run.name, simulate(found[run.probe], run), measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="a moment's work: does it still run?")
    parser.add_argument("--recorded", type=Path, metavar="DATA")
    parser.add_argument("--starts", action="store_true")
    told = parser.parse_args()
    if told.recorded:
        found = against_recorded(told.recorded)
    else:
        found = (
            against_starts("same_start", "other_start", "later_day")
            if told.starts
            else run_here_for_real(tiny=told.tiny)
        )
    errors = []
    for name, said, measured in found:
        errors.append(said / measured - 1)
        print(f"{name:44} {1e3 * said:7.1f} ms, measured {1e3 * measured:7.1f}: {errors[-1]:+.1%}")
    worst, middle = max(map(abs, errors)), median(map(abs, errors))
    inside = sum(abs(error) <= BAR for error in errors)
    print(
        f"{len(errors)} runs: {inside} within {BAR:.0%},"
        f" {middle:.1%} in the middle, {worst:.1%} at worst"
    )
    sys.exit(not told.tiny and worst > BAR)


if __name__ == "__main__":
    main()
