"""A baseline in → every lever weighed, alone and together, ranked by throughput."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from debubble.errors import NoSplitFits, UsageError
from debubble.ledger.hop_health import LinkHealth
from debubble.plan.baseline import Baseline
from debubble.plan.change import Change, Hold
from debubble.plan.kv_cache import Cache, CachePlan, plan_cache
from debubble.plan.lever import ALL, Permissions, Refused, Start, Weighed
from debubble.plan.levers import LEVERS
from debubble.plan.levers.link import Repair
from debubble.plan.levers.microbatches import HOLDS, cuts_evenly
from debubble.plan.levers.microbatches import counts as counts_worth_trying
from debubble.plan.levers.overlap import Overlap
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
from debubble.plan.split import Partition, best_split
from debubble.simulate.program import OrderCycle
from debubble.timeline.model import Timeline
from debubble.units import show_bytes

_NEVER_ENDS = "posted as this run posts them, its messages would wait for each other in a circle"
# Of all combinations of a kind so many are looked at closely and shown.
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
    """By throughput; those that change training after all others."""
    refused: tuple[Refused, ...]
    partition: Partition | None
    overlap: Overlap | None
    repairs: tuple[Repair, ...] = ()
    """Of slow links, each alone, and all together."""
    links: LinkHealth | None = None
    """What each hop takes and costs, as all verbs have it."""
    batch_may_grow: bool = False
    """A larger batch competes like anything else: it was asked for, or nothing is trained."""
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

    @property
    def best(self) -> Option | None:
        """What to do first: of the recommended ones that leave training as it is."""
        return next((one for one in self.recommended if not self.changes_training(one)), None)

    def changes_training(self, option: Option) -> bool:
        """Tell whether an option trains with a larger global batch, which nobody asked for."""
        return option.change.grows_batch and not self.batch_may_grow

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
    start = Start(
        baseline=baseline,
        timeline=timeline,
        partition=_partition(baseline, refused) if allowed.split else None,
        most_microbatches=most_microbatches,
        links=links,
    )
    ideas, weighed = _ideas(start, refused, allowed)
    options = [weigh(baseline, idea) for idea in ideas]
    for own in weighed:
        option = own.option
        # A repair takes no memory that the run does not take already.
        if option.fits_memory is False and not option.change.repaired:
            refused.append(_too_large(option.lever, option.change, option.headroom))
        else:
            options.append(option)
    cached = None
    if cache is not None:
        try:
            best = start.partition.split if start.partition else None
            cached = plan_cache(baseline, cache, best)
        except UsageError as error:
            refused.append(Refused(lever="kv_cache", change=Change(), reason=str(error)))
    repairs = [own for own in weighed if isinstance(own, Repair)]
    options += _on_top_of_repairs(start, repairs, allowed)
    may_grow = allowed.hold == "microbatch" or not baseline.trains
    options.sort(key=lambda one: (one.change.grows_batch and not may_grow, -one.throughput_gain))
    return Plan(
        baseline=baseline,
        options=tuple(options),
        batch_may_grow=may_grow,
        refused=tuple(refused),
        cache=cached,
        partition=start.partition,
        overlap=next((own for own in weighed if isinstance(own, Overlap)), None),
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
    start: Start, refused: list[Refused], allowed: Permissions
) -> tuple[list[Idea], list[Weighed]]:
    """Return what is worth a closer look, each lever alone and the best together.

    What a lever has weighed by itself is apart.
    """
    baseline = start.baseline
    weighed: list[Weighed] = []

    def keep(found: Iterable[Idea | Weighed | Refused]) -> list[Idea]:
        """Keep what is allowed and may fit; the rest is refused before any time is spent on it."""
        ideas = []
        for idea in found:
            if not isinstance(idea, Idea | Refused):
                weighed.append(idea)
            elif not allowed.permits(idea.change, baseline.source.chunks):
                continue
            elif isinstance(idea, Refused):
                refused.append(idea)
            elif all_fit(left := headroom_after(baseline, idea.change)) is False:
                refused.append(_too_large(idea.lever, idea.change, left))
            else:
                ideas.append(idea)
        return ideas

    alone: dict[str, list[Idea]] = {}
    for lever in LEVERS:
        if allowed.bars(lever.key):
            continue
        ideas = keep(lever.ideas(start))
        if lever.shown is not None:
            ideas = _most(baseline, ideas, refused, lever.shown)
        alone[lever.key] = ideas
    ideas = [idea for found in alone.values() for idea in found]
    ideas += _most_of_each_kind(
        baseline, keep(_together(start, alone["schedule"], allowed.hold)), refused
    )
    return ideas, weighed


def _too_large(lever: str, change: Change, left: Sequence[Headroom] | None) -> Refused:
    worst = min((rank.bytes for rank in left or () if rank.bytes is not None), default=0.0)
    return Refused(
        lever=lever,
        change=change,
        reason=f"a rank would need {show_bytes(-worst)} more memory than it has",
    )


def _most(
    baseline: Baseline, ideas: Sequence[Idea], refused: list[Refused], shown: int = _SHOWN
) -> list[Idea]:
    """Return the few that do the most work a second, by means; what could not end is refused."""
    timed = []
    for idea in ideas:
        count = idea.change.microbatches or baseline.source.microbatches
        work = count * baseline.microbatch_scale(idea.change)
        try:
            timed.append((quick_latency_s(baseline, idea.change) / work, idea))
        except OrderCycle:
            refused.append(Refused(lever=idea.lever, change=idea.change, reason=_NEVER_ENDS))
    return [idea for _, idea in sorted(timed, key=lambda pair: pair[0])[:shown]]


def _most_of_each_kind(
    baseline: Baseline, ideas: Sequence[Idea], refused: list[Refused]
) -> list[Idea]:
    """Return the best few of each kind: larger batches, or cut ones, crowd out nothing else."""
    kinds: dict[tuple[bool, Hold], list[Idea]] = {}
    for idea in ideas:
        kind = idea.change.microbatches is not None, idea.change.hold
        kinds.setdefault(kind, []).append(idea)
    return [
        idea
        for (counted, hold), alike in kinds.items()
        # How cut microbatches fare is the least sure: one of them is enough.
        for idea in _most(baseline, alike, refused, 1 if counted and hold == "batch" else _SHOWN)
    ]


def _together(start: Start, orders: Sequence[Idea], hold: Hold | None) -> Iterator[Idea]:
    """Combine the best schedules and counts, with the best split where stages are as many."""
    baseline = start.baseline
    counts = counts_worth_trying(baseline, start.most_microbatches)[:2]
    sizes = [Change()]
    for held in HOLDS if hold is None else (hold,):
        changes = (Change(microbatches=count, hold=held) for count in counts)
        sizes += [change for change in changes if cuts_evenly(baseline, change)]
    splits = dict(_splits_by_size(start, sizes))
    for idea in (Idea(lever="combined", change=Change()), *orders[:_COMBINED]):
        for size in sizes:
            change = replace(idea.change, microbatches=size.microbatches, hold=size.hold)
            try:
                stages = len(baseline.what_if(change).layers)
            except UsageError:
                continue
            split = splits.get(size)
            split = split if split and len(split) == stages else None
            levers = (change.microbatches, change.schedule, split)
            if sum(lever is not None for lever in levers) > 1:
                change = replace(change, split=split)
                yield Idea(lever="combined", change=change, assumptions=idea.assumptions)


def _splits_by_size(
    start: Start, sizes: Sequence[Change]
) -> Iterator[tuple[Change, tuple[int, ...]]]:
    """Yield the best split for each size of a batch: a short one likes its last stage small."""
    baseline, partition = start.baseline, start.partition
    if partition is None or partition.split == baseline.source.split:
        return
    for size in sizes:
        split = partition.split
        if size.microbatches is not None:
            with suppress(UsageError, NoSplitFits):
                split = best_split(baseline, size, near=partition.split).split
        yield size, split


def _on_top_of_repairs(
    start: Start, repairs: Sequence[Repair], allowed: Permissions
) -> Iterator[Option]:
    """Weigh the best of the other levers on the run with its best repair, where that pays."""
    if not repairs or repairs[0].option.throughput_low <= WORTH:
        return
    mended, hops = repairs[0].baseline, repairs[0].option.change.repaired
    repaired = replace(start, baseline=mended, partition=_partition(mended, []))
    ideas, _ = _ideas(repaired, [], replace(allowed, link=False, overlap=False))
    sized = [
        idea
        for idea in ideas
        if mended.microbatch_scale(idea.change) == 1.0
        and not (idea.change.grows_batch and mended.trains and allowed.hold is None)
    ]
    for idea in _most(mended, sized, [])[:_COMBINED]:
        change = replace(idea.change, repaired=hops)
        yield weigh(mended, replace(idea, lever="combined", change=change))
