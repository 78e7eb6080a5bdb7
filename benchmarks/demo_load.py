"""Runs the demo again and again with a busy process on each core, and tabulates its verdicts.

A verdict is right where it names stage 3 and finds the change better, or where it says that this
machine was busy. Anything else is wrong, and the exit code is 1.

    python benchmarks/demo_load.py [--demos 20] [--busy N]     # busy processes: one a core
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# The stage that has more than twice the layers of the others.
CULPRIT = "Stage 3 "
# Far above what a demo takes on a busy machine.
PATIENCE_S = 600
WIDTHS = (5, 8, 9, 10, 10, 8)


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    """Keep so many cores busy."""
    started = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def judge(answer: dict) -> tuple[str, str]:
    """Return whether a demo's JSON is right, busy or wrong, and what it says."""
    if "error" in answer:
        said = answer["error"]
        return ("busy" if said["code"] == "machine_busy" else "wrong"), said["message"]
    if CULPRIT not in answer["found"]:
        return "wrong", f"found: {answer['found']}"
    compared = answer["compare"]
    return ("right" if compared["verdict"] == "better" else "wrong"), compared["sentence"]


def one_demo(folder: Path) -> tuple[dict, float]:
    """Run a demo; return its answer and how long it took."""
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "debubble", "demo", "--json", "-q", "--out", str(folder)],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    return json.loads(done.stdout), time.monotonic() - began


def row(*cells: object) -> str:
    return "  ".join(f"{cell!s:>{width}}" for cell, width in zip(cells, WIDTHS, strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--demos", type=int, default=20)
    parser.add_argument("--busy", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--tiny", action="store_true", help="one, refused: its folder is not empty")
    told = parser.parse_args()
    counts = dict.fromkeys(("right", "busy", "wrong"), 0)
    print(f"{told.busy} busy processes on {os.cpu_count()} cores")
    print(row("demo", "verdict", "predicted", "throughput", "warned of", "took"))
    with tempfile.TemporaryDirectory() as place, busy_processes(told.busy):
        for number in range(1, 2 if told.tiny else told.demos + 1):
            folder = Path(place) / str(number)
            if told.tiny:
                folder.mkdir()
                (folder / "something").touch()
            answer, took = one_demo(folder)
            verdict, said = judge(answer)
            counts[verdict] += 1
            predicted = measured = warned = "–"
            if "error" not in answer:
                predicted = f"{100 * answer['throughput_gain_fraction']:+.0f} %"
                measured = f"{100 * answer['compare']['delta']['throughput']['change']:+.0f} %"
                warned = len(answer["warnings"])
            print(row(number, verdict, predicted, measured, warned, f"{took:.0f} s"), flush=True)
            if verdict != "right":
                print(f"       {said}", flush=True)
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
    return int(bool(counts["wrong"]) and not told.tiny)


if __name__ == "__main__":
    sys.exit(main())
