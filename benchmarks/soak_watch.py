"""The service under bursts of captures and `kill -9`: `python benchmarks/soak_watch.py`.

Captures arrive in bursts while the service is killed again and again. In the end each must be
stored once, with its measurement once, and the service's memory must be flat. Bars: 5,000 captures,
50 kills, none lost, none twice; memory at the end within 10 % of that after the first tenth.
"""

from __future__ import annotations

import argparse
import random
import sqlite3
import tempfile
import threading
import time
from pathlib import Path

from watch_service import Watch, write_capture, write_config

_BURST = 50
_FLAT = 1.1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--captures", type=int, default=5000)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--tiny", action="store_true", help="a moment's work: does it still run?")
    given = parser.parse_args()
    # Kills are the point of the whole run; whether it still runs shows without.
    captures, kills = (6, 0) if given.tiny else (given.captures, given.kills)
    with tempfile.TemporaryDirectory(prefix="debubble-soak-") as place:
        soak(Path(place), captures, kills, given.workers, at_once=given.tiny)


def soak(folder: Path, captures: int, kills: int, workers: int, *, at_once: bool) -> None:
    config = write_config(folder, workers)
    rng = random.Random(1)  # noqa: S311 (when to kill)
    arriving = threading.Thread(target=arrive, args=(folder / "traces", captures), daemon=True)
    began = time.monotonic()
    arriving.start()
    if at_once:  # a busy machine may take longer to write a capture than it takes to settle
        arriving.join()
    bugs: list[str] = []
    for _ in range(kills):
        watch = Watch(config)
        watch.wait_until(rng.randrange(1, max(2, captures // kills // 2)))
        time.sleep(rng.uniform(0, 0.2))
        watch.kill()
        bugs += watch.bugs
    watch = Watch(config)
    memory: list[tuple[int, float]] = []
    while (stored := count(folder)[0]) < captures:
        memory.append((watch.analysed, watch.memory_mib()))
        if watch.process.poll() is not None:
            raise SystemExit("the service died")
        time.sleep(1)
    took = time.monotonic() - began
    watch.process.terminate()
    watch.process.wait()
    report(folder, captures, kills, took, memory, [*bugs, *watch.bugs], stored)


def arrive(traces: Path, captures: int) -> None:
    rng = random.Random(2)  # noqa: S311 (sizes of bursts)
    number = 0
    while number < captures:
        for _ in range(min(rng.randrange(1, 2 * _BURST), captures - number)):
            write_capture(traces, number, rng)
            number += 1
        time.sleep(rng.uniform(0, 2))


def count(folder: Path) -> tuple[int, int, int]:
    with sqlite3.connect(f"file:{folder}/history.db?mode=ro", uri=True, timeout=60) as store:
        stored = "SELECT count(*), count(DISTINCT key) FROM watch_captures WHERE state='stored'"
        rows, keys = store.execute(stored).fetchone()
        (tags,) = store.execute("SELECT count(*) FROM tags WHERE name='watch'").fetchone()
    return rows, keys, tags


def report(  # noqa: PLR0913, PLR0917 (all that was measured)
    folder: Path,
    captures: int,
    kills: int,
    took: float,
    memory: list[tuple[int, float]],
    bugs: list[str],
    stored: int,
) -> None:
    rows, keys, measurements = count(folder)
    print(f"{captures} captures, {kills} kills, {took:.0f} s")
    print(f"lost: {captures - keys}; stored twice: {rows - keys}; measurements: {measurements}")
    last = memory[-1][0] if memory else 0
    early = [size for done, size in memory if done >= last * 0.1][:1]
    if early:
        grown = memory[-1][1] / early[0]
        print(f"memory after a tenth: {early[0]:.0f} MiB; in the end: {memory[-1][1]:.0f} MiB")
        print(f"grown {grown:.3f} times over {last} captures (bar: {_FLAT})")
    for line in bugs[:5]:
        print(line.rstrip())
    right = stored == rows == keys == measurements == captures and not bugs
    raise SystemExit(0 if right else 1)


if __name__ == "__main__":
    main()
