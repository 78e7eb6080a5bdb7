"""What `debubble.step()` costs a loop between captures: `python benchmarks/capture.py`.

Steps of a real optimizer loop, with an open capture that waits and without one, in turns of one
run, by the processor time of this process, which neighbours do not add to. Prints the median ratio
and its 95 % interval; the bar is 0.5 %.
"""

from __future__ import annotations

import json
import platform
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch

import debubble

Step = Callable[[], None]

TURNS = 600
STEPS = 20
SETTLING = 5
WIDTH = 64
BAR = 0.005
NEVER = 10**9


def make_step() -> Step:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batch = torch.randn(32, WIDTH)

    def step() -> None:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def timed(step: Step, out: Path | None) -> float:
    """Return the processor seconds of a few steps; a capture, if any, waits all the time.

    Both ways begin with steps that are not timed: opening a capture touches files, and whatever
    comes next finds the caches cold.
    """
    with nullcontext() if out is None else debubble.capture(out=out, wait=NEVER):
        for _ in range(SETTLING):
            step()
        if out is None:
            began = time.process_time()
            for _ in range(STEPS):
                step()
            return time.process_time() - began
        began = time.process_time()
        for _ in range(STEPS):
            step()
            debubble.step()
        return time.process_time() - began


def overhead(step: Step, turns: int) -> dict[str, float]:
    """Measure both ways in turns, each first as often as the other."""
    ratios = []
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(turns):
            ways = [None, Path(folder)]
            times = {way: timed(step, way) for way in (ways if turn % 2 else reversed(ways))}
            ratios.append(times[ways[1]] / times[None] - 1)
    rng = np.random.default_rng(0)
    medians = np.median(rng.choice(ratios, (2000, len(ratios))), axis=1)
    low, high = np.percentile(medians, [2.5, 97.5])
    return {"overhead": float(np.median(ratios)), "low": float(low), "high": float(high)}


def alone() -> float:
    """Return the nanoseconds of one `debubble.step()` between captures."""
    count = 200_000
    with tempfile.TemporaryDirectory() as folder, debubble.capture(out=folder, wait=NEVER):
        began = time.process_time_ns()
        for _ in range(count):
            debubble.step()
        return (time.process_time_ns() - began) / count


def main() -> None:
    torch.set_num_threads(1)
    step = make_step()
    timed(step, None)
    found = overhead(step, TURNS)
    step_ms = 1000 * min(timed(step, None) for _ in range(20)) / STEPS
    found |= {"step_ms": step_ms, "step_call_ns": alone(), "bar": BAR}
    found["share_of_step"] = found["step_call_ns"] / (1e6 * step_ms)
    print(json.dumps({"machine": platform.processor() or platform.machine(), **found}, indent=2))
    if found["high"] <= BAR:
        print("within the bar")
    else:
        print("OVER THE BAR" if found["low"] > BAR else "not resolved: the interval holds the bar")


if __name__ == "__main__":
    main()
