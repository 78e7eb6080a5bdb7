"""A baseline in → every lever weighed, alone and together, ranked by throughput."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from debubble.errors import NoSplitFits, UsageError
from debubble.ledger.hop_health import LinkHealth
from debubble.plan import link, microbatches, overlap, schedule
from debubble.plan.baseline import Baseline
from debubble.plan.change import Change, Hold
from debubble.plan.kv_cache import Cache, CachePlan, plan_cache
from debubble.plan.link import Repair
from debubble.plan.option import (
    Headroom,
    Idea,
    Option,
    all_fit,
    collect_later,
    headroom_after,
    quick_latency_s,
    weigh,
)
from debubble.plan.overlap import Overlap
from debubble.plan.schedule import ALL, Permissions, Refused
from debubble.plan.split import Partition, best_split
from debubble.simulate.program import OrderCycle
from debubble.timeline.model import Timeline
from debubble.units import show_bytes

# Of each lever so many are looked at closely and shown.
_NEVER_ENDS = "posted as this run posts them, its messages would wait for each other in a circle"
_SHOWN = 3
# Of the best schedules so many are combined with other levers.
_COMBINED = 2
# What buys less is not worth doing, whatever its interval.
WORTH = 0.01
# What should buy this much may be worth a try where its interval is wide: repeated runs differ by
# less (`predict.py` has the measurement).
WORTH_A_TRY = 0.03


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What could be done, the most promising first."""

    baseline: Baseline
    options: tuple[Option, ...]
    refused: tuple[Refused, ...]
    partition: Partition | None
    overlap: Overlap | None
    repairs: tuple[Repair, ...] = ()
    """Of slow links, each alone, and all together."""
    links: LinkHealth | None = None
    """What each hop takes and costs, as all verbs have it."""
    cache: CachePlan | None = None
    """What splits leave for a KV cache, where that was asked and can be told."""

    @property
    def recommended(self) -> tuple[Option, ...]:
        """The options whose gain is beyond the noise, and that fit."""
        return tuple(
            option
            for option in self.options
            if option.throughput_low > WORTH and not self.is_guess(option)
        )

    @property
    def unsure(self) -> tuple[Option, ...]:
        """The options that should gain and fit, but may be noise."""
        return tuple(
            option
            for option in self.options
            if option.throughput_gain > 0
            and option.throughput_low <= WORTH
            and not self.is_guess(option)
        )

    def is_guess(self, option: Option) -> bool:
        """Tell whether the run cannot show what an option does."""
        unseen = self.overlap is not None and self.overlap.slowdown is None
        no_memory = option.lever == "recompute" and option.headroom is None
        return (option.lever == "overlap" and unseen) or no_memory

    def baseline_for(self, option: Option) -> Baseline:
        """Return what an option was weighed on: the run, or the run with a link repaired."""
        for repair in self.repairs:
            if option.change.repaired == repair.option.change.repaired:
                return repair.baseline
        return self.baseline


@collect_later()
def make_plan(  # noqa: PLR0913 (a run, and what is known and wanted besides)
    baseline: Baseline,
    timeline: Timeline,
    *,
    most_microbatches: int | None = None,
    links: LinkHealth | None = None,
    cache: Cache | None = None,
    allowed: Permissions = ALL,
) -> Plan:
    """Weigh each lever, then the best of them together; refuse what does not fit."""
    refused: list[Refused] = []
    partition = _partition(baseline, refused) if allowed.split else None
    ideas = _ideas(baseline, partition, most_microbatches, refused, allowed)
    options = [weigh(baseline, idea) for idea in ideas]
    lapped = overlap.consider(baseline, timeline) if allowed.overlap else None
    if lapped is not None and lapped.option.fits_memory is False:
        refused.append(_too_large("overlap", lapped.option.change, lapped.option.headroom))
    elif lapped is not None:
        options.append(lapped.option)
    cached = None
    if cache is not None:
        try:
            cached = plan_cache(baseline, cache, partition.split if partition else None)
        except UsageError as error:
            refused.append(Refused(lever="kv_cache", change=Change(), reason=str(error)))
    repairs = link.repairs(baseline, timeline, links) if allowed.link else []
    options += [repair.option for repair in repairs]
    options += _on_top_of_repairs(repairs, most_microbatches)
    return Plan(
        baseline=baseline,
        options=tuple(sorted(options, key=lambda option: -option.throughput_gain)),
        refused=tuple(refused),
        cache=cached,
        partition=partition,
        overlap=lapped,
        repairs=tuple(repairs),
        links=links,
    )


def _partition(baseline: Baseline, refused: list[Refused]) -> Partition | None:
    try:
        return best_split(baseline, Change())
    except (UsageError, NoSplitFits) as error:
        refused.append(Refused(lever="split", change=Change(), reason=error.message))
        return None


