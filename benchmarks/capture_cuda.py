"""What a capture costs on CUDA: `python benchmarks/capture_cuda.py`, torch and stdlib alone.

A decode-like loop of small kernels and a prefill-like loop of large ones, each plain, with a
waiting capture, and under the profiler with and without shapes; in turns. Prints one JSON object.
"""

from __future__ import annotations

import argparse
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
HAS_CUDA = torch.cuda.is_available()


def make_step(rows: int, width: int) -> Step:
    torch.manual_seed(0)
    how = {"device": "cuda" if HAS_CUDA else "cpu", "dtype": torch.bfloat16}
    layers = [torch.nn.Linear(width, width, **how) for _ in range(LAYERS)]
    batch = torch.randn(rows, width, **how)

    @torch.inference_mode()
    def step() -> None:
        x = batch
        for layer in layers:
            x = torch.relu(layer(x))

    return step


def synchronize() -> None:
    if HAS_CUDA:
        torch.cuda.synchronize()


def timed(step: Step, after: Step = lambda: None) -> float:
    synchronize()
    began = time.perf_counter()
    for _ in range(STEPS):
        step()
        after()
    synchronize()
    return (time.perf_counter() - began) / STEPS


def waiting(step: Step) -> float:
    with tempfile.TemporaryDirectory() as folder, debubble.capture(out=folder, wait=NEVER):
        return timed(step, debubble.step)


def profiled(step: Step, *, shapes: bool) -> float:
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if HAS_CUDA else [])]
    with profile(activities=activities, record_shapes=shapes, profile_memory=True):
        step()
        return timed(step)


WAYS = {
    "plain": timed,
    "waiting": waiting,
    "profiled": lambda step: profiled(step, shapes=False),
    "profiled_with_shapes": lambda step: profiled(step, shapes=True),
}


def captured(step: Step) -> float:
    """Take one real capture and return what it cost by the steps of its own sidecar."""
    with tempfile.TemporaryDirectory() as folder:
        with debubble.capture(out=folder, steps=6, wait=2):
            for _ in range(24):
                step()
                debubble.step()
        (sidecar,) = Path(folder).glob("*/rank0.debubble.json")
        steps = json.loads(sidecar.read_text())["steps"]
        unprofiled = statistics.median(steps["before_s"] + steps["after_s"])
        return statistics.median(steps["profiled_s"]) / unprofiled - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--tiny", action="store_true", help="a moment's work, without CUDA: does it still run?"
    )
    tiny = parser.parse_args().tiny
    if not (HAS_CUDA or tiny):
        raise SystemExit("there is no CUDA here")
    order = random.Random(0)  # noqa: S311 (an order, no secret)
    device = torch.cuda.get_device_name() if HAS_CUDA else "no CUDA: these figures mean nothing"
    answer = {"device": device, "torch": torch.__version__}
    for name, rows in {"tiny": 2}.items() if tiny else LOADS.items():
        step = make_step(rows, width=16 if tiny else WIDTH)
        for way in WAYS.values():  # the first start of the profiler takes seconds
            way(step)
        times: dict[str, list[float]] = {way: [] for way in WAYS}
        for _ in range(1 if tiny else TURNS):
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
        answer[name] = {
            "plain_ms": 1000 * statistics.median(times["plain"]),
            "overhead": overhead,
            "sidecar_overhead": captured(step),
        }
    answer["beside_torch"] = sorted({"msgspec", "click", "rich", "fsspec"} & set(sys.modules))
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
