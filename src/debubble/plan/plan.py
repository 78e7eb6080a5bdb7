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
    weigh,
)
from debubble.plan.overlap import Overlap
from debubble.plan.partition import Partition
from debubble.plan.schedule import ALL, Allowed, Refused
from debubble.plan.split import best_split, quick_latency_s
from debubble.timeline.model import Timeline
from debubble.units import show_bytes

# Of each lever so many are looked at closely and shown.
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
            one for one in self.options if one.throughput_low > WORTH and not self.is_guess(one)
        )

    @property
    def unsure(self) -> tuple[Option, ...]:
        """The options that should gain and fit, but may be noise."""
        return tuple(
            one
            for one in self.options
            if one.throughput_gain > 0 and one not in self.recommended and not self.is_guess(one)
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
    allowed: Allowed = ALL,
) -> Plan:
    """Weigh each lever, then the best of them together; refuse what does not fit."""
    refused: list[Refused] = []
    partition = _partition(baseline, refused) if allowed.split else None
    ideas = _ideas(baseline, partition, most_microbatches, refused, allowed)
    options = [weigh(baseline, idea) for idea in ideas]
    lapped = overlap.consider(baseline, timeline) if allowed.overlap else None
    if lapped is not None and lapped.option.fits_memory is not False:
        options.append(lapped.option)
    elif lapped is not None:
        refused.append(
            _too_large(lapped.option.lever, Change(overlap=True), lapped.option.headroom)
        )
    held = None if cache is None else _cached(baseline, cache, partition, refused)
    mended = link.repairs(baseline, timeline, links) if allowed.link else []
    options += [one.option for one in mended]
    options += _on_top_of_repairs(mended, most_microbatches)
    return Plan(
        baseline=baseline,
        options=tuple(sorted(options, key=lambda one: -one.throughput_gain)),
        refused=tuple(refused),
        cache=held,
        partition=partition,
        overlap=lapped,
        repairs=tuple(mended),
        links=links,
    )


def _ideas(
    baseline: Baseline,
    partition: Partition | None,
    most: int | None,
    refused: list[Refused],
    allowed: Allowed = ALL,
) -> list[Idea]:
    """Return what is worth a closer look: each lever alone, the best together."""
    chunks = baseline.source.chunks
    if partition is not None and partition.split == baseline.source.split:
        partition = None
    known = allowed.of(schedule.ideas(baseline), chunks)
    orders = _most(baseline, _sort_out(baseline, known, refused))
    alone: list[Idea | Refused] = list(microbatches.ideas(baseline, most))
    if partition is not None:
        alone.append(Idea(lever="split", change=Change(split=partition.split)))
    if baseline.schedule != "forward-only" and baseline.source.split is not None:
        alone.append(recompute_idea(baseline))
    ideas = _sort_out(baseline, allowed.of(alone, chunks), refused) + orders
    found = _together(baseline, partition, orders, most, allowed.hold or "microbatch")
    return ideas + _most(baseline, _sort_out(baseline, allowed.of(found, chunks), refused))


def recompute_idea(baseline: Baseline) -> Idea:
    """Return the other way to have activations: recomputed, or kept."""
    return Idea(lever="recompute", change=Change(recompute=not baseline.ranks[0].recomputes))


def _partition(baseline: Baseline, refused: list[Refused]) -> Partition | None:
    try:
        return best_split(baseline, Change())
    except (UsageError, NoSplitFits) as error:
        refused.append(Refused(lever="split", change=Change(), reason=error.message))
        return None


def _cached(
    baseline: Baseline, cache: Cache, partition: Partition | None, refused: list[Refused]
) -> CachePlan | None:
    try:
        return plan_cache(baseline, cache, partition.split if partition else None)
    except UsageError as error:
        refused.append(Refused(lever="kv_cache", change=Change(), reason=str(error)))
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
                stages = len(baseline.what_if(change).layers)
            except UsageError:
                continue
            split = splits.get(count)
            split = split if split and len(split) == stages else None
            levers = (count is not None) + (change.schedule is not None) + (split is not None)
            if levers > 1:
                change = replace(change, split=split)
                yield Idea(lever="combined", change=change, assumptions=one.assumptions)


def _on_top_of_repairs(repairs: Sequence[Repair], most: int | None) -> Iterator[Option]:
    """Weigh the best of the other levers on the run with its best repair, where that pays."""
    if not repairs or repairs[0].option.throughput_low <= WORTH:
        return
    mended, hops = repairs[0].baseline, repairs[0].option.change.repaired
    ideas = _ideas(mended, _partition(mended, []), most, [])
    sized = [idea for idea in ideas if idea.change.hold == "microbatch"]
    for idea in _most(mended, sized)[:_COMBINED]:
        change = replace(idea.change, repaired=hops)
        yield weigh(mended, replace(idea, lever="combined", change=change))


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


def _too_large(lever: str, change: Change, left: Sequence[Headroom] | None) -> Refused:
    worst = min((one.bytes for one in left or () if one.bytes is not None), default=0.0)
    return Refused(
        lever=lever,
        change=change,
        reason=f"a rank would need {show_bytes(-worst)} more memory than it has",
    )
