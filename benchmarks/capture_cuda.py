"""What a capture costs on CUDA: `python benchmarks/capture_cuda.py`, torch and stdlib alone.

A decode-like loop of small kernels and a prefill-like loop of large ones, each plain, with a
waiting capture, and under the profiler with and without shapes; in turns. Prints one JSON object.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import torch
from torch.profiler import ProfilerActivity, profile

import debubble

Step = Callable[[], None]

TURNS = 12
STEPS = 20
REST_S = 0.1
NEVER = 10**9
WIDTH, LAYERS = 2048, 12
LOADS = {"decode": 8, "prefill": 16384}
"""Rows of a batch."""


def make_step(rows: int) -> Step:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(WIDTH, WIDTH, device="cuda", dtype=torch.bfloat16)]
    layers += [
        torch.nn.Linear(WIDTH, WIDTH, device="cuda", dtype=torch.bfloat16)
        for _ in range(LAYERS - 1)
    ]
    batch = torch.randn(rows, WIDTH, device="cuda", dtype=torch.bfloat16)

    @torch.inference_mode()
    def step() -> None:
        x = batch
        for layer in layers:
            x = torch.relu(layer(x))

    return step


def timed(step: Step, after: Step = lambda: None) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(STEPS):
        step()
        after()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / STEPS


def waiting(step: Step) -> float:
    with tempfile.TemporaryDirectory() as folder, debubble.capture(out=folder, wait=NEVER):
        return timed(step, debubble.step)


def profiled(step: Step, *, shapes: bool) -> float:
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=activities, record_shapes=shapes, profile_memory=True):
        step()
        return timed(step)


WAYS = {
    "plain": timed,
    "waiting": waiting,
    "profiled": lambda step: profiled(step, shapes=False),
    "profiled_with_shapes": lambda step: profiled(step, shapes=True),
}


def captured(step: Step) -> dict[str, float | None]:
    """Take one real capture and return what its own sidecar says it cost."""
    with tempfile.TemporaryDirectory() as folder:
        with debubble.capture(out=folder, steps=6, wait=2):
            for _ in range(24):
                step()
                debubble.step()
        (sidecar,) = Path(folder).glob("*/rank0.debubble.json")
        return json.loads(sidecar.read_text())["steps"]


def main() -> None:
    order = random.Random(0)  # noqa: S311 (an order, no secret)
    answer = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    for name, rows in LOADS.items():
        step = make_step(rows)
        for way in WAYS.values():  # the first start of the profiler takes seconds
            way(step)
        times: dict[str, list[float]] = {way: [] for way in WAYS}
        for _ in range(TURNS):
            # Whoever comes after a rest finds a cooler device, so all rest, and none comes always
            # after the same.
            for way in order.sample(list(WAYS), len(WAYS)):
                time.sleep(REST_S)
                times[way].append(WAYS[way](step))
        overhead = {
            way: statistics.median(
                mine / plain - 1 for mine, plain in zip(taken, times["plain"], strict=True)
            )
            for way, taken in times.items()
            if way != "plain"
        }
        said = captured(step)
        answer[name] = {
            "plain_ms": 1000 * statistics.median(times["plain"]),
            "overhead": overhead,
            "sidecar_overhead": said["overhead_fraction"],
        }
    answer["beside_torch"] = sorted({"msgspec", "click", "rich", "fsspec"} & set(sys.modules))
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
