"""How fast and how lean the reader is: ratios of one run, on a real trace made long.

Bars: one gzipped rank within 1.5 x the floor (benchmarks/floor.py); memory within 250 MB plus 5 %
of the inflated size, also for a trace four times as long; two ranks on two cores at 0.9 x what two
floor processes reach; finding the bubble of four ranks within 25 % of the time of reading them;
`debubble --help` in 0.3 s; 40 x HolisticTraceAnalysis (`make bench-peers`).
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from large_trace import write_large_trace

HERE = Path(__file__).parent
DATA = HERE / ".data"
COPIES = 78  # about 360 MB and 1.3 million events
REPEATS = 5

PARTS = HERE / "read_parts.py"


def run(*words: str | Path) -> list[float]:
    """Run a Python program and return the numbers it prints last."""
    done = subprocess.run([*map(str, words)], check=True, capture_output=True, text=True)
    last = done.stdout.strip().splitlines()[-1:] or [""]
    return [float(word) for word in last[0].split()]


def together(*commands: list[str | Path]) -> float:
    """Start commands at once and return the seconds until the last one ends."""
    began = time.perf_counter()
    started = [
        subprocess.Popen([*map(str, words)], stdout=subprocess.DEVNULL) for words in commands
    ]
    codes = [process.wait() for process in started]
    if any(codes):
        message = f"{commands} ended with {codes}"
        raise RuntimeError(message)
    return time.perf_counter() - began


def large(rank: int, copies: int, folder: Path = DATA) -> Path:
    path = folder / f"rank{rank}_x{copies}.json.gz"
    if not path.exists():
        write_large_trace(path, rank, copies)
    return path


def show(what: str, figure: str, bar: str, *, holds: bool) -> None:
    print(f"{what:<44} {figure:>26}   bar {bar:<12} {'holds' if holds else 'MISSED'}")


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


def bench_one(path: Path, repeats: int) -> None:
    floors, ours = [], []
    for _ in range(repeats):
        floors.append(run(sys.executable, HERE / "floor.py", path)[0])
        seconds, events, inflated, peak, kept = run(sys.executable, PARTS, "read_one", path)
        ours.append(seconds)
    print(f"{events:,.0f} events, {inflated / 1e6:.0f} MB inflated, {kept / inflated:.1%} kept")
    print(f"floor {spread(floors)} s, debubble {spread(ours)} s")
    ratio = statistics.median(ours) / statistics.median(floors)
    show("one rank, against the floor", f"{ratio:.2f} x", "<= 1.5 x", holds=ratio <= 1.5)
    show_memory("peak memory", peak, inflated)


def bench_long(path: Path) -> None:
    seconds, _, inflated, peak, _ = run(sys.executable, PARTS, "read_one", path)
    show_memory(f"peak memory, four times as long ({seconds:.1f} s)", peak, inflated)


def show_memory(what: str, peak: float, inflated: float) -> None:
    allowed = 250e6 + 0.05 * inflated
    show(what, f"{peak / 1e6:.0f} MB", f"<= {allowed / 1e6:.0f} MB", holds=peak <= allowed)


def bench_two(first: Path, second: Path, repeats: int) -> None:
    floors, ours = [], []
    for _ in range(repeats):
        floor = [sys.executable, HERE / "floor.py"]
        floors.append(together([*floor, first], [*floor, second]))
        ours.append(together([sys.executable, PARTS, "read_all", first, second]))
    print(f"two floor processes {spread(floors)} s, debubble {spread(ours)} s, start to end")
    ratio = statistics.median(floors) / statistics.median(ours)
    show(
        "two ranks, two cores, against two floors", f"{ratio:.2f} x", ">= 0.9 x", holds=ratio >= 0.9
    )


def bench_find(*ranks: Path, repeats: int) -> None:
    reads, finds = [], []
    for _ in range(repeats):
        read, found = run(sys.executable, PARTS, "find", *ranks)
        reads.append(read)
        finds.append(found)
    print(f"{len(ranks)} ranks: read {spread(reads)} s, find {spread(finds)} s beyond it")
    shares = [found / read for read, found in zip(reads, finds, strict=True)]
    what = f"find, beyond reading {len(ranks)} such ranks"
    middle = statistics.median(shares)
    show(what, f"{spread(shares)} x", "<= 0.25 x", holds=middle <= 0.25)


def bench_help(repeats: int) -> None:
    times = [together([sys.executable, "-m", "debubble", "--help"]) for _ in range(repeats)]
    middle = statistics.median(times)
    show("debubble --help", f"{spread(times)} s", "<= 0.3 s", holds=middle <= 0.3)


def bench_peer(peer: str, path: Path, repeats: int) -> None:
    theirs, parsed, peak = run(peer, PARTS, "read_as_peer", path)
    ours = statistics.median(
        run(sys.executable, PARTS, "read_one", path)[0] for _ in range(repeats)
    )
    print(
        f"HolisticTraceAnalysis {theirs:.0f} s (its parser alone {parsed:.0f} s) "
        f"and {peak / 1e6:,.0f} MB, debubble {ours:.2f} s"
    )
    ratio = theirs / ours
    show("one rank, against HolisticTraceAnalysis", f"{ratio:.0f} x", ">= 40 x", holds=ratio >= 40)


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--peer", help="a Python that has traceinsight 0.6.1")
    words.add_argument("--tiny", action="store_true", help="a moment's work: does it still run?")
    given = words.parse_args()
    print(f"{platform.python_version()}, {platform.machine()}, {os.cpu_count()} cores")
    if given.tiny:
        with tempfile.TemporaryDirectory() as folder:
            bench(Path(folder), copies=1, repeats=1)
    elif given.peer:
        bench_peer(given.peer, large(0, COPIES), REPEATS)
    else:
        bench(DATA, COPIES, REPEATS)


def bench(folder: Path, copies: int, repeats: int) -> None:
    """Measure all but the peer."""
    ranks = [large(rank, copies, folder) for rank in range(4)]
    bench_one(ranks[0], repeats)
    bench_two(ranks[0], ranks[1], repeats)
    bench_find(*ranks, repeats=repeats)
    bench_long(large(0, 4 * copies, folder))
    bench_help(repeats)


if __name__ == "__main__":
    main()