def _ideas(
    baseline: Baseline,
    partition: Partition | None,
    most: int | None,
    refused: list[Refused],
    allowed: Permissions = ALL,
) -> list[Idea]:
    """Return what is worth a closer look: each lever alone, the best together."""

    def keep(found: Iterable[Idea | Refused]) -> list[Idea]:
        """Keep what is allowed and may fit; the rest is refused before any time is spent on it."""
        ideas = []
        for idea in allowed.of(found, baseline.source.chunks):
            if isinstance(idea, Refused):
                refused.append(idea)
                continue
            left = headroom_after(baseline, idea.change)
            if all_fit(left) is False:
                refused.append(_too_large(idea.lever, idea.change, left))
            else:
                ideas.append(idea)
        return ideas

    if partition is not None and partition.split == baseline.source.split:
        partition = None
    orders = _most(baseline, keep(schedule.ideas(baseline)), refused)
    alone: list[Idea | Refused] = list(microbatches.ideas(baseline, most))
    if partition is not None:
        alone.append(Idea(lever="split", change=Change(split=partition.split)))
    if baseline.schedule != "forward-only" and baseline.source.split is not None:
        # The other way to have activations: recomputed, or kept.
        other = Change(recompute=not baseline.ranks[0].recomputes)
        alone.append(Idea(lever="recompute", change=other))
    together = _together(baseline, partition, orders, most, allowed.hold or "microbatch")
    return keep(alone) + orders + _most(baseline, keep(together), refused)


def _too_large(lever: str, change: Change, left: Sequence[Headroom] | None) -> Refused:
    worst = min((rank.bytes for rank in left or () if rank.bytes is not None), default=0.0)
    return Refused(
        lever=lever,
        change=change,
        reason=f"a rank would need {show_bytes(-worst)} more memory than it has",
    )


def _most(baseline: Baseline, ideas: Sequence[Idea], refused: list[Refused]) -> list[Idea]:
    """Return the few that do the most work a second, by means; what could not end is refused."""
    timed = []
    for idea in ideas:
        count = idea.change.microbatches or baseline.source.microbatches
        work = count * baseline.microbatch_scale(idea.change)
        try:
            timed.append((quick_latency_s(baseline, idea.change) / work, idea))
        except OrderCycle:
            refused.append(Refused(lever=idea.lever, change=idea.change, reason=_NEVER_ENDS))
    return [idea for _, idea in sorted(timed, key=lambda pair: pair[0])[:_SHOWN]]


def _together(
    baseline: Baseline,
    partition: Partition | None,
    orders: Sequence[Idea],
    most: int | None,
    hold: Hold,
) -> Iterator[Idea]:
    """Combine the best schedules and counts, with the best split where stages are as many."""
    counts = microbatches.counts(baseline, most)[:2]
    splits = dict(_splits_by_count(baseline, partition, counts, hold))
    for idea in (Idea(lever="combined", change=Change()), *orders[:_COMBINED]):
        for count in (None, *counts):
            change = replace(idea.change, microbatches=count, hold=hold)
            try:
                stages = len(baseline.what_if(change).layers)
            except UsageError:
                continue
            split = splits.get(count)
            split = split if split and len(split) == stages else None
            levers = (count is not None) + (change.schedule is not None) + (split is not None)
            if levers > 1:
                change = replace(change, split=split)
                yield Idea(lever="combined", change=change, assumptions=idea.assumptions)


def _splits_by_count(
    baseline: Baseline, partition: Partition | None, counts: Sequence[int], hold: Hold
) -> Iterator[tuple[int | None, tuple[int, ...]]]:
    """Yield the best split for each count: a short batch likes its last stage small."""
    if partition is None:
        return
    yield None, partition.split
    for count in counts:
        try:
            change = Change(microbatches=count, hold=hold)
            yield count, best_split(baseline, change, near=partition.split).split
        except (UsageError, NoSplitFits):
            yield count, partition.split


def _on_top_of_repairs(repairs: Sequence[Repair], most: int | None) -> Iterator[Option]:
    """Weigh the best of the other levers on the run with its best repair, where that pays."""
    if not repairs or repairs[0].option.throughput_low <= WORTH:
        return
    mended, hops = repairs[0].baseline, repairs[0].option.change.repaired
    ideas = _ideas(mended, _partition(mended, []), most, [])
    sized = [idea for idea in ideas if idea.change.hold == "microbatch"]
    for idea in _most(mended, sized, [])[:_COMBINED]:
        change = replace(idea.change, repaired=hops)
        yield weigh(mended, replace(idea, lever="combined", change=change))
