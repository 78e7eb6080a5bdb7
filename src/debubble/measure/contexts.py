"""Two measurements in → the steps of the context lengths that both have, as many of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from debubble.measure.measurement import Measurement
from debubble.units import counted

_Sample = TypeVar("_Sample")


def match_contexts(before: Measurement, after: Measurement) -> tuple[Measurement, Measurement]:
    """Keep what both sides have of each bucket: a longer context is more work, not a worse run.

    Where a side does not tell its context lengths, or they have none in common, all is kept: the
    one is not known to differ, the other is not compared at all.
    """
    common = before.contexts & after.contexts
    if not common or (before.contexts == after.contexts == common and len(common) == 1):
        return before, after
    sides = (before, after)
    steps = _fewest([Counter(sample.context for sample in side.samples) for side in sides])
    timed = _fewest([Counter(bucket for bucket, _ in side.unprofiled_s) for side in sides])
    first, second = (
        replace(
            side,
            samples=_first(side.samples, steps, lambda sample: sample.context),
            unprofiled_s=_first(side.unprofiled_s, timed, lambda pair: pair[0]),
        )
        for side in sides
    )
    return first, second


def left_out(wanted: Sequence[Measurement], used: Sequence[Measurement]) -> tuple[str, ...]:
    """Say how many steps were not used, for want of the same context lengths on the other side."""
    counts = [len(w.samples) - len(u.samples) for w, u in zip(wanted, used, strict=True)]
    if not any(counts):
        return ()
    steps = " and ".join(
        f"{counted(count, 'step')} {side}"
        for count, side in zip(counts, ("before", "after"), strict=True)
    )
    return (f"context lengths matched: {steps} without a counterpart left out",)


def _fewest(counts: Sequence[Mapping[int | None, int]]) -> dict[int | None, int]:
    return {bucket: min(count.get(bucket, 0) for count in counts) for bucket in counts[0]}


def _first(
    samples: Iterable[_Sample],
    most: Mapping[int | None, int],
    bucket_of: Callable[[_Sample], int | None],
) -> tuple[_Sample, ...]:
    """Return the first samples of each bucket, up to its number."""
    taken: Counter[int | None] = Counter()
    kept = []
    for sample in samples:
        bucket = bucket_of(sample)
        if taken[bucket] < most.get(bucket, 0):
            taken[bucket] += 1
            kept.append(sample)
    return tuple(kept)
