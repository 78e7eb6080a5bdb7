"""The lever of the microbatch count: more of them, or smaller ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from debubble.plan.baseline import Baseline
from debubble.plan.change import Change, Hold
from debubble.plan.lever import Lever, Start
from debubble.plan.option import Idea
from debubble.units import counted

# Beyond eight a rank the bubble of theory is under 11 %, and kernels get small.
MOST_A_RANK = 8
HOLDS: tuple[Hold, ...] = ("batch", "microbatch")


def ideas(start: Start) -> Iterator[Idea]:
    """Yield counts: twice and four times as many, with larger batches or smaller."""
    yield from _with_counts(start.baseline, counts(start.baseline, start.most_microbatches))


def doubled(start: Start) -> Iterator[Idea]:
    """Yield twice the microbatches: the same global batch cut finer, and a larger one."""
    yield from _with_counts(start.baseline, [2 * start.baseline.source.microbatches])


def _with_counts(baseline: Baseline, counts: Iterable[int]) -> Iterator[Idea]:
    for count in counts:
        for hold in HOLDS:
            change = Change(microbatches=count, hold=hold)
            if cuts_evenly(baseline, change):
                yield Idea(lever="microbatches", change=change)
            else:
                replicas = baseline.setting.data_parallel or 1
                samples = (baseline.setting.microbatch_size or 1) * baseline.source.microbatches
                on = f" on {replicas} replicas" if replicas > 1 else ""
                yield Idea(
                    lever="microbatches",
                    change=change,
                    reason=f"a global batch of {samples * replicas} samples is not divisible by "
                    f"{count}{on}",
                )


def cuts_evenly(baseline: Baseline, change: Change) -> bool:
    """Tell whether the samples of a held batch make so many equal microbatches, if it is known."""
    size, count = baseline.setting.microbatch_size, change.microbatches
    if size is None or count is None or change.hold != "batch":
        return True
    return size * baseline.source.microbatches % count == 0


def counts(baseline: Baseline, most: int | None = None) -> list[int]:
    """Return counts worth trying, the one in use left out."""
    now, ranks = baseline.source.microbatches, len(baseline.ranks)
    limit = most or max(MOST_A_RANK * ranks, 2 * now)
    wanted = {now * factor for factor in (2, 4, 8)} | {ranks * factor for factor in (1, 2, 4, 8)}
    return sorted(count for count in wanted if now < count <= limit)


def words(change: Change) -> str:
    """Say how many microbatches a change has."""
    if not change.microbatches:
        return ""
    if change.hold == "batch":
        return f"{change.microbatches} smaller microbatches"
    return counted(change.microbatches, "microbatch", "microbatches")


LEVER = Lever(key="microbatches", position=40, ideas=ideas, words=words)
DOUBLED = replace(LEVER, ideas=doubled)
"""What `find` asks of it."""
