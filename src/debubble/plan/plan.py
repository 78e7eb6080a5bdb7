"""A baseline in → every lever weighed, alone and together, ranked by throughput."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice

from debubble.errors import CannotBeTold, NoSplitFits, UsageError
from debubble.ledger.hop_health import LinkHealth
from debubble.ledger.ledger import Ledger
from debubble.plan.advice import WORTH, Advice, advise, first_of
from debubble.plan.baseline import MOST_PASSES, Baseline, even_split
from debubble.plan.by_replay import replayed_options
from debubble.plan.change import SEARCHED, Change, Hold
from debubble.plan.lever import (
    Lever,
    OrderSearch,
    OwnOption,
    Permissions,
    Start,
)
from debubble.plan.levers import LEVERS
from debubble.plan.levers.link import Repair
from debubble.plan.levers.microbatches import HOLDS, cuts_evenly
from debubble.plan.levers.microbatches import counts as counts_worth_trying
from debubble.plan.levers.order import OrderChoice
from debubble.plan.levers.overlap import Overlap
from debubble.plan.option import (
    Headroom,
    Idea,
    Option,
    all_fit,
    collect_later,
    cuts_untold,
    headroom_after,
    quick_latency_s,
    weigh,
)
from debubble.plan.split import Partition, best_split
from debubble.simulate.events import OrderCycle
from debubble.timeline.model import Timeline
from debubble.timeline.steps import numbered
from debubble.units import show_bytes

_NEVER_ENDS = "it would deadlock with messages posted as in this run"
# Of all combinations of a kind so many are looked at closely and shown.
_SHOWN = 3
# Of the best schedules so many are combined with other levers.
_COMBINED = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What could be done, the most promising first."""

    baseline: Baseline
    options: tuple[Option, ...]
    """By throughput; those that change training after all others."""
    refused: tuple[Idea, ...]
    """What does not fit, or cannot be cut or run."""
    partition: Partition | None
    overlap: Overlap | None
    repairs: tuple[Repair, ...] = ()
    """Of slow links, each alone, and all together."""
    framework: str | None = None
    """Whom the options can be told to, by its name among emitters; None where to any."""
    left_out: tuple[Idea, ...] = ()
    """What that framework cannot be told, and so was not weighed."""
    batch_may_grow: bool = False
    """A larger batch competes like anything else: it was asked for, or nothing is trained."""
    ordered: OrderChoice | None = None
    """An order of its own, where one was looked for and is quicker than those with a name."""

    @property
    def recommended(self) -> tuple[Option, ...]:
        """The options whose gain is beyond the noise, and that fit."""
        return tuple(option for option in self.options if self.advice(option) == "yes")

    @property
    def to_try(self) -> tuple[Option, ...]:
        """The options that should gain, and are not sure to; none that changes training."""
        return tuple(
            option
            for option in self.options
            if self.advice(option) in {"try", "maybe"} and not self.changes_training(option)
        )

    @property
    def best(self) -> Option | None:
        """What to do first: of the recommended ones that leave training as it is."""
        return next(
            (option for option in self.recommended if not self.changes_training(option)), None
        )

    @property
    def first(self) -> Option | None:
        """What the plan begins with: what is sure to gain, else fits, else is worth a try."""
        same = [option for option in self.options if not self.changes_training(option)]
        return first_of(same, self.advice, self.remedy)

    @property
    def remedy(self) -> Option | None:
        """Of a run that is over its limit, what fits at the lowest price.

        What a run cannot show comes after what it can.
        """
        over = self.baseline.over_limit_bytes
        if over is None or over <= 0:
            return None
        fits = [
            option
            for option in self.options
            if option.fits_memory and not self.changes_training(option)
        ]
        return max(
            fits, key=lambda option: (not self.unseen(option), option.throughput_gain), default=None
        )

    def changes_training(self, option: Option) -> bool:
        """Tell whether an option trains with a larger global batch, which nobody asked for."""
        return option.change.grows_batch and not self.batch_may_grow

    def advice(self, option: Option) -> Advice:
        """Return whether to do it."""
        gains = option.throughput_gain, option.throughput_low, option.throughput_high
        return advise(*gains, unseen=bool(self.unseen(option)))

    def unseen(self, option: Option) -> str:
        """Return why the run cannot show what an option does; empty where it can."""
        if cuts_untold(self.baseline, option.change):
            return "the time of weight gradients is not measured"
        if self.overlap is not None and self.overlap.slowdown is None and option.lever == "overlap":
            return "this run has no overlap to learn from"
        if option.lever == "recompute" and option.headroom is None:
            return "memory growth is unknown"
        if self.baseline.microbatch_scale(option.change) < 1:
            return "this run has one microbatch size only"
        return ""

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
    ledger: Ledger | None = None,
    allowed: Permissions = Permissions(),  # noqa: B008 (frozen)
    search: OrderSearch | None = None,
) -> Plan:
    """Weigh each lever, then the best of them together; refuse what does not fit.

    What the framework that is planned for cannot be told is left out before anything is ranked.
    """
    if baseline.no_fit is not None:
        options = replayed_options(baseline, ledger, links)
        return Plan(
            baseline=baseline,
            options=tuple(sorted(options, key=lambda option: -option.throughput_gain)),
            refused=(),
            partition=None,
            overlap=None,
        )
    start = Start(
        baseline=baseline,
        timeline=timeline,
        most_microbatches=most_microbatches,
        links=links,
        search=search and replace(search, cuts_anew="split" not in allowed.barred),
    )
    if baseline.slow_ranks:
        allowed = replace(allowed, barred=allowed.barred | {"split"})
    sieve = _Sieve(start=start, allowed=allowed)
    if baseline.slow_ranks:
        slow = numbered("rank", baseline.slow_ranks)
        alone = len(baseline.slow_ranks) == 1
        reason = f"{slow} compute{'s' if alone else ''} slowly, no stage is too long for "
        reason += f"{'it: repair its device' if alone else 'them: repair their devices'} first"
        sieve.refuse(Idea(lever="split", change=Change()), reason)
    ideas = sieve.ideas()
    options = [weigh(baseline, idea) for idea in ideas]
    for own in sieve.weighed:
        option = own.option
        # A repair takes no memory that the run does not take already.
        if option.fits_memory is False and not option.change.repaired:
            sieve.refuse(option.idea, _too_large(option.headroom))
        else:
            options.append(option)
    partition = sieve.start.partition
    repairs = [own for own in sieve.weighed if isinstance(own, Repair)]
    options += _on_top_of_repairs(start, repairs, allowed)
    may_grow = allowed.hold == "microbatch" or not baseline.trains
    options.sort(
        key=lambda option: (option.change.grows_batch and not may_grow, -option.throughput_gain)
    )
    return Plan(
        baseline=baseline,
        options=tuple(options),
        framework=allowed.framework,
        left_out=tuple(sieve.left_out),
        batch_may_grow=may_grow,
        refused=tuple(sieve.refused),
        partition=partition,
        overlap=next((own for own in sieve.weighed if isinstance(own, Overlap)), None),
        ordered=next((own for own in sieve.weighed if isinstance(own, OrderChoice)), None),
        repairs=tuple(repairs),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedLever:
    """What one lever would do to a run, as a whole plan weighs it."""

    options: tuple[Option, ...] = ()
    refused: tuple[Idea, ...] = ()
    trains: bool = True
    """Whether the run has backward passes: then a larger global batch changes training."""
    unpriced: str = ""
    """Why nothing is predicted from this run; empty where it is."""


def price_lever(baseline: Baseline, timeline: Timeline, lever: Lever) -> PricedLever:
    """Weigh one lever alone, exactly as `make_plan` does."""
    if baseline.no_fit is not None:
        return PricedLever(unpriced=baseline.no_fit.message)
    sieve = _Sieve(
        start=Start(baseline=baseline, timeline=timeline),
        allowed=Permissions(framework=baseline.framework),
    )
    if lever.key == "split":
        sieve.find_partition()
    options = [weigh(baseline, idea) for idea in sieve.keep(lever.ideas(sieve.start))]
    return PricedLever(
        options=tuple(options),
        refused=(*sieve.refused, *sieve.left_out),
        trains=baseline.trains,
    )


@dataclass(slots=True, kw_only=True)
class _Sieve:
    """What is worth a closer look, and what becomes of the rest, as it is found."""

    start: Start
    allowed: Permissions
    refused: list[Idea] = field(default_factory=list)
    left_out: list[Idea] = field(default_factory=list)
    """What the framework cannot be told."""
    weighed: list[OwnOption] = field(default_factory=list)
    """What levers have weighed by themselves."""
    quick: dict[Change, float] = field(default_factory=dict)
    """What changes take by means, as far as that was asked."""

    def ideas(self) -> list[Idea]:
        """Return what is to be weighed: each lever alone, and the best together."""
        allowed = self.allowed
        self.find_partition()
        alone: dict[str, list[Idea]] = {}
        schedules: list[Idea] = []
        for lever in LEVERS:
            alone[lever.key] = []
            if lever.key in allowed.barred or (lever.key == "order" and not self._takes_orders()):
                continue
            if lever.probe is None or self._can_be_told(lever.key, lever.probe):
                alone[lever.key] = self.keep(lever.ideas(self.start))
            if lever.key == "schedule":
                schedules = self._best_with_split(alone[lever.key])
            if lever.shown is not None:
                alone[lever.key] = self.most(alone[lever.key], lever.shown)
        ideas = [idea for found in alone.values() for idea in found]
        # Of each kind the best few: larger batches, or cut ones, crowd out nothing else.
        kinds: dict[tuple[bool, Hold], list[Idea]] = {}
        for idea in self.keep(_together(self.start, schedules, allowed.hold)):
            change = idea.change
            kinds.setdefault((change.microbatches is not None, change.hold), []).append(idea)
        for (counted, hold), alike in kinds.items():
            # How cut microbatches fare is the least sure: one of them is enough.
            ideas += self.most(alike, 1 if counted and hold == "batch" else _SHOWN)
        return ideas

    def find_partition(self) -> None:
        """Find the best split, or remember why there is none."""
        baseline, allowed = self.start.baseline, self.allowed
        if "split" not in allowed.barred and self._can_be_told(
            "split", Change(split=baseline.source.split)
        ):
            ends = self._can_have_empty_ends()
            try:
                found = best_split(baseline, Change(), empty_ends=ends)
                self.start = replace(self.start, partition=found, empty_ends=ends)
            except (UsageError, NoSplitFits) as error:
                self.refuse(Idea(lever="split", change=Change()), error.with_cure)

    def _can_have_empty_ends(self) -> bool:
        """Tell whether the framework can be told of a stage without layers."""
        setting = self.start.baseline.setting
        others = setting.ranks * setting.chunks - 1
        if setting.layers is None or not 1 <= others <= setting.layers:
            return False
        split = (*even_split(setting.layers, others), 0)
        return self.allowed.refusal_of(Change(split=split), setting) is None

    def _takes_orders(self) -> bool:
        """Tell whether an order is looked for, and the framework can be told of one."""
        baseline = self.start.baseline
        if self.start.search is None:
            return False
        change = Change(schedule=SEARCHED, order=baseline.order)
        why = self.allowed.refusal_of(change, baseline.setting)
        if why is not None:
            # It was asked for: the answer stands where answers are looked for.
            reason = f"{self.allowed.framework} takes no order of passes; --for any looks for one"
            self.refuse(Idea(lever="order", change=Change()), reason)
        return why is None

    def refuse(self, idea: Idea, reason: str) -> None:
        """Remember what cannot run or does not fit."""
        self.refused.append(replace(idea, reason=reason))

    def _can_be_told(self, lever: str, probe: Change) -> bool:
        """Tell whether the framework has words for a lever at all, or remember that not."""
        why = self.allowed.refusal_of(probe, self.start.baseline.setting)
        if why is None:
            return True
        change = Change() if lever == "split" else probe
        self.left_out.append(Idea(lever=lever, change=change, reason=why.message))
        return False

    def keep(self, found: Iterable[Idea | OwnOption]) -> list[Idea]:
        """Keep what is allowed and may fit, before any time is spent on it."""
        baseline, allowed = self.start.baseline, self.allowed
        ideas = []
        for idea in found:
            if not isinstance(idea, Idea):
                self.weighed.append(idea)
                continue
            if not allowed.permits(idea.change, baseline.source.chunks):
                continue
            # What is done by hand no framework is told.
            tellable = replace(idea.change, by_hand=None)
            untold = allowed.refusal_of(tellable, baseline.setting)
            if isinstance(untold, CannotBeTold):
                if idea.lever != "combined":
                    why = untold.message
                    self.left_out.append(replace(idea, reason=why))
            elif idea.reason:
                self.refused.append(idea)
            elif untold is not None:
                self.refuse(idea, untold.message)
            elif all_fit(left := headroom_after(baseline, idea.change)) is False:
                self.refuse(idea, _too_large(left))
            else:
                ideas.append(idea)
        return ideas

    def most(self, ideas: Sequence[Idea], shown: int) -> list[Idea]:
        """Return the few that do most work a second, by means; what could not end is refused."""
        baseline = self.start.baseline
        timed = []
        for idea in ideas:
            count = idea.change.microbatches or baseline.source.microbatches
            work = count * baseline.microbatch_scale(idea.change)
            try:
                timed.append((self._latency_s(idea.change) / work, idea))
            except OrderCycle:
                self.refuse(idea, _NEVER_ENDS)
        ordered = [idea for _, idea in sorted(timed, key=lambda pair: pair[0])]
        # Where nothing tells what weights take, what cuts backward passes can only be tried: the
        # best that can be promised is not left out for it.
        tellable = (idea for idea in ordered[shown:] if not cuts_untold(baseline, idea.change))
        untold = all(cuts_untold(baseline, idea.change) for idea in ordered[:shown])
        return [*ordered[:shown], *islice(tellable, int(untold))]

    def _best_with_split(self, schedules: Sequence[Idea]) -> list[Idea]:
        """Return the best few schedules, each with the best split where it has as many stages.

        A schedule that cuts stages anew looks best where they are cut badly; with a better cut,
        others may be better by far.
        """
        baseline, partition = self.start.baseline, self.start.partition
        split = partition.split if partition else None
        timed = []
        for number, idea in enumerate(schedules):
            change = idea.change
            if split is not None and len(baseline.what_if(change).layers) == len(split):
                change = replace(change, split=split)
            if all_fit(headroom_after(baseline, change)) is not False:
                with suppress(OrderCycle):
                    timed.append((self._latency_s(change), number, idea))
        return [idea for _, _, idea in sorted(timed, key=lambda option: option[:2])[:_COMBINED]]

    def _latency_s(self, change: Change) -> float:
        """Return the batch latency of a change by means; many are asked for more than once."""
        if change not in self.quick:
            self.quick[change] = quick_latency_s(self.start.baseline, change)
        return self.quick[change]


def _too_large(left: Sequence[Headroom] | None) -> str:
    worst = min((rank.bytes for rank in left or () if rank.bytes is not None), default=0.0)
    return f"a rank would need {show_bytes(-worst)} more memory than it has"


def _together(start: Start, orders: Sequence[Idea], hold: Hold | None) -> Iterator[Idea]:
    """Combine the best schedules and counts, with the best split where stages are as many."""
    baseline = start.baseline
    counts = counts_worth_trying(baseline, start.most_microbatches)[:2]
    sizes = [Change()]
    for held in HOLDS if hold is None else (hold,):
        changes = (Change(microbatches=count, hold=held) for count in counts)
        sizes += [
            change
            for change in changes
            # A longer step shows no more than shorter ones do.
            if cuts_evenly(baseline, change) and baseline.most_passes(change) <= MOST_PASSES
        ]
    splits = dict(_splits_by_size(start, sizes))
    for idea in (Idea(lever="combined", change=Change()), *orders):
        for size in sizes:
            change = replace(idea.change, microbatches=size.microbatches, hold=size.hold)
            if size.microbatches is not None and baseline.most_passes(change) > MOST_PASSES:
                continue
            try:
                stages = len(baseline.what_if(change).layers)
            except UsageError:
                continue
            split = splits.get(size)
            split = split if split and len(split) == stages else None
            levers = (change.microbatches, change.schedule, split)
            change = replace(change, split=split)
            if sum(lever is not None for lever in levers) > 1:
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
                found = best_split(
                    baseline, size, near=partition.split, empty_ends=start.empty_ends
                )
                split = found.split
        yield size, split


def _on_top_of_repairs(
    start: Start, repairs: Sequence[Repair], allowed: Permissions
) -> Iterator[Option]:
    """Weigh the best of the other levers on the run with its best repair, where that pays."""
    if not repairs or repairs[0].option.throughput_low <= WORTH:
        return
    mended, hops = repairs[0].baseline, repairs[0].option.change.repaired
    others = replace(allowed, barred=allowed.barred | {"link", "overlap"})
    sieve = _Sieve(start=replace(start, baseline=mended, search=None), allowed=others)
    sized = [
        idea
        for idea in sieve.ideas()
        if mended.microbatch_scale(idea.change) == 1.0
        and not (idea.change.grows_batch and mended.trains and allowed.hold is None)
    ]
    for idea in sieve.most(sized, _COMBINED):
        change = replace(idea.change, repaired=hops)
        yield weigh(mended, replace(idea, lever="combined", change=change))
