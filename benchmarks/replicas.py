"""How fast replicas are judged: 8,192 ranks against 1,024 of them, of the same shape.

Bar: at most 16 times as long for 8 times the ranks; a loop over pairs of ranks would take 64.
"""

from __future__ import annotations

import argparse
import statistics
import time
from types import SimpleNamespace
from typing import Any

import numpy as np

from debubble.timeline.model import CollectiveKind, RankCollectives
from debubble.timeline.replicas import ReplicaFigures, judge_replicas
from debubble.trace.columns import Group

STAGES, STEPS, BUCKETS = 16, 5, 20
MS = 1_000_000
STEP_NS = 100 * MS
REPEATS = 5
BAR = 16.0


def reduce_of(late_ns: int, group: Group) -> RankCollectives:
    """Make a rank's buckets: all come as late to the first, and queue behind it."""
    step = np.repeat(np.arange(STEPS), BUCKETS)
    bucket = np.tile(np.arange(BUCKETS), STEPS)
    end = step * STEP_NS + (71 + bucket) * MS
    start = np.where(bucket == 0, step * STEP_NS + 50 * MS + late_ns, end - MS)
    rows = len(step)
    return RankCollectives(
        groups=(group,),
        group=np.zeros(rows, dtype=np.int32),
        kind=np.full(rows, CollectiveKind.ALL_REDUCE, dtype=np.uint8),
        step=step.astype(np.int32),
        ready_ns=start,
        start_ns=start,
        end_ns=end,
        exposed_ns=end - start,
        blocks=np.ones(rows, dtype=bool),
        in_forward=np.zeros(rows, dtype=bool),
        message_bytes=np.full(rows, 2**20),
    )


def judge(ranks: int, repeats: int) -> tuple[float, ReplicaFigures | None]:
    """Return the median seconds of judging so many ranks, and what came of it."""
    replicas = ranks // STAGES
    pipelines = {one: tuple(range(one, ranks, replicas)) for one in range(replicas)}
    groups = [
        Group(name="dp", ranks=tuple(range(place * replicas, (place + 1) * replicas)))
        for place in range(STAGES)
    ]
    last = replicas - 1
    found = {
        rank: reduce_of(20 * MS if rank % replicas == last else rank % replicas, groups[place])
        for place in range(STAGES)
        for rank in range(place * replicas, (place + 1) * replicas)
    }
    windows = [SimpleNamespace(step=step) for step in range(STEPS)]
    nothing: dict[str, Any] = {"stages": (), "hops": (), "outside_ns": {}, "microbatches": 8}
    figures: Any = [
        SimpleNamespace(
            pipeline=number,
            ranks=[SimpleNamespace(rank=rank, position=at) for at, rank in enumerate(members)],
            windows=windows,
            step_time_ns=STEP_NS,
            **nothing,
        )
        for number, members in pipelines.items()
    ]
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        result = judge_replicas(found, pipelines, figures)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds), result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true", help="a moment's work: does it still run?")
    if parser.parse_args().tiny:
        compare_sizes(64, 128, repeats=1)
    else:
        compare_sizes(1_024, 8_192, REPEATS)


def compare_sizes(less: int, more: int, repeats: int) -> None:
    """Print the ratio and its bar."""
    few, _ = judge(less, repeats)
    many, found = judge(more, repeats)
    slowest = found.slowest if found else None
    print(f"{less:,} ranks {few:.2f} s; {more:,} ranks {many:.2f} s, replica {slowest} drags")
    print(f"ratio {many / few:.1f} (bar {BAR:.0f}): {'ok' if many / few <= BAR else 'OVER'}")


if __name__ == "__main__":
    main()
