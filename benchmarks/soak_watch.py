"""The service under bursts of captures and `kill -9`: `python benchmarks/soak_watch.py`.

Captures arrive in bursts while the service is killed again and again. In the end each must be
stored once, with its measurement once, and the service's memory must be flat. Bars: 5,000 captures,
50 kills, none lost, none twice; memory at the end within 10 % of that after the first tenth.

Before that, a service that hardly gets anywhere: 60 captures, killed 16 times at any moment, as
soon as it is up and in the midst of what a kill interrupted. Bar: 60 stored, none failed.
"""

from __future__ import annotations

import argparse
import random
import sqlite3
import tempfile
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from watch_service import PATIENCE_S, Watch, write_capture, write_config

_BURST = 50
_FLAT = 1.1
_HARD = (60, 16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--captures", type=int, default=5000)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--tiny", action="store_true", help="a moment's work: does it still run?")
    given = parser.parse_args()
    rounds = [(_HARD, True), ((given.captures, given.kills), False)]
    right = True
    for (captures, kills), at_any_moment in [((4, 1), True)] if given.tiny else rounds:
        with tempfile.TemporaryDirectory(prefix="debubble-soak-") as place:
            orders = Orders(captures, kills, at_any_moment, at_once=given.tiny)
            right &= soak(Path(place), orders)
    raise SystemExit(0 if right else 1)


class Orders(NamedTuple):
    """What a soak is made of."""

    captures: int
    kills: int
    at_any_moment: bool
    """Whether the service is killed without having done anything since its start."""
    at_once: bool
    """Whether all captures are there from the start."""


def soak(folder: Path, orders: Orders) -> bool:
    """Have a service take captures in while it is killed; tell whether all is as it should be."""
    captures, kills, at_any_moment, at_once = orders
    config = write_config(folder)
    rng = random.Random(1)  # noqa: S311 (when to kill)
    arriving = threading.Thread(target=arrive, args=(folder / "traces", captures), daemon=True)
    began = time.monotonic()
    arriving.start()
    if at_once:  # a busy machine may take longer to write a capture than it takes to settle
        arriving.join()
    bugs: list[str] = []
    for _ in range(kills):
        watch = Watch(config)
        if at_any_moment:
            time.sleep(rng.uniform(0, 2))
        else:
            watch.wait_until(rng.randrange(1, max(2, captures // kills // 2)))
            time.sleep(rng.uniform(0, 0.2))
        watch.kill()
        bugs += watch.bugs
    watch = Watch(config)
    memory: list[tuple[int, float]] = []
    ended, last_s = -1, time.monotonic()
    while (now := count_ended(folder)) < captures:
        memory.append((watch.analysed, watch.memory_mib()))
        if watch.process.poll() is not None:
            raise SystemExit("the service died")
        if now > ended:
            ended, last_s = now, time.monotonic()
        if time.monotonic() - last_s > PATIENCE_S:
            raise SystemExit(f"nothing more came after {ended} of {captures} captures")
        time.sleep(1)
    took = time.monotonic() - began
    watch.process.terminate()
    watch.process.wait()
    return report(folder, orders, took, memory, [*bugs, *watch.bugs])


def arrive(traces: Path, captures: int) -> None:
    rng = random.Random(2)  # noqa: S311 (sizes of bursts)
    number = 0
    while number < captures:
        for _ in range(min(rng.randrange(1, 2 * _BURST), captures - number)):
            write_capture(traces, number, rng)
            number += 1
        time.sleep(rng.uniform(0, 2))


def count_ended(folder: Path) -> int:
    """Count what is through, well or not: what failed is not waited for."""
    with closing(opened(folder)) as store:
        ended = "SELECT count(*) FROM watch_captures WHERE state != 'claimed'"
        return int(store.execute(ended).fetchone()[0])


def opened(folder: Path) -> sqlite3.Connection:
    return sqlite3.connect(f"file:{folder}/history.db?mode=ro", uri=True, timeout=60)


def count(folder: Path) -> tuple[int, int, int]:
    with closing(opened(folder)) as store:
        stored = "SELECT count(*), count(DISTINCT key) FROM watch_captures WHERE state='stored'"
        rows, keys = store.execute(stored).fetchone()
        (tags,) = store.execute("SELECT count(*) FROM tags WHERE name='watch'").fetchone()
    return rows, keys, tags


def report(
    folder: Path, orders: Orders, took: float, memory: list[tuple[int, float]], bugs: list[str]
) -> bool:
    captures = orders.captures
    rows, keys, measurements = count(folder)
    when = ", at any moment" if orders.at_any_moment else ""
    print(f"{captures} captures, {orders.kills} kills{when}, {took:.0f} s")
    print(f"lost: {captures - keys}; stored twice: {rows - keys}; measurements: {measurements}")
    last = memory[-1][0] if memory else 0
    early = [size for done, size in memory if done >= last * 0.1][:1]
    if early:
        grown = memory[-1][1] / early[0]
        print(f"memory after a tenth: {early[0]:.0f} MiB; in the end: {memory[-1][1]:.0f} MiB")
        print(f"grown {grown:.3f} times over {last} captures (bar: {_FLAT})")
    for line in bugs[:5]:
        print(line.rstrip())
    return rows == keys == measurements == captures and not bugs


if __name__ == "__main__":
    main()
