"""The lever of the microbatch count: more of them, or smaller ones."""

from __future__ import annotations

from collections.abc import Iterator

from debubble.plan.baseline import Baseline
from debubble.plan.change import Change, Hold
from debubble.plan.lever import Lever, Refused, Start
from debubble.plan.option import Idea
from debubble.units import counted

# Beyond eight a rank the bubble of theory is under 11 %, and kernels get small.
MOST_A_RANK = 8
_HOLDS: tuple[Hold, ...] = ("microbatch", "batch")


def ideas(start: Start) -> Iterator[Idea | Refused]:
    """Yield counts: twice and four times as many, with larger batches or smaller."""
    baseline = start.baseline
    size, now = baseline.setting.microbatch_size, baseline.source.microbatches
    for count in counts(baseline, start.most_microbatches):
        for hold in _HOLDS:
            change = Change(microbatches=count, hold=hold)
            if hold == "batch" and size is not None and size * now % count:
                yield Refused(
                    lever="microbatches",
                    change=change,
                    reason=f"a batch of {size * now} samples does not cut into {count}",
                )
            else:
                yield Idea(lever="microbatches", change=change)


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
    of = " of the same batch" if change.hold == "batch" else ""
    return f"{counted(change.microbatches, 'microbatch', 'microbatches')}{of}"


LEVER = Lever(key="microbatches", position=40, ideas=ideas, words=words)
