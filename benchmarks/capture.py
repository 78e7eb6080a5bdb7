"""What `debubble.step()` costs a loop between captures: `python benchmarks/capture.py`.

Steps of a real optimizer loop inside an open capture that waits; each is told to it or not, at
random, and timed by the processor time of this process, which neighbours do not add to. Prints the
ratio of the medians and its 95 % interval; the bar is 0.5 %.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
import time
from collections.abc import Callable

import numpy as np
import torch

import debubble

Step = Callable[[], None]

STEPS = 10_000
SETTLING = 200
CALLS = 200_000
WIDTH = 512
BAR = 0.005
NEVER = 10**9


def make_step() -> Step:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batch = torch.randn(64, WIDTH)

    def step() -> None:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def overhead(step: Step, steps: int = STEPS, settling: int = SETTLING) -> dict[str, float]:
    """Time steps that are told and steps that are not, mixed."""
    rng = np.random.default_rng(0)
    told = rng.random(settling + steps) < 0.5
    times = np.zeros(len(told))
    clock = time.process_time_ns
    with tempfile.TemporaryDirectory() as folder, debubble.capture(out=folder, wait=NEVER):
        for number, tells in enumerate(told.tolist()):
            began = clock()
            step()
            if tells:
                debubble.step()
            times[number] = clock() - began
    with_it, without = (times[settling:][told[settling:] == way] for way in (True, False))
    medians = [np.median(rng.choice(one, (500, len(one))), axis=1) for one in (with_it, without)]
    low, high = np.percentile(medians[0] / medians[1] - 1, [2.5, 97.5])
    ratio = float(np.median(with_it) / np.median(without) - 1)
    return {
        "overhead": ratio,
        "low": float(low),
        "high": float(high),
        "step_ms": float(np.median(without)) / 1e6,
    }


def alone(count: int = CALLS) -> float:
    """Return the nanoseconds of one `debubble.step()` between captures."""
    with tempfile.TemporaryDirectory() as folder, debubble.capture(out=folder, wait=NEVER):
        began = time.process_time_ns()
        for _ in range(count):
            debubble.step()
        return (time.process_time_ns() - began) / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="a moment's work: does it still run?")
    tiny = parser.parse_args().tiny
    torch.set_num_threads(1)
    step = make_step()
    found = overhead(step, steps=40, settling=2) if tiny else overhead(step)
    found |= {"step_call_ns": alone(count=100) if tiny else alone(), "bar": BAR}
    found["share_of_step"] = found["step_call_ns"] / (1e6 * found["step_ms"])
    print(json.dumps({"machine": platform.processor() or platform.machine(), **found}, indent=2))
    if found["high"] <= BAR:
        print("within the bar")
    else:
        print("OVER THE BAR" if found["low"] > BAR else "not resolved: the interval holds the bar")


if __name__ == "__main__":
    main()
