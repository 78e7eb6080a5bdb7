"""How small digests are and how fast they are read: ratios of one run.

Bars: a digest takes at most 2 % of the inflated trace; a rank of the recorded runs is read from it
in 5 ms; keeping it adds at most a quarter to reading a long trace; 8,192 ranks are read on two
cores in well under a minute (`--ranks 8192`; fewer by default, and the time of each is shown).
The long trace is one recording many times over, so that its digest deflates better than others.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

from read import COPIES, large, show

from debubble.trace.captures import recognise
from debubble.trace.columns import RankTrace
from debubble.trace.digest import pack_digest, unpack_digest
from debubble.trace.kineto import read_kineto
from debubble.trace.run import find_run, read_run

HERE = Path(__file__).parent
SHIPPED = HERE.parent / "tests" / "data" / "h200"
ALL_RECORDED = HERE.parents[1] / "shared" / "data" / "h200"
WORKERS = 2
REPEATS = 5
MOST_SHARE = 0.02
MOST_READ_S = 0.005
MOST_ADDED = 0.25
MOST_FLEET_S = 40.0
FLEET = 8192


def timed(call: Callable[[], object], repeats: int) -> float:
    """Return the median time of a few calls, as this process used the processor."""
    times = []
    for _ in range(repeats):
        began = time.process_time()
        call()
        times.append(time.process_time() - began)
    return statistics.median(times)


def read_one(path: str) -> int:
    """Read a digest as a worker does: look what it is, then read it."""
    (trace,) = unpack_digest(Path(recognise(path).file).read_bytes())
    return trace.events


def bench_recorded(folder: Path, repeats: int) -> None:
    shares, ours, theirs = [], [], []
    with tempfile.TemporaryDirectory() as place:
        for file in sorted(folder.glob("*/rank*.json.gz")):
            trace = read_kineto(str(file))
            digest = Path(place) / "rank0.debubble.npz"
            digest.write_bytes(pack_digest(trace))
            shares.append(digest.stat().st_size / trace.inflated_bytes)
            ours.append(timed(lambda digest=digest: read_one(str(digest)), repeats))
            theirs.append(timed(lambda file=file: read_kineto(str(file)), repeats))
    print(f"{len(ours)} recorded ranks, {min(shares):.2%} to {max(shares):.2%} of their traces")
    worst = max(ours)
    gain = statistics.median(there / here for here, there in zip(ours, theirs, strict=True))
    show("a digest of the trace", f"{max(shares):.2%}", "<= 2 %", holds=max(shares) <= MOST_SHARE)
    show("a rank read", f"{worst * 1e3:.1f} ms", "<= 5 ms", holds=worst <= MOST_READ_S)
    print(f"{'the trace, against its digest':<44} {gain:>24.0f} x")


def bench_large(path: Path, repeats: int) -> None:
    began = time.process_time()
    trace = read_kineto(str(path))
    reading = time.process_time() - began
    packing = timed(lambda: pack_digest(trace), repeats)
    data = pack_digest(trace)
    with tempfile.TemporaryDirectory() as place:
        digest = Path(place) / "rank0.debubble.npz"
        digest.write_bytes(data)
        again = timed(lambda: read_one(str(digest)), repeats)
    share = len(data) / trace.inflated_bytes
    print(f"{trace.inflated_bytes / 1e6:.0f} MB inflated: {len(data) / 1e6:.2f} MB, {again:.3f} s")
    show("a digest of a long trace", f"{share:.2%}", "<= 2 %", holds=share <= MOST_SHARE)
    added = packing / reading
    show("made, against reading it", f"{added:.2f} x", "<= 0.25 x", holds=added <= MOST_ADDED)


def of_children() -> float:
    """Return the processor time of the workers that have ended."""
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime


def write_fleet(place: Path, trace: RankTrace, ranks: int) -> list[str]:
    files = []
    for rank in range(ranks):
        path = place / f"rank{rank}.debubble.npz"
        header = replace(trace.header, rank=rank, world_size=ranks)
        one = replace(trace, rank=rank, header=header, file=f"rank{rank}.json.gz")
        path.write_bytes(pack_digest(one))
        files.append(str(path))
    return files


def bench_fleet(ranks: int, repeats: int) -> None:
    trace = read_kineto(str(SHIPPED / "1f1b_p2_m4" / "rank0.json.gz"))
    with tempfile.TemporaryDirectory() as place:
        files = write_fleet(Path(place), trace, ranks)
        began, before = time.perf_counter(), of_children()
        with ProcessPoolExecutor(WORKERS) as pool:
            sum(pool.map(read_one, files, chunksize=16))
        seconds, used = time.perf_counter() - began, of_children() - before
        few = files[: min(ranks, 256)]
        joined = timed(lambda: read_run(find_run(few)), repeats) / len(few)
    fleet = used / WORKERS / ranks * FLEET
    print(
        f"{ranks:,} ranks, {WORKERS} workers: {seconds:.1f} s, {used:.1f} s of processors, ", end=""
    )
    print(f"{used / ranks * 1e3:.2f} ms each; as one run {joined * 1e3:.2f} ms each")
    show(
        "8,192 ranks, on two cores of their own",
        f"{fleet:.0f} s",
        "<= 40 s",
        holds=fleet <= MOST_FLEET_S,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=512, help="how many digests are read at once")
    parser.add_argument("--tiny", action="store_true", help="a moment's work: does it still run?")
    words = parser.parse_args()
    if words.tiny:
        with tempfile.TemporaryDirectory() as folder:
            bench_recorded(SHIPPED, repeats=1)
            bench_large(large(0, 1, Path(folder)), repeats=1)
            bench_fleet(4, repeats=1)
        return
    bench_recorded(ALL_RECORDED if ALL_RECORDED.is_dir() else SHIPPED, REPEATS)
    bench_large(large(0, COPIES), REPEATS)
    bench_fleet(words.ranks, REPEATS)


if __name__ == "__main__":
    main()
