"""The lever of the microbatch count: more of them, or smaller ones."""

from __future__ import annotations

from collections.abc import Iterator

from debubble.plan.baseline import Baseline
from debubble.plan.change import Change, Hold
from debubble.plan.option import Idea

# Beyond eight a rank the bubble of theory is under 11 %, and kernels get small.
MOST_A_RANK = 8
_HOLDS: tuple[Hold, ...] = ("microbatch", "batch")


def ideas(baseline: Baseline, most: int | None = None) -> Iterator[Idea]:
    """Yield counts up to `most`: twice and four times as many, with larger batches or smaller."""
    for count in counts(baseline, most):
        for hold in _HOLDS:
            yield Idea(lever="microbatches", change=Change(microbatches=count, hold=hold))


def counts(baseline: Baseline, most: int | None = None) -> list[int]:
    """Return counts worth trying, the one in use left out."""
    now, ranks = baseline.source.microbatches, len(baseline.ranks)
    limit = most or max(MOST_A_RANK * ranks, 2 * now)
    wanted = {now * factor for factor in (2, 4, 8)} | {ranks * factor for factor in (1, 2, 4, 8)}
    return sorted(count for count in wanted if now < count <= limit)
