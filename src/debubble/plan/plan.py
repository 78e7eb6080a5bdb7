"""A baseline in → every lever weighed, alone and together, ranked by throughput."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from debubble.errors import NoSplitFits, UsageError
from debubble.plan import microbatches, overlap, schedule
from debubble.plan.allowed import ALL, Allowed
from debubble.plan.baseline import Baseline, stages_of
from debubble.plan.change import Change, Hold
from debubble.plan.headroom import Headroom
from debubble.plan.option import Idea, Option, all_fit, headroom_after, weigh
from debubble.plan.overlap import Overlap
from debubble.plan.partition import Partition
from debubble.plan.quick import quick_latency_s
from debubble.plan.schedule import Refused
from debubble.plan.split import best_split
from debubble.timeline.model import Timeline
from debubble.units import show_bytes

# Of each lever so many are looked at closely and shown.
_SHOWN = 3
# Of the best schedules so many are combined with other levers.
_COMBINED = 2
# What buys less is not worth doing, whatever its interval.
_WORTH = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What could be done, the most promising first."""

    baseline: Baseline
    options: tuple[Option, ...]
    refused: tuple[Refused, ...]
    partition: Partition | None
    overlap: Overlap | None

    @property
    def recommended(self) -> tuple[Option, ...]:
        """The options whose gain is beyond the noise, and that fit."""
        return tuple(
            one
            for one in self.options
            if one.throughput_low > _WORTH and not (one.lever == "overlap" and self._guessed)
        )

    @property
    def _guessed(self) -> bool:
        return self.overlap is not None and self.overlap.slowdown is None


def make_plan(
    baseline: Baseline,
    timeline: Timeline,
    *,
    most_microbatches: int | None = None,
    allowed: Allowed = ALL,
) -> Plan:
    """Weigh each lever, then the best of them together; refuse what does not fit."""
    refused: list[Refused] = []
    chunks = baseline.source.chunks
    partition = _partition(baseline, refused) if allowed.split else None
    moved = partition is not None and partition.split != baseline.source.split
    known = allowed.of(schedule.ideas(baseline), chunks)
    orders = _most(baseline, _sort_out(baseline, known, refused))
    alone = list(microbatches.ideas(baseline, most_microbatches))
    if partition is not None and moved:
        alone.append(Idea(lever="split", change=Change(split=partition.split)))
    ideas = _sort_out(baseline, allowed.of(alone, chunks), refused) + orders
    hold = allowed.hold or "microbatch"
    found = _together(baseline, partition if moved else None, orders, most_microbatches, hold)
    ideas += _most(baseline, _sort_out(baseline, allowed.of(found, chunks), refused))
    options = [weigh(baseline, idea) for idea in ideas]
    lapped = overlap.consider(baseline, timeline) if allowed.overlap else None
    if lapped is not None and lapped.option.fits_memory is not False:
        options.append(lapped.option)
    elif lapped is not None:
        refused.append(
            _too_large(lapped.option.lever, Change(overlap=True), lapped.option.headroom)
        )
    return Plan(
        baseline=baseline,
        options=tuple(sorted(options, key=lambda one: -one.throughput_gain)),
        refused=tuple(refused),
        partition=partition,
        overlap=lapped,
    )


def _partition(baseline: Baseline, refused: list[Refused]) -> Partition | None:
    try:
        return best_split(baseline, Change())
    except (UsageError, NoSplitFits) as error:
        refused.append(Refused(lever="split", change=Change(), reason=error.message))
        return None


def _sort_out(
    baseline: Baseline, found: Iterable[Idea | Refused], refused: list[Refused]
) -> list[Idea]:
    """Keep what may fit memory; what does not is refused before any time is spent on it."""
    ideas = []
    for one in found:
        if isinstance(one, Refused):
            refused.append(one)
            continue
        left = headroom_after(baseline, one.change)
        if all_fit(left) is False:
            refused.append(_too_large(one.lever, one.change, left))
        else:
            ideas.append(one)
    return ideas


def _most(baseline: Baseline, ideas: Sequence[Idea]) -> list[Idea]:
    """Return the few that do the most work a second, by means."""

    def time_per_work(idea: Idea) -> float:
        count = idea.change.microbatches or baseline.source.microbatches
        work = count * baseline.microbatch_scale(idea.change)
        return quick_latency_s(baseline, idea.change) / work

    return sorted(ideas, key=time_per_work)[:_SHOWN]


def _together(
    baseline: Baseline,
    partition: Partition | None,
    orders: Sequence[Idea],
    most: int | None,
    hold: Hold,
) -> Iterator[Idea]:
    """Combine the best schedules and counts, with the best split where stages are as many."""
    schedules = [Idea(lever="combined", change=Change()), *orders[:_COMBINED]]
    counts = microbatches.counts(baseline, most)[:2]
    splits = dict(_splits_by_count(baseline, partition, counts, hold))
    for one in schedules:
        for count in (None, *counts):
            change = replace(one.change, microbatches=count, hold=hold)
            try:
                stages = stages_of(baseline.what_if(change).order)
            except UsageError:
                continue
            split = splits.get(count)
            split = split if split and len(split) == stages else None
            levers = (count is not None) + (change.schedule is not None) + (split is not None)
            if levers > 1:
                change = replace(change, split=split)
                yield Idea(lever="combined", change=change, assumptions=one.assumptions)


def _splits_by_count(
    baseline: Baseline, partition: Partition | None, counts: Sequence[int], hold: Hold
) -> Iterator[tuple[int | None, tuple[int, ...]]]:
    """Yield the best split for each count: a short batch likes its last stage small."""
    if partition is None:
        return
    yield None, partition.split
    for count in counts:
        try:
            yield count, best_split(baseline, Change(microbatches=count, hold=hold)).split
        except (UsageError, NoSplitFits):
            yield count, partition.split


def _too_large(lever: str, change: Change, left: Sequence[Headroom] | None) -> Refused:
    worst = min((one.bytes for one in left or () if one.bytes is not None), default=0.0)
    return Refused(
        lever=lever,
        change=change,
        reason=f"a rank would need {show_bytes(-worst)} more memory than it has",
    )
