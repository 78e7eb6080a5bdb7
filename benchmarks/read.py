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
import time
from pathlib import Path

from large_trace import write_large_trace

HERE = Path(__file__).parent
DATA = HERE / ".data"
COPIES = 78  # about 360 MB and 1.3 million events
REPEATS = 5

READ_ONE = """
import resource, sys, time
from debubble.trace.kineto import read_kineto
began = time.perf_counter()
trace = read_kineto(sys.argv[1])
seconds = time.perf_counter() - began
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(seconds, trace.events, trace.inflated_bytes, peak, trace.kept_bytes())
"""
READ_TWO = """
import sys
from debubble.trace.run import find_run, read_run
run = read_run(find_run(sys.argv[1:]))
"""
FIND = """
import sys, time
from debubble.ledger.ledger import build_ledger
from debubble.report.find import find_json, find_page, worst_of
from debubble.timeline.build import build_run
from debubble.timeline.figures import measure_pipeline
from debubble.trace.run import find_run, read_run
began = time.perf_counter()
run = read_run(find_run(sys.argv[1:]))
read = time.perf_counter() - began
began = time.perf_counter()
timeline = build_run(run)
figures = [measure_pipeline(timeline, pipeline) for pipeline in timeline.pipelines]
worst = worst_of(figures)
ledger = build_ledger(timeline, worst.pipeline, [window.step for window in worst.windows])
find_page(figures, ledger, (), "")
find_json(run, timeline, figures, ledger, ())
print(read, time.perf_counter() - began)
"""
# What its users call before they can ask anything, and its parser alone.
READ_PEER = """
import resource, sys, time
from hta.common.trace_parser import parse_trace_dataframe
from hta.configs.parser_config import ParserConfig
from hta.trace_analysis import TraceAnalysis
began = time.perf_counter()
parse_trace_dataframe(sys.argv[1], ParserConfig.get_default_cfg())
parsed = time.perf_counter() - began
began = time.perf_counter()
TraceAnalysis(trace_files={0: sys.argv[1]}, trace_dir="/")
seconds = time.perf_counter() - began
print(seconds, parsed, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


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


def large(rank: int, copies: int) -> Path:
    path = DATA / f"rank{rank}_x{copies}.json.gz"
    if not path.exists():
        write_large_trace(path, rank, copies)
    return path


def show(what: str, figure: str, bar: str, *, holds: bool) -> None:
    print(f"{what:<44} {figure:>26}   bar {bar:<12} {'holds' if holds else 'MISSED'}")


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


def bench_one(path: Path) -> None:
    floors, ours = [], []
    for _ in range(REPEATS):
        floors.append(run(sys.executable, HERE / "floor.py", path)[0])
        seconds, events, inflated, peak, kept = run(sys.executable, "-c", READ_ONE, path)
        ours.append(seconds)
    print(f"{events:,.0f} events, {inflated / 1e6:.0f} MB inflated, {kept / inflated:.1%} kept")
    print(f"floor {spread(floors)} s, debubble {spread(ours)} s")
    ratio = statistics.median(ours) / statistics.median(floors)
    show("one rank, against the floor", f"{ratio:.2f} x", "<= 1.5 x", holds=ratio <= 1.5)
    show_memory("peak memory", peak, inflated)


def bench_long(path: Path) -> None:
    seconds, _, inflated, peak, _ = run(sys.executable, "-c", READ_ONE, path)
    show_memory(f"peak memory, four times as long ({seconds:.1f} s)", peak, inflated)


def show_memory(what: str, peak: float, inflated: float) -> None:
    allowed = 250e6 + 0.05 * inflated
    show(what, f"{peak / 1e6:.0f} MB", f"<= {allowed / 1e6:.0f} MB", holds=peak <= allowed)


def bench_two(first: Path, second: Path) -> None:
    floors, ours = [], []
    for _ in range(REPEATS):
        floor = [sys.executable, HERE / "floor.py"]
        floors.append(together([*floor, first], [*floor, second]))
        ours.append(together([sys.executable, "-c", READ_TWO, first, second]))
    print(f"two floor processes {spread(floors)} s, debubble {spread(ours)} s, start to end")
    ratio = statistics.median(floors) / statistics.median(ours)
    show(
        "two ranks, two cores, against two floors", f"{ratio:.2f} x", ">= 0.9 x", holds=ratio >= 0.9
    )


def bench_find(*ranks: Path) -> None:
    reads, finds = [], []
    for _ in range(REPEATS):
        read, found = run(sys.executable, "-c", FIND, *ranks)
        reads.append(read)
        finds.append(found)
    print(f"{len(ranks)} ranks: read {spread(reads)} s, find {spread(finds)} s beyond it")
    shares = [found / read for read, found in zip(reads, finds, strict=True)]
    what = f"find, beyond reading {len(ranks)} such ranks"
    middle = statistics.median(shares)
    show(what, f"{spread(shares)} x", "<= 0.25 x", holds=middle <= 0.25)


def bench_help() -> None:
    times = [together([Path(sys.executable).parent / "debubble", "--help"]) for _ in range(REPEATS)]
    middle = statistics.median(times)
    show("debubble --help", f"{spread(times)} s", "<= 0.3 s", holds=middle <= 0.3)


def bench_peer(peer: str, path: Path) -> None:
    theirs, parsed, peak = run(peer, "-c", READ_PEER, path)
    ours = statistics.median(run(sys.executable, "-c", READ_ONE, path)[0] for _ in range(REPEATS))
    print(
        f"HolisticTraceAnalysis {theirs:.0f} s (its parser alone {parsed:.0f} s) "
        f"and {peak / 1e6:,.0f} MB, debubble {ours:.2f} s"
    )
    ratio = theirs / ours
    show("one rank, against HolisticTraceAnalysis", f"{ratio:.0f} x", ">= 40 x", holds=ratio >= 40)


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--peer", help="a Python that has traceinsight 0.6.1")
    peer = words.parse_args().peer
    print(f"{platform.python_version()}, {platform.machine()}, {os.cpu_count()} cores")
    first = large(0, COPIES)
    if peer:
        bench_peer(peer, first)
        return
    second = large(1, COPIES)
    bench_one(first)
    bench_two(first, second)
    bench_find(first, second, *(large(rank, COPIES) for rank in (2, 3)))
    bench_long(large(0, 4 * COPIES))
    bench_help()


if __name__ == "__main__":
    main()
