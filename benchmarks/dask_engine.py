"""What a Dask cluster costs beside the processes of this machine, as a ratio of one run.

64 ranks, read by a scheduler with two workers and by two local processes in turn, all of them kept
and warm; connecting and asking the workers for their version included. Bar: 15 % more time.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from large_trace import write_large_trace

from debubble.annexes.cluster import engine_at
from debubble.trace.engine import Engine, GivenEngine
from debubble.trace.run import RunFiles, find_run, read_run

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.services.dask_cluster import started_cluster

DATA = Path(__file__).parent / ".data" / "ranks64"
RANKS = 64
COPIES = 6  # 28 MB a rank, inflated
REPEATS = 5
WORKERS = 2
BAR = 1.15
# As docs/how-to/read-on-a-cluster.md has it: Dask's own give memory back after every piece.
SETTINGS = {
    "MALLOC_TRIM_THRESHOLD_": "536870912",
    "MALLOC_MMAP_THRESHOLD_": "33554432",
    "DASK_DISTRIBUTED__WORKER__PROFILE__ENABLED": "false",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="a moment's work: does it still run?")
    if parser.parse_args().tiny:
        with tempfile.TemporaryDirectory() as folder:
            compare_engines(Path(folder), ranks=2, copies=1, repeats=1)
        return 0
    return int(compare_engines(DATA, RANKS, COPIES, REPEATS) > BAR)


def compare_engines(folder: Path, ranks: int, copies: int, repeats: int) -> float:
    """Print what each engine takes; return the ratio."""
    for rank in range(ranks):
        path = folder / f"rank{rank}.json.gz"
        if not path.exists():
            write_large_trace(path, rank, copies)
    found = find_run([str(folder)])
    here: list[float] = []
    there: list[float] = []
    with ProcessPoolExecutor(WORKERS) as pool, started_cluster(WORKERS, **SETTINGS) as cluster:
        local, dask = GivenEngine(executor=pool), engine_at(cluster.address)
        assert kernels(found, local) == kernels(found, dask)  # noqa: S101 (and all is warm now)
        for _ in range(repeats):
            here.append(seconds(found, local))
            there.append(seconds(found, dask))
    ratio = statistics.median(there) / statistics.median(here)
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} processors")
    print(f"{ranks} ranks, {WORKERS} local processes: {statistics.median(here):.2f} s")
    print(f"{ranks} ranks, {WORKERS} Dask workers:    {statistics.median(there):.2f} s")
    print(f"ratio {ratio:.3f}, bar {BAR}: {'ok' if ratio <= BAR else 'FAILED'}")
    return ratio


def seconds(found: RunFiles, engine: Engine) -> float:
    began = time.perf_counter()
    read_run(found, engine=engine)
    return time.perf_counter() - began


def kernels(found: RunFiles, engine: Engine) -> list[int]:
    return [int(trace.kernels.start_ns.sum()) for trace in read_run(found, engine=engine).ranks]


if __name__ == "__main__":
    sys.exit(main())
