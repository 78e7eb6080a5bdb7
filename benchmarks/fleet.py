"""How `find` grows with the ranks of a job: time a doubling, memory of the joiner, digests alone.

64 stages in 1 to 16 replicas, each rank a trace; then 8,192 ranks as digests. Bars: each doubling
at most 2.2 times, no process over 500 MB, 8,192 ranks within two minutes on 2 processors.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
from fleet_traces import STAGES, write_fleet

from debubble.trace.columns import Group
from debubble.trace.digest import pack_digest
from debubble.trace.kineto import read_kineto

DATA = Path(__file__).parent / ".data"
REPLICAS = (1, 2, 4, 8, 16)
MANY = 128
_DOUBLING, _JOINER_MB, _DIGESTS_S = 2.2, 500, 120


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How large the jobs are, and where their traces lie."""

    data: Path = DATA
    stages: int = STAGES
    replicas: tuple[int, ...] = REPLICAS
    many: int = MANY


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keep", action="store_true", help="leave the traces for another time")
    parser.add_argument("--tiny", action="store_true", help="a moment's work: does it still run?")
    given = parser.parse_args()
    os.environ.setdefault("DEBUBBLE_HISTORY", os.devnull)
    if given.tiny:
        with tempfile.TemporaryDirectory() as folder:
            grow(Sizes(data=Path(folder), stages=2, replicas=(1, 2), many=4), keeps=True)
        return 0
    return int(not grow(Sizes(), keeps=given.keep))


def grow(sizes: Sizes, *, keeps: bool) -> bool:
    """Measure, print, and say whether the bars hold."""
    rows = []
    print(f"{'ranks':>6} {'wall':>8} {'CPU':>8} {'largest process':>16}")
    for replicas in sizes.replicas:
        folder = sizes.data / f"fleet{replicas}"
        write_fleet(folder, replicas, sizes.stages)
        rows.append(_find(folder, sizes.stages * replicas))
    many = sizes.data / "fleet-digests"
    _write_digests(sizes, many)
    digests = _find(many, sizes.stages * sizes.many)
    if not keeps:
        for folder in (*(sizes.data / f"fleet{one}" for one in sizes.replicas), many):
            shutil.rmtree(folder)
    worst = max(after[1] / before[1] for before, after in pairwise(rows))
    largest = max(row[2] for row in rows)
    print(f"slowest doubling: {worst:.2f} x (bar {_DOUBLING} x)")
    print(f"largest process up to {rows[-1][0]:,} ranks: {largest:.0f} MB (bar {_JOINER_MB} MB)")
    print(f"{digests[0]:,} ranks from digests: {digests[1]:.0f} s (bar {_DIGESTS_S} s)")
    return worst <= _DOUBLING and largest <= _JOINER_MB and digests[1] <= _DIGESTS_S


def _find(folder: Path, ranks: int) -> tuple[int, float, float]:
    """Run `debubble find` from start to end; return ranks, seconds, megabytes."""
    out = os.open(os.devnull, os.O_WRONLY)
    words = [sys.executable, "-m", "debubble", "find", str(folder), "--quiet"]
    began = time.monotonic()
    child = os.posix_spawn(
        sys.executable, words, dict(os.environ), file_actions=[(os.POSIX_SPAWN_DUP2, out, 1)]
    )
    _, status, used = os.wait4(child, 0)
    wall = time.monotonic() - began
    os.close(out)
    if status:
        raise SystemExit(f"find failed on {folder}")
    print(
        f"{ranks:>6,} {wall:>6.1f} s {used.ru_utime + used.ru_stime:>6.1f} s "
        f"{used.ru_maxrss / 1000:>13.0f} MB",
        flush=True,
    )
    return ranks, wall, used.ru_maxrss / 1000


def _write_digests(sizes: Sizes, folder: Path) -> None:
    """Write the digests of a larger job: each replica as often as it takes."""
    if folder.is_dir() and len(list(folder.iterdir())) == sizes.stages * sizes.many:
        return
    folder.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor(2) as pool:
        list(pool.map(partial(_copy_stage, sizes, folder), range(sizes.stages), chunksize=4))


def _copy_stage(sizes: Sizes, folder: Path, stage: int) -> None:
    few, copies = sizes.replicas[-1], sizes.many
    world = sizes.stages * copies
    traces = sizes.data / f"fleet{few}"
    for replica in range(few):
        trace = read_kineto(str(traces / f"rank{stage * few + replica}.json.gz"))
        for copy in range(replica, copies, few):
            rank = stage * copies + copy
            members = tuple(range(copy, world, copies))
            group = Group(name="pp", ranks=members)
            header = replace(trace.header, rank=rank, world_size=world, groups=(group,))
            known = trace.operators.peer
            moved = replace(
                trace,
                file=f"rank{rank}.json.gz",
                rank=rank,
                header=header,
                groups=tuple(
                    replace(one, ranks=members) if one.name == "pp" else one for one in trace.groups
                ),
                operators=replace(
                    trace.operators,
                    peer=np.where(known < 0, known, known // few * copies + copy).astype(np.int32),
                ),
            )
            (folder / f"rank{rank}.debubble.npz").write_bytes(pack_digest(moved))


if __name__ == "__main__":
    sys.exit(main())
