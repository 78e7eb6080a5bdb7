"""How long `debubble --help` takes, beside a Python that does nothing: alternating, medians.

    python benchmarks/startup.py [--tiny]

The bar is 0.1 s, of the processor: on a machine that others use, a clock on the wall tells of them.
What is imported is printed with what it takes, so that a slow one is seen.
"""

from __future__ import annotations

import re
import resource
import subprocess
import sys
import time
from statistics import median

RUNS = 3 if "--tiny" in sys.argv else 30
BAR_S = 0.1
SHOWN = 8
COMMANDS = {
    "python -c pass": ["-c", "pass"],
    "debubble --help": ["-m", "debubble", "--help"],
    "debubble find --help": ["-m", "debubble", "find", "--help"],
}


def processor_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    walls: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(RUNS):
        for name, words in COMMANDS.items():
            began, before = time.perf_counter(), processor_s()
            subprocess.run([sys.executable, *words], check=True, stdout=subprocess.DEVNULL)
            walls[name].append(time.perf_counter() - began)
            times[name].append(processor_s() - before)
    bare = median(times["python -c pass"])
    for name, taken in times.items():
        middle, wall = median(taken), min(walls[name])
        print(
            f"{name:22} {1e3 * middle:6.0f} ms of the processor, {middle / bare:.1f} bare; "
            f"least on the wall {1e3 * wall:.0f} ms"
        )
    told = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "debubble", "--help"],
        check=True,
        capture_output=True,
        text=True,
    ).stderr
    rows = re.findall(r"import time:\s+(\d+) \|\s+(\d+) \|\s+(\S+)", told)
    longest = sorted(rows, key=lambda row: -int(row[0]))[:SHOWN]
    listed = ", ".join(f"{name} {int(own) / 1e3:.1f}" for own, _, name in longest)
    print(f"{len(rows)} modules; own milliseconds: {listed}")
    reached = "reached" if median(times["debubble --help"]) <= BAR_S else "MISSED"
    print(f"bar of {BAR_S} s for --help: {reached}")


if __name__ == "__main__":
    main()
