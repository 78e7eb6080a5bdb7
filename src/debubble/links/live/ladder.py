"""Sizes of messages, and pairs of ranks, to be measured."""

from __future__ import annotations

from itertools import combinations, pairwise

from debubble.errors import UsageError
from debubble.links.expectation import Hop

_SMALLEST = 1024
_STEP = 4
# Fewer give no steady median.
FEWEST_SAMPLES = 20


def sizes_of(largest: int, job: int | None = None) -> tuple[int, ...]:
    """Return a ladder of sizes, each four times the one before, with the job's own among them."""
    if largest < _SMALLEST:
        raise UsageError(f"messages of {largest} bytes tell no bandwidth", hint="give 1MiB or more")
    sizes = {largest}
    size = _SMALLEST
    while size < largest:
        sizes.add(size)
        size *= _STEP
    return tuple(sorted(sizes | ({job} if job else set())))


def pairs_of(ranks: int, *, every: bool) -> tuple[Hop, ...]:
    """Return the pairs to be measured: neighbours, or all."""
    if ranks < 2:
        raise UsageError("one rank has no hops", hint="start two ranks or more")
    return tuple(combinations(range(ranks), 2) if every else pairwise(range(ranks)))
