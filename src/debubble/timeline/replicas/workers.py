"""What stages take in every replica in → the devices that are slow at what they do.

One stage that takes long has two reasons, and only its replicas tell them apart:

    stage 0 of replica 0, 1, 2, 3    1.41   0.60   0.60   0.60 s    a slow device, in replica 0
    stage 3 of replica 0, 1, 2, 3    0.35   0.35   0.35   0.35 s    a long stage: a matter of split

A device is held against the lower middle of those that hold the same stages, itself among them: of
two replicas the faster tells. What is compared is compute alone, so that a rank that waits for a
slow one inside a collective is not slow itself. Where passes vary, all stages of a replica may take
longer than elsewhere because its microbatches hold more: that is its data, and no device's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from debubble.timeline.figures import StageFigures

# Healthy devices of one stage differ by less: by 1.2 % at most in two recorded production jobs.
_SLOWER = 1.05
# Passes of one stage that differ by more than this, in the middle, differ by their data: 1.6 % at
# most in those jobs, whose sequences are all of one length.
_VARY = 0.03
# And by less than so many standard errors of a median.
_SURELY = 4.0
# What a standard error is of the median absolute deviation, over the root of the count.
_OF_SPREAD = 1.2533 * 1.4826

_Number = TypeVar("_Number", int, float)

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Workers:
    """The devices of a job, held against each other."""

    slow: tuple[SlowWorker, ...] = ()
    """The slowest first."""
    uneven: frozenset[int] = frozenset()
    """Pipelines whose passes vary on all devices: what these have in common is their data."""


def compare_workers(pipelines: Mapping[int, Sequence[StageFigures]]) -> Workers:
    """Compare the same stages of all pipelines.

    Nothing is found where there is one pipeline, or pipelines are cut into different stages.
    """
    busy = {
        pipeline: {(row.stage, int(row.kind)): row for row in rows}
        for pipeline, rows in pipelines.items()
    }
    if len(busy) < 2 or len({frozenset(rows) for rows in busy.values()}) > 1:
        return Workers()
    usual = {
        key: _lower_middle([rows[key].busy_ns for rows in busy.values()])
        for key in next(iter(busy.values()))
    }
    found: list[SlowWorker] = []
    uneven = set()
    for pipeline, rows in busy.items():
        of_rank: dict[int, dict[Key, StageFigures]] = {}
        for key, row in rows.items():
            of_rank.setdefault(row.rank, {})[key] = row
        times = {
            rank: sum(row.busy_ns for row in mine.values())
            / max(sum(usual[key] for key in mine), 1)
            for rank, mine in of_rank.items()
        }
        varies = _lower_middle([row.mad_ns / max(row.median_ns, 1) for row in rows.values()])
        shared = 1.0
        if varies > _VARY:
            uneven.add(pipeline)
            shared = _lower_middle(list(times.values()))
        for rank, mine in of_rank.items():
            excess = {key: round(row.busy_ns - shared * usual[key]) for key, row in mine.items()}
            error = sum(_OF_SPREAD * row.mad_ns / row.count**0.5 for row in mine.values())
            if times[rank] > _SLOWER * shared and sum(excess.values()) > _SURELY * error:
                found.append(
                    SlowWorker(
                        rank=rank,
                        pipeline=pipeline,
                        stages=tuple(sorted({stage for stage, _ in mine})),
                        times=times[rank] / shared,
                        excess_ns=excess,
                    )
                )
    slow = tuple(sorted(found, key=lambda worker: -worker.times))
    return Workers(slow=slow, uneven=frozenset(uneven))


def _lower_middle(values: Sequence[_Number]) -> _Number:
    return sorted(values)[(len(values) - 1) // 2]
