"""What stages take in every replica in → the devices that are slow at what they do.

One stage that takes long has two reasons, and only its replicas tell them apart:

    stage 0 of replica 0, 1, 2, 3    1.41   0.60   0.60   0.60 s    a slow device, in replica 0
    stage 3 of replica 0, 1, 2, 3    0.35   0.35   0.35   0.35 s    a long stage: a matter of split

A device is held against the lower middle of those that hold the same stages, itself among them: of
two replicas the faster tells. What is compared is compute alone, so that a rank that waits for a
slow one inside a collective is not slow itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from debubble.timeline.figures import StageFigures

# Healthy devices of one stage differ by less: by 1.2 % at most in two recorded production jobs.
_SLOWER = 1.05
# And by less than so many standard errors of a median.
_SURELY = 4.0
# What a standard error is of the median absolute deviation, over the root of the count.
_OF_SPREAD = 1.2533 * 1.4826

Key = tuple[int, int]
"""Stage and kind of a pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowWorker:
    """A rank whose device takes longer than those that hold the same stages elsewhere."""

    rank: int
    pipeline: int
    stages: tuple[int, ...]
    times: float
    """How many times as long it computes."""
    excess_ns: Mapping[Key, int]
    """What each kind of pass of each of its stages takes more."""


def find_slow_workers(
    pipelines: Mapping[int, Sequence[StageFigures]],
) -> tuple[SlowWorker, ...]:
    """Compare the same stages of all pipelines; the slowest first.

    Nothing is found where there is one pipeline, or pipelines are cut into different stages.
    """
    busy = {
        pipeline: {(row.stage, int(row.kind)): row for row in rows}
        for pipeline, rows in pipelines.items()
    }
    if len(busy) < 2 or len({frozenset(rows) for rows in busy.values()}) > 1:
        return ()
    usual = {}
    for key in next(iter(busy.values())):
        lengths = sorted(rows[key].busy_ns for rows in busy.values())
        usual[key] = lengths[(len(lengths) - 1) // 2]
    found = []
    for pipeline, rows in busy.items():
        for rank in sorted({row.rank for row in rows.values()}):
            mine = {key: row for key, row in rows.items() if row.rank == rank}
            excess = {key: row.busy_ns - usual[key] for key, row in mine.items()}
            expected, more = sum(usual[key] for key in mine), sum(excess.values())
            error = sum(_OF_SPREAD * row.mad_ns / row.count**0.5 for row in mine.values())
            if more > max((_SLOWER - 1) * expected, _SURELY * error):
                found.append(
                    SlowWorker(
                        rank=rank,
                        pipeline=pipeline,
                        stages=tuple(sorted({stage for stage, _ in mine})),
                        times=1 + more / max(expected, 1),
                        excess_ns=excess,
                    )
                )
    return tuple(sorted(found, key=lambda worker: -worker.times))
