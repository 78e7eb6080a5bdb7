"""A baseline in → every lever weighed, alone and together, ranked by throughput."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from debubble.errors import UsageError
from debubble.plan import microbatches, overlap, schedule
from debubble.plan.baseline import Baseline
from debubble.plan.change import Change
from debubble.plan.option import Idea, Option, weigh
from debubble.plan.overlap import Overlap
from debubble.plan.partition import Partition
from debubble.plan.quick import quick_latency_s
from debubble.plan.schedule import Refused
from debubble.plan.split import best_split
from debubble.timeline.model import Timeline
from debubble.units import show_bytes

# Of each lever so many are looked at closely and shown.
_SHOWN = 3
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
    baseline: Baseline, timeline: Timeline, *, most_microbatches: int | None = None
) -> Plan:
    """Weigh each lever, then the best of them together; refuse what does not fit."""
    refused: list[Refused] = []
    partition = _partition(baseline, refused)
    moved = partition is not None and partition.split != baseline.source.split
    counts = list(microbatches.ideas(baseline, most_microbatches))
    orders = _sort_out(schedule.ideas(baseline), refused)
    lapped = overlap.consider(baseline, timeline)
    options = [weigh(baseline, idea) for idea in counts]
    if partition is not None and moved:
        options.append(weigh(baseline, Idea(lever="split", change=Change(split=partition.split))))
    options += [weigh(baseline, idea) for idea in _quickest(baseline, orders)]
    if lapped is not None:
        options.append(lapped.option)
    options += _together(baseline, partition if moved else None, orders, most_microbatches)
    fitting = [one for one in options if one.fits_memory is not False]
    refused += [_too_large(one) for one in options if one.fits_memory is False]
    ranked = sorted(fitting, key=lambda one: -one.throughput_gain)
    return Plan(
        baseline=baseline,
        options=tuple(ranked),
        refused=tuple(refused),
        partition=partition,
        overlap=lapped,
    )


def _partition(baseline: Baseline, refused: list[Refused]) -> Partition | None:
    try:
        return best_split(baseline, Change())
    except UsageError as error:
        refused.append(Refused(lever="split", change=Change(), reason=error.message))
        return None


def _sort_out(found: Iterable[Idea | Refused], refused: list[Refused]) -> list[Idea]:
    ideas = []
    for one in found:
        if isinstance(one, Refused):
            refused.append(one)
        else:
            ideas.append(one)
    return ideas


def _quickest(baseline: Baseline, ideas: Sequence[Idea]) -> list[Idea]:
    return sorted(ideas, key=lambda idea: quick_latency_s(baseline, idea.change))[:_SHOWN]


def _together(
    baseline: Baseline,
    partition: Partition | None,
    orders: Sequence[Idea],
    most: int | None,
) -> list[Option]:
    """Combine the best schedules and counts, each with a split of its own."""
    schedules = [Idea(lever="combined", change=Change()), *_quickest(baseline, orders)]
    found = []
    for one in schedules:
        for count in (None, *microbatches.counts(baseline, most)[:2]):
            change = replace(one.change, microbatches=count)
            levers = (count is not None) + (change.schedule is not None) + (partition is not None)
            if levers < 2:
                continue
            try:
                change = replace(change, split=best_split(baseline, change).split)
            except UsageError:
                continue
            found.append(Idea(lever="combined", change=change, assumptions=one.assumptions))
    rate = {
        id(idea): (idea.change.microbatches or baseline.source.microbatches)
        / quick_latency_s(baseline, idea.change)
        for idea in found
    }
    best = sorted(found, key=lambda idea: -rate[id(idea)])[:_SHOWN]
    return [weigh(baseline, idea) for idea in best]


def _too_large(option: Option) -> Refused:
    worst = min((one.bytes for one in option.headroom or () if one.bytes is not None), default=0.0)
    return Refused(
        lever=option.lever,
        change=option.change,
        reason=f"a rank would need {show_bytes(-worst)} more memory than it has",
    )
