"""A real HTTP server with a real model and profiler: `profiled_server.py FOLDER`."""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path

import torch
from support.services.engine_routes import serving

FOLDER = Path(sys.argv[1])
FEW_MS = 0.005
STOPPING, IDLE = threading.Event(), threading.Event()
ORDERS = []


def take_order(path, body):
    if path == "/start_profile":
        STOPPING.clear()
        IDLE.clear()
        ORDERS.append(json.loads(body) if body else {})
    elif path == "/stop_profile":
        STOPPING.set()
        IDLE.wait()
    else:
        return 404, ""
    return 200, ""


def infer(model):
    model(torch.ones(4, 16))
    time.sleep(FEW_MS)


def profile(model, order):
    """Profile so many inferences, or all until it is told to stop."""
    steps = order.get("num_steps")
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU],
        record_shapes=order.get("record_shapes", False),
    ) as profiler:
        done = 0
        while done == 0 or (not STOPPING.is_set() and (steps is None or done < steps)):
            infer(model)
            done += 1
    folder = Path(order.get("output_dir", FOLDER))
    folder.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(folder / f"{time.time()}-TP-0.trace.json.gz"))
    IDLE.set()


if __name__ == "__main__":
    torch.set_num_threads(1)
    linear = torch.nn.Linear(16, 16)
    with serving(lambda: "", take_order) as url:
        print(url, flush=True)  # noqa: T201 (the address)
        while True:
            if ORDERS:
                profile(linear, ORDERS.pop())
            infer(linear)
