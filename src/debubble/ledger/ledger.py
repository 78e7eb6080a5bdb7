"""A `Timeline` in → the `Ledger` of one pipeline: causes, culprits, savings.

`account_step` puts every nanosecond of a measured step under one cause. A wait belongs to what it
waited for last, and from there on back to what that waited for, as long as it waits: `Happened` of
the engine, over the edges that a replay runs on. Rank 1 waits here for its F 0, from 0 to 7:

    rank 0   [ F 0 ]──send─┐         0 to 4   rank 0's F 0: the send had nothing else to wait for
    rank 1   recv··········[ F 0 ]   4 to 7   the message, from when both sides were there

What is found is cut into causes: a pass by how far it was, a message by what its peers take.
`build_ledger` adds up the kept steps, and asks what each would take without each cause
(`savings.py`); `job_around` tells what a pipeline shares its batches with.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate, combinations, pairwise
from operator import or_
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from debubble.errors import Code, Gap
from debubble.ledger.causes import (
    CAUSES,
    NUMBER_OF,
    OF_KERNELS_AND_HOSTS,
    REMEDIES,
    Cause,
    RootKind,
    Stretch,
)
from debubble.ledger.savings import (
    HEAD_OF_LINE,
    Remedies,
    Remedy,
    Replays,
    replay_pairs,
    replay_step,
)
from debubble.links.hop_times import ExpectedTimes, Hop, expect_wire, wires_between
from debubble.simulate import events
from debubble.simulate.costs.passes import (
    PassCosts,
    collectives_of,
    data_parallel_of,
    fit_passes,
    inside_passes,
    measure_passes,
)
from debubble.simulate.costs.uneven_data import even_times
from debubble.simulate.engine import Engine
from debubble.simulate.events import OrderCycle
from debubble.simulate.measured import MeasuredStep, measure_step
from debubble.timeline.figures import PipelineFigures
from debubble.timeline.model import (
    I32,
    I64,
    U8,
    Flags,
    Intervals,
    PassKind,
    RankTimeline,
    Timeline,
    split,
    without,
)
from debubble.timeline.replicas import Workers
from debubble.timeline.steps import only_steps
from debubble.timeline.transfers import HopFigures
from debubble.units import counted, show_percent

if TYPE_CHECKING:
    from debubble.ledger.hop_health import LinkHealth


# What buys less than a fiftieth of the batch is not worth a name: steps vary by more.
MATTERS = 0.02
# Enough for medians; a capture of a thousand steps is not worth minutes.
_MOST_STEPS = 8
# What takes less of the time hides nothing worth a word, but hosts that stand until a collective is
# over: these show where it does not, and without it they come next.
_SEEN = 0.01
# Two remedies hide each other where together they buy so much of the batch more than one by one:
# steps vary by about as much.
_HIDES = 0.02


# A profiler adds to each launch. Megatron with experts, its hosts late for 20 % of the batch, was a
# fifth slower under it; other runs, late for 5 % or less, by a twentieth at most.
_HOSTS_LATE = 0.1
# A replay that misses the step as it is by more says nothing of a step that is changed.
MOST_OFF = 0.03


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """What a step would take without a cause, or without two: medians over the steps."""

    causes: tuple[str, ...]
    batch_latency_ns: int
    """The measured batch without what is saved: one baseline for all of them."""
    saved_ns: int

    @property
    def cause(self) -> str:
        """As it is written: `imbalance`, `imbalance+slow_link`."""
        return "+".join(self.causes)

    @property
    def saved_fraction(self) -> float:
        """Of the measured batch."""
        return self.saved_ns / max(self.batch_latency_ns + self.saved_ns, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What runs beside a pipeline, where a batch is as slow as the slowest of all."""

    workers: Workers = field(default_factory=Workers)
    """Of all pipelines, this one's too."""
    alike: tuple[int, ...] = ()
    """Other pipelines of the timeline: what data they hold counts where all are to hold as much."""
    beside: tuple[int, ...] = ()
    """Those of them that are replayed: a repair would reach them as well."""
    hops: tuple[HopFigures, ...] = ()
    """Of those: what hops of this one are held against, besides each other."""
    longest_ns: Mapping[int, int] = field(default_factory=dict)
    """Of each step, the longest window of all other pipelines."""
    not_replayed_ns: Mapping[int, int] = field(default_factory=dict)
    """The same of those that are not in `beside`: nothing puts their devices right."""
    batch_latency_ns: int | None = None
    """In the middle of the steps, the slowest pipeline's of each, where that is not this one."""

    def excess_of(self, pipeline: int) -> dict[tuple[int, int], int]:
        """Return what slow devices take more in a pipeline, by stage and kind of pass."""
        mine = [worker for worker in self.workers.slow if worker.pipeline == pipeline]
        return {key: more for worker in mine for key, more in worker.excess_ns.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """Where the time of a pipeline's steps went. Sums are over all steps, exact to the ns."""

    ranks: tuple[RankTimeline, ...]
    steps: tuple[MeasuredStep, ...]
    accounts: tuple[Account, ...]
    replays: tuple[Replays, ...]
    """Empty where the order of the passes contradicts itself."""
    remedies: tuple[Remedies, ...]
    culprits: tuple[Culprit, ...]
    savings: tuple[Saving, ...]
    """The largest first."""
    gaps: tuple[Gap, ...]
    middle: tuple[int, ...]
    """The rows of the step, or the two, in the middle by bubble: what is said of "the batch"."""
    batch_latency_ns: int
    """What shares are of: the measured batch in the middle of the kept steps."""
    job: Job
    links: LinkHealth | None = None
    """What each hop takes, whether it is slow and what that costs: told here for all who ask."""

    @property
    def total_ns(self) -> int:
        """Ranks times window, all steps."""
        return len(self.ranks) * sum(int(step.times.pass_end.max()) for step in self.steps)

    @property
    def job_latency_ns(self) -> int:
        """What savings are of: the batch of the slowest pipeline."""
        if self.savings:
            return self.savings[0].batch_latency_ns + self.savings[0].saved_ns
        return self.batch_latency_ns

    def saved_by(self, remedy: Remedy) -> int:
        """Return what putting something right in this pipeline would save the job: the median."""
        saved = []
        for remedies in self.remedies:
            before, after = remedies.replay([remedies.step.lengths, remedy(remedies)])
            took = int(remedies.step.times.window_ns)
            others = self.job.longest_ns.get(remedies.step.number, 0)
            saved.append(max(took, others) - max(took - before + after, others))
        return round(median(saved))

    @property
    def absent(self) -> tuple[int, ...]:
        """The ranks of the pipeline that have no trace: waits for them are unexplained."""
        captured = {rank.rank for rank in self.ranks}
        return tuple(rank for rank in self.ranks[0].members if rank not in captured)

    def causes(self, place: int | None = None) -> dict[Cause, int]:
        """Return the nanoseconds under each cause, of all ranks or of one."""
        total = dict.fromkeys(Cause, 0)
        for account in self.accounts:
            mine = account if place is None else account.where(account.place == place)
            for cause, length in mine.totals().items():
                total[cause] += length
        return total

    def shares(self, place: int | None = None) -> dict[Cause, float]:
        """Return the share of each cause in the batch: of its middle steps, as the headline is."""
        total = dict.fromkeys(Cause, 0.0)
        for row in self.middle:
            account = self.accounts[row]
            mine = account if place is None else account.where(account.place == place)
            length = int(self.steps[row].times.pass_end.max())
            length *= len(self.ranks) if place is None else 1
            for cause, spent in mine.totals().items():
                total[cause] += spent / max(length, 1) / len(self.middle)
        return total

    @property
    def replay_error(self) -> float | None:
        """How far the replay of the unchanged step lands from the measured window; the worst."""
        errors = [replay.unchanged_ns / replay.measured_ns - 1 for replay in self.replays]
        return max(errors, key=abs) if errors else None

    def saving_of(self, cause: str) -> Saving | None:
        """Return what removing a cause would buy."""
        return next((saving for saving in self.savings if saving.causes == (cause,)), None)


def build_ledger(  # noqa: PLR0913 (what else is known, one argument each)
    timeline: Timeline,
    pipeline: int,
    steps: Sequence[int],
    wires: Mapping[Hop, str] | None = None,
    *,
    batch_latency_ns: int | None = None,
    middle: Sequence[int] = (),
    job: Job | None = None,
) -> Ledger | None:
    """Account for the given steps of a pipeline, for some of them where they are many.

    Hops are held against those over the same kind of wire: as `wires` says, else by hosts. Savings
    are of the job's batch latency, as it is given or in the middle of these steps. Shares are of
    the `middle` steps, as they are given or by the account.
    """
    job = job or Job()
    ranks = timeline.ranks_of(pipeline)
    steps = sorted({*middle, *(steps[row] for row in _spread(len(steps)))})
    timeline = only_steps(timeline, steps)
    measured = tuple(measure_step(timeline, pipeline, step) for step in steps)
    if not measured:
        return None
    slope = fit_passes(timeline, pipeline).slope
    costs = {
        number: measure_passes(timeline.passes, timeline.ranks_of(number), job.excess_of(number))
        for number in {pipeline: None, **dict.fromkeys(job.alike)}
    }
    costs = {number: found.with_data(heavy) for (number, found), heavy in _weigh_data(costs, job)}
    even = even_times(cost.data for cost in costs.values())
    if not even:
        costs = {number: replace(found, data={}) for number, found in costs.items()}

    ran = {pipeline: measured}
    for number in job.beside:
        names = [rank.rank for rank in timeline.ranks_of(number)]
        known = np.unique(timeline.passes.step[np.isin(timeline.passes.rank, names)])
        ran[number] = tuple(measure_step(timeline, number, step) for step in steps if step in known)
    wires = wires_between(ranks) if wires is None else wires
    for number in job.beside:
        wires = wires_between(timeline.ranks_of(number)) | dict(wires)

    def remedies_of(number: int) -> tuple[Remedies, ...]:
        ranks, steps = timeline.ranks_of(number), ran[number]
        others = [mine for other, mine in ran.items() if other != number]
        return tuple(
            Remedies(
                step=step,
                costs=costs[number],
                collectives_ns=_inside(step, timeline, ranks, collectives_of),
                data_ns=_inside(step, timeline, ranks, data_parallel_of),
                late_ns=_inside(step, timeline, ranks, _late_host),
                kept_ns=_inside(step, timeline, ranks, _kept_host),
                expected=expected,
                slope=slope,
                even_data={kind: mean for (at, kind), mean in even.items() if at == step.number},
            )
            for step, expected in zip(steps, expect_wire(steps, wires, others), strict=True)
        )

    remedies = remedies_of(pipeline)
    accounts = tuple(
        account_step(remedy.step, ranks, costs[pipeline], remedy.expected) for remedy in remedies
    )
    gaps = [*_doubts(measured), *_slowed_hosts(measured, accounts)]
    try:
        by_cause = remedies_for(timers=ranks[0].timers)
        replays = tuple(replay_step(remedy, by_cause) for remedy in remedies)
    except OrderCycle as error:
        replays = ()
        gaps.append(Gap(code=Code.ORDER_CYCLE, message=f"no replay: {error}", hint=error.hint))
    beside: dict[int, list[Remedies]] = {step: [] for step in steps}
    for number in job.beside if replays else ():
        for remedy in remedies_of(number):
            beside[remedy.step.number].append(remedy)
    errors = [abs(replay.unchanged_ns / replay.measured_ns - 1) for replay in replays]
    if errors and median(errors) > MOST_OFF:
        replays = ()
        gaps.append(
            Gap(
                code=Code.REPLAY_MISSES,
                message=f"replay error {show_percent(median(errors))} (limit"
                f" {show_percent(MOST_OFF)}): no savings are predicted",
                hint="capture whole steps of all ranks, with kernels and messages; the shares of"
                " causes are measured and remain valid",
            )
        )
    return Ledger(
        ranks=ranks,
        steps=measured,
        accounts=accounts,
        replays=replays,
        remedies=remedies,
        culprits=find_culprits(measured, accounts, ranks),
        savings=_savings(
            replays,
            remedies,
            beside,
            accounts,
            job=job,
            batch_latency_ns=batch_latency_ns,
            timers=ranks[0].timers,
        ),
        gaps=tuple(gaps),
        middle=tuple(steps.index(step) for step in middle) or _middle_of(accounts),
        batch_latency_ns=batch_latency_ns
        or round(median(int(step.times.window_ns) for step in measured)),
        job=job,
    )


def _weigh_data(
    costs: Mapping[int, PassCosts], job: Job
) -> Iterator[tuple[tuple[int, PassCosts], float]]:
    """Yield each pipeline's costs, and how many times as long as elsewhere its data make them."""

    def lower_middle(values: Sequence[float]) -> float:
        return sorted(values)[(len(values) - 1) // 2]

    stages = {key for found in costs.values() for key in found.sound}
    usual = {
        key: lower_middle([found.sound[key] for found in costs.values() if key in found.sound])
        for key in stages
    }
    for number, found in costs.items():
        times = [length / usual[key] for key, length in found.sound.items()]
        yield (number, found), lower_middle(times) if number in job.workers.uneven else 1.0


def _middle_of(accounts: Sequence[Account]) -> tuple[int, ...]:
    """Return the step in the middle by its share of compute; of an even number, both."""
    useful = [account.total_of(Cause.COMPUTE) / account.length_ns.sum() for account in accounts]
    order = np.argsort(useful, kind="stable").tolist()
    return tuple(sorted(order[(len(order) - 1) // 2 : len(order) // 2 + 1]))


def _spread(count: int) -> list[int]:
    """Return all rows, or as many as are enough, at even distances."""
    return sorted({round(row) for row in np.linspace(0, count - 1, min(count, _MOST_STEPS))})


def _inside(
    step: MeasuredStep,
    timeline: Timeline,
    ranks: tuple[RankTimeline, ...],
    of: Callable[[RankTimeline], Intervals],
) -> I64:
    """Return how long each pass was in some intervals of its rank, in the order of the program."""
    passes = timeline.passes
    names = list(step.program.ranks)
    mine = passes.where((passes.step == step.number) & np.isin(passes.rank, names))
    place = np.array([names.index(rank) for rank in mine.rank.tolist()])
    order = np.lexsort((mine.start_ns, place))
    return inside_passes(mine, ranks, of)[order]


def _late_host(rank: RankTimeline) -> Intervals:
    """Return when a rank's host had not launched what runs next, and nothing kept it."""
    return without(rank.unissued, rank.synchronised)


def _kept_host(rank: RankTimeline) -> Intervals:
    """Return when a rank's host had not launched what runs next, after a call that kept it."""
    return without(rank.unissued, _late_host(rank))


def remedies_for(*, timers: bool) -> dict[Cause, Remedy]:
    """Return what can be put right; nothing that a job's own timers do not show."""
    return {
        cause: remedy
        for cause, remedy in REMEDIES.items()
        if not (timers and cause in OF_KERNELS_AND_HOSTS)
    }


def _savings(  # noqa: PLR0913 (a step's replays, and what else is known)
    replays: Sequence[Replays],
    remedies: Sequence[Remedies],
    beside: Mapping[int, Sequence[Remedies]],
    accounts: Sequence[Account],
    *,
    job: Job,
    batch_latency_ns: int | None,
    timers: bool,
) -> tuple[Saving, ...]:
    """Return what removing each cause would buy, and the pair of them that hide each other most.

    A cause is removed from all pipelines that are replayed: a batch is as slow as the slowest.
    """
    if not replays:
        return ()
    by_cause = remedies_for(timers=timers)
    together = [
        (mine, *(replay_step(remedy, by_cause) for remedy in beside[own.step.number]))
        for mine, own in zip(replays, remedies, strict=True)
    ]
    total = sum(int(account.length_ns.sum()) for account in accounts)
    seen = [
        cause
        for cause in by_cause
        if cause is not Cause.TRANSFER  # every pipeline has it, and no remedy removes it
        and sum(account.total_of(cause) for account in accounts)
        > (0 if cause is Cause.HOST_SYNC else _SEEN * total)
    ]
    pairs = list(combinations(seen, 2))
    in_pairs = [
        tuple(replay_pairs(remedy, by_cause, pairs) for remedy in (own, *beside[own.step.number]))
        for own in remedies
    ]

    def saved_in(step: int, without: Sequence[int], causes: Sequence[str]) -> int:
        """Hold the slowest pipeline of a step against the slowest without something.

        Pipelines that are not replayed keep slow devices, hold as much data as all others do, and
        gain of anything else what those that are replayed mostly do.
        """
        ran = together[step]
        after = [
            replay.measured_ns - replay.unchanged_ns + window
            for replay, window in zip(ran, without, strict=True)
        ]
        others = job.not_replayed_ns.get(remedies[step].step.number, 0)
        gains = [
            window / max(replay.measured_ns, 1) for replay, window in zip(ran, after, strict=True)
        ]
        left = 0.0 if Cause.DATA in causes else 1.0 if causes == (Cause.WORKER,) else median(gains)
        return max(others, *(replay.measured_ns for replay in ran)) - max(
            round(left * others), *after
        )

    def middle_of(windows: Sequence[Sequence[int]], causes: Sequence[str]) -> int:
        return round(median(saved_in(at, ran, causes) for at, ran in enumerate(windows)))

    saved: dict[tuple[str, ...], int] = {
        (cause,): middle_of(
            [[replay.without_ns[cause] for replay in ran] for ran in together], (cause,)
        )
        for cause in replays[0].without_ns
        if not (timers and cause == HEAD_OF_LINE)
    }
    whole = job.batch_latency_ns or batch_latency_ns
    whole = whole or round(median(max(replay.measured_ns for replay in ran) for ran in together))
    hidden: dict[tuple[str, str], int] = {}
    for pair in pairs:
        both = middle_of([[windows[pair] for windows in ran] for ran in in_pairs], pair)
        alone = sum(max(saved[(str(cause),)], 0) for cause in pair)
        if both - alone >= _HIDES * whole:
            hidden[(str(pair[0]), str(pair[1]))] = both
    if hidden:
        best = max(hidden, key=lambda pair: hidden[pair])
        saved |= {best: hidden[best]}
    savings = [
        Saving(causes=causes, batch_latency_ns=whole - of_it, saved_ns=of_it)
        for causes, of_it in saved.items()
    ]
    return tuple(sorted(savings, key=lambda saving: -saving.saved_ns))


def _doubts(steps: Sequence[MeasuredStep]) -> list[Gap]:
    unlinked = sum(step.unlinked for step in steps)
    if not unlinked:
        return []
    return [
        Gap(
            code=Code.UNLINKED_MESSAGES,
            message=f"{counted(unlinked, 'message')} between neighbours could not be assigned to"
            " a pass; waits for them are unexplained",
            hint="passes are missing on a rank, or a rank was captured at another time",
        )
    ]


def _slowed_hosts(steps: Sequence[MeasuredStep], accounts: Sequence[Account]) -> Iterator[Gap]:
    """Warn where hosts are late for much of the batch: a profiler makes them later."""
    total = sum(int(account.length_ns.sum()) for account in accounts)
    late = sum(a.total_of(cause) for a in accounts for cause in (Cause.HOST, Cause.HOST_SYNC))
    if late > _HOSTS_LATE * total and not any(step.on_host for step in steps):
        yield Gap(
            code=Code.HOSTS_SLOWED,
            message=f"hosts are late for {show_percent(late / total)} of the batch; the profiler"
            " slows hosts",
            hint="time unprofiled steps, as `debubble capture` does, or give --latency",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """A stretch in which a rank waited for one thing."""

    rank: int
    step: int | None
    """None in a stream, which has none."""
    start_ns: int
    end_ns: int
    cause: Cause
    waits_for: str
    """`3B5` for a pass, `2→3` for a hop, `host of rank 1`; empty where nobody knows."""


def list_waits(ledger: Ledger) -> tuple[Wait, ...]:
    """Return every wait; gaps that touch and have one cause and one culprit are one wait."""
    waits: list[Wait] = []
    for step, account in zip(ledger.steps, ledger.accounts, strict=True):
        kept = account.where(account.cause > CAUSES.index(Cause.COLLECTIVE))
        same = np.stack((kept.place, kept.cause, kept.root_kind, kept.root))
        breaks = (np.diff(same, axis=1) != 0).any(axis=0) | (kept.start_ns[1:] != kept.end_ns[:-1])
        cuts = [0, *(np.flatnonzero(breaks) + 1).tolist(), len(kept)] if len(kept) else []
        waits += [_wait(step, kept, begin, end - 1) for begin, end in pairwise(cuts)]
    return tuple(waits)


def _wait(step: MeasuredStep, account: Account, begin: int, end: int) -> Wait:
    return Wait(
        rank=step.program.ranks[account.place[begin]],
        step=step.number,
        start_ns=step.begin_ns + int(account.start_ns[begin]),
        end_ns=step.begin_ns + int(account.end_ns[end]),
        cause=CAUSES[account.cause[begin]],
        waits_for=name_root(step, account, begin),
    )


# A batch is as slow as its slowest pipeline: of many, the others never are.
MOST_REPLAYED = 7


def job_around(
    pipeline: PipelineFigures,
    pipelines: Sequence[PipelineFigures],
    timeline: Timeline,
    workers: Workers,
) -> Job:
    """Tell what a pipeline shares its batches with; the slowest of them are replayed too."""
    others = [
        other
        for other in pipelines
        if other.pipeline != pipeline.pipeline and other.windows and other.one_run
    ]
    others = [other for other in others if not other.cut and other.kind == pipeline.kind]
    held = [other for other in others if other.pipeline in timeline.pipelines]
    # Replicas that differ in nothing but noise tell nothing of each other. Of two steps too few
    # to tell which of them drags, the slowest of each step tells that they differ.
    differ = bool(workers.slow or workers.uneven) or _windows_differ([pipeline, *others])
    alike = held if differ else []
    slowest = _slowest_first(alike)
    replayed = tuple(other.pipeline for other in slowest[:MOST_REPLAYED])
    took = pipeline.batch_latency_ns or 0
    batch = round(median(longest_windows([pipeline, *others]).values() or [took]))
    return Job(
        workers=workers,
        alike=tuple(other.pipeline for other in alike),
        beside=replayed,
        hops=tuple(hop for other in slowest[:MOST_REPLAYED] for hop in other.hops),
        longest_ns=longest_windows(others),
        not_replayed_ns=longest_windows(
            [other for other in others if other.pipeline not in replayed]
        ),
        batch_latency_ns=batch if batch > (1 + MATTERS) * took else None,
    )


def longest_windows(pipelines: Sequence[PipelineFigures]) -> dict[int, int]:
    """Return, of each step that all have, the window of the slowest."""
    windows = [{w.step: w.length_ns for w in pipeline.windows} for pipeline in pipelines]
    steps = set.intersection(*map(set, windows)) if windows else set()
    return {step: max(lengths[step] for lengths in windows) for step in sorted(steps)}


def _slowest_first(pipelines: Sequence[PipelineFigures]) -> list[PipelineFigures]:
    """Order pipelines: first those that are the slowest in one step or another."""
    windows = sorted(
        (window.step, -window.length_ns, number)
        for number, pipeline in enumerate(pipelines)
        for window in pipeline.windows
    )
    best: dict[int, tuple[int, int]] = {}
    behind: dict[int, int] = {}
    for step, length, number in windows:
        behind[step] = behind.get(step, -1) + 1
        best[number] = min(best.get(number, (behind[step], length)), (behind[step], length))
    return [pipelines[number] for number in sorted(best, key=lambda number: best[number])]


def _windows_differ(pipelines: Sequence[PipelineFigures]) -> bool:
    """Tell whether the slowest of each step mostly takes clearly longer than most do."""
    windows: dict[int, list[int]] = {}
    for pipeline in pipelines:
        for window in pipeline.windows:
            windows.setdefault(window.step, []).append(window.length_ns)
    times = [
        max(lengths) / max(sorted(lengths)[(len(lengths) - 1) // 2], 1)
        for lengths in windows.values()
        if len(lengths) == len(pipelines)
    ]
    return bool(times) and median(times) > 1 + MATTERS


class Piece(NamedTuple):
    """A stretch of a wait with one root."""

    begin: int
    end: int
    kind: RootKind
    row: int
    queued: bool = False
    """On the way to it a message stood behind another one in its queue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankHost:
    """What held a rank up besides passes and messages, from the start of the window."""

    collectives: Intervals
    """Of passes; those that nothing covered."""
    data_parallel: Intervals
    """Gathers and reductions beside passes."""
    unissued: Intervals
    """Its host had not issued what ran next."""
    synchronised: Intervals
    """Its device had kept that host."""

    def cut(self, place: int, begin: int, end: int) -> Iterator[Piece]:
        """Cut a stretch in which the rank could have gone on, by what held it up."""
        for first, last, collective in split(self.collectives, begin, end):
            if collective:
                yield Piece(first, last, RootKind.COLLECTIVE, place)
                continue
            for begun, ended, gathers in split(self.data_parallel, first, last):
                if gathers:
                    yield Piece(begun, ended, RootKind.DATA_PARALLEL, place)
                    continue
                for since, until, late in split(self.unissued, begun, ended):
                    if late:
                        yield from self.cut_late(place, since, until)
                    else:
                        yield Piece(since, until, RootKind.NOTHING, place)

    def cut_late(self, place: int, begin: int, end: int) -> Iterator[Piece]:
        """Cut a stretch in which the host was late: kept by its device, or of itself."""
        for first, last, kept in split(self.synchronised, begin, end):
            yield Piece(first, last, RootKind.HOST_SYNC if kept else RootKind.HOST, place)


class Waits:
    """Says why a rank waited, for any wait of a step. Times count from the start of its window."""

    def __init__(self, step: MeasuredStep, hosts: tuple[RankHost, ...]) -> None:
        """Take what held each rank up besides."""
        program, times = step.program, step.times
        passes, messages = program.passes, program.messages
        self._hosts = hosts
        self._happened = Engine(program).measured(times)
        self._passes, self._batches = len(passes), len(program.batches)
        places = range(len(program.ranks))
        self._rows = [np.flatnonzero(passes.place == place).tolist() for place in places]
        self._starts = [[self._happened.moments_ns[row] for row in rows] for rows in self._rows]
        self._places = [*passes.place.tolist(), *program.batches.place.tolist()]
        self._issued: list[int] = step.lengths.batch_floor.tolist()
        self._end = self._passes + int(times.pass_end.argmax())
        # A batch lasts until the message whose sides were there last has come.
        there = np.maximum(times.batch_start[messages.sent], times.batch_start[messages.received])
        latest = np.argsort(there, kind="stable")
        carried = np.full(self._batches, -1)
        sides = np.stack((messages.sent[latest], messages.received[latest]), axis=1)
        carried[sides.ravel()] = np.repeat(latest, 2)  # the last to be written stays
        self._carried: list[int] = carried.tolist()
        needs = zip(messages.consumer.tolist(), messages.received.tolist(), strict=True)
        self._inputs = {need: message for message, need in enumerate(needs)}
        """By pass and batch, the message that the pass needs of it."""

    def follow(self, place: int, begin: int, end: int) -> Iterator[Piece]:
        """Yield why a rank waited from `begin` to `end`, in no pass: pieces that cover it."""
        number = bisect_right(self._starts[place], begin)
        rows = self._rows[place]
        waited_for = rows[number] if number < len(rows) else self._end
        way = [*self._happened.way_back(waited_for, begin, end)]
        behind = [self._stands_behind_another(stretch.event) for stretch in way]
        queued = [False, *accumulate(behind, or_)]
        for stretch, is_queued in zip(reversed(way), reversed(queued[:-1]), strict=True):
            for piece in self._of(stretch):
                yield piece._replace(queued=True) if is_queued else piece

    def _stands_behind_another(self, event: int) -> bool:
        """Tell a batch whose start waited for another batch last."""
        first, end = 2 * self._passes, 2 * self._passes + self._batches
        return first <= event < end and self._happened.last_source[event] >= first

    def _of(self, stretch: events.Stretch) -> Iterator[Piece]:
        """Say what a rank did, or did not, while all that an event needs was there."""
        event, waiting, begin, end = stretch
        starts_of_batches, ends_of_batches = 2 * self._passes, 2 * self._passes + self._batches
        if event < 0:
            yield Piece(begin, end, RootKind.NOTHING, -1)
        elif event < self._passes:
            yield from self._hosts[self._places[event]].cut(self._places[event], begin, end)
        elif event < starts_of_batches:
            yield Piece(begin, end, RootKind.PASS, event - self._passes)
        elif event < ends_of_batches:
            batch = event - starts_of_batches
            place = self._places[self._passes + batch]
            issued = min(max(self._issued[batch], begin), end)
            if begin < issued:
                yield from self._hosts[place].cut_late(place, begin, issued)
            if issued < end:
                yield from self._hosts[place].cut(place, issued, end)
        else:
            batch = event - ends_of_batches
            message = self._inputs.get((waiting, batch), self._carried[batch])
            yield Piece(begin, end, RootKind.MESSAGE, message)


Cut = tuple[int, int, Cause]
AnyArray = NDArray[np.generic]
_COMPUTE, _COLLECTIVE = NUMBER_OF[Cause.COMPUTE], NUMBER_OF[Cause.COLLECTIVE]
_HOST, _UNEXPLAINED = NUMBER_OF[Cause.HOST], NUMBER_OF[Cause.UNEXPLAINED]
_HOST_SYNC, _DATA_PARALLEL = NUMBER_OF[Cause.HOST_SYNC], NUMBER_OF[Cause.DATA_PARALLEL]
_CLAIMING = tuple((cause, cause.about.claims) for cause in CAUSES if cause.about.claims)
_NEVER = np.iinfo(np.int64).max
_OF_RANKS = {
    RootKind.HOST: Cause.HOST,
    RootKind.HOST_SYNC: Cause.HOST_SYNC,
    RootKind.COLLECTIVE: Cause.COLLECTIVE,
    RootKind.DATA_PARALLEL: Cause.DATA_PARALLEL,
}


@dataclass(slots=True)
class _Rows:
    """The waits of a rank, as they are written."""

    place: int
    start: list[int] = field(default_factory=list)
    end: list[int] = field(default_factory=list)
    cause: list[int] = field(default_factory=list)
    kind: list[int] = field(default_factory=list)
    root: list[int] = field(default_factory=list)
    queued: list[bool] = field(default_factory=list)

    def add(self, cut: Cut, piece: Piece) -> None:
        self.start.append(cut[0])
        self.end.append(cut[1])
        self.cause.append(NUMBER_OF[cut[2]])
        self.kind.append(piece.kind)
        self.root.append(piece.row)
        self.queued.append(piece.queued)


class _Cutter:
    """Cuts what was waited for into causes."""

    def __init__(
        self,
        step: MeasuredStep,
        costs: PassCosts,
        expected: ExpectedTimes,
        hosts: tuple[RankHost, ...],
    ) -> None:
        self._step = step
        self._costs = costs
        self._expected = expected.seen
        self._hosts = hosts
        self._bounds: dict[int, tuple[int, int, int, int, int, int]] = {}
        passes, times = step.program.passes, step.times
        places = range(len(step.program.ranks))
        self._first = [
            times.pass_start[passes.place == place].min(initial=_NEVER) for place in places
        ]
        self._last = [times.pass_end[passes.place == place].max(initial=0) for place in places]

    def cut(self, waiter: int, piece: Piece) -> Iterator[Cut]:
        """Yield the causes of a piece of a wait, in order of time."""
        if piece.kind is RootKind.PASS:
            yield from self._cut_pass(waiter, piece)
        elif piece.kind is RootKind.MESSAGE:
            yield from self._cut_message(piece)
        else:
            yield piece.begin, piece.end, _OF_RANKS.get(piece.kind, Cause.UNEXPLAINED)

    def _cut_pass(self, waiter: int, piece: Piece) -> Iterator[Cut]:
        """Cut by how far the pass was: an equal share, its stage's excess, its device's, its own.

        Its data come between the last two.
        """
        began, place, equal, sound, usual, uneven = self._bounds_of(piece.row)
        host = self._hosts[place]
        for begin, end, cause in _by_collective(host, piece.begin, piece.end):
            if cause is not None:
                yield begin, end, cause
                continue
            # Where in the pass this stretch begins, collectives before it left out.
            into = begin - began
            into -= host.collectives.inside(began, begin) + host.data_parallel.inside(began, begin)
            scheduled = Cause.TURNAROUND
            if begin < self._first[waiter]:
                scheduled = Cause.WARM_UP
            elif begin >= self._last[waiter]:
                scheduled = Cause.DRAIN
            yield from cut_steps(
                begin,
                end,
                (
                    (equal - into, scheduled),
                    (sound - into, Cause.IMBALANCE),
                    (usual - into, Cause.WORKER),
                    (uneven - into, Cause.DATA),
                ),
                Cause.JITTER,
            )

    def _bounds_of(self, row: int) -> tuple[int, int, int, int, int, int]:
        """Return a pass's start and place, and how far into it each of its causes reaches."""
        known = self._bounds.get(row)
        if known is None:
            passes = self._step.program.passes
            key = (int(passes.stage[row]), int(passes.kind[row]))
            number = int(passes.microbatch[row])
            typical = self._costs.typical(key, number)
            usual = typical / self._costs.heavy
            known = self._bounds[row] = (
                int(self._step.times.pass_start[row]),
                int(passes.place[row]),
                self._costs.equal[key],
                round(typical * self._costs.sound[key] / max(self._costs.median[key], 1)),
                round(usual),
                round(usual * self._costs.data.get((self._step.number, key[1], number), 1.0)),
            )
        return known

    def _cut_message(self, piece: Piece) -> Iterator[Cut]:
        messages, times = self._step.program.messages, self._step.times
        both = max(
            int(times.batch_start[messages.sent[piece.row]]),
            int(times.batch_start[messages.received[piece.row]]),
        )
        fair = int(self._expected[piece.row]) - (piece.begin - both)
        yield from cut_steps(piece.begin, piece.end, ((fair, Cause.TRANSFER),), Cause.SLOW_LINK)


def _by_collective(host: RankHost, begin: int, end: int) -> Iterator[tuple[int, int, Cause | None]]:
    """Cut a stretch by the collectives that it lies in: of passes, beside them, or none."""
    for first, last, inside in split(host.collectives, begin, end):
        if inside:
            yield first, last, Cause.COLLECTIVE
            continue
        for begun, ended, beside in split(host.data_parallel, first, last):
            yield begun, ended, Cause.DATA_PARALLEL if beside else None


def account_step(
    step: MeasuredStep,
    ranks: tuple[RankTimeline, ...],
    costs: PassCosts,
    expected: ExpectedTimes,
) -> Account:
    """Cut ranks and window into intervals with one cause each; nothing is left out."""
    begin, length = step.begin_ns, int(step.times.pass_end.max())
    hosts = tuple(
        RankHost(
            collectives=clip(collectives_of(rank), begin, length),
            data_parallel=clip(rank.data_parallel, begin, length),
            unissued=clip(rank.unissued, begin, length),
            synchronised=clip(rank.synchronised, begin, length),
        )
        for rank in ranks
    )
    waits, cutter = Waits(step, hosts), _Cutter(step, costs, expected, hosts)
    parts = []
    for place, (rank, host) in enumerate(zip(ranks, hosts, strict=True)):
        computes = without(clip(rank.occupied, begin, length), host.collectives)
        computes = without(computes, host.data_parallel)
        runs = step.program.passes.place == place
        passes = Intervals(start_ns=step.times.pass_start[runs], end_ns=step.times.pass_end[runs])
        known, idle = _cut_rank(computes, host, passes, length)
        rows = _Rows(place)
        for wait in idle:
            for piece in waits.follow(place, *wait):
                for cut in cutter.cut(place, piece):
                    rows.add(_claimed(step, place, piece, cut) if _CLAIMING else cut, piece)
        parts.append(_in_order(place, known, rows))
    account = Account(
        **{
            column.name: np.concatenate([part[column.name] for part in parts])
            for column in fields(Account)
        }
    )
    return _part_collectives(account, tuple(clip(r.shared.waits, begin, length) for r in ranks))


def _part_collectives(account: Account, waits: tuple[Intervals, ...]) -> Account:
    """Tell what a collective takes of itself from waiting in it for its last member.

    A rank's own, or those of the rank that is waited for.
    """
    if not any(len(stretches.start_ns) for stretches in waits):
        return account
    rows: list[int] = []
    starts: list[int] = []
    ends: list[int] = []
    causes: list[int] = []
    for row, cause in enumerate(account.cause.tolist()):
        begin, end = int(account.start_ns[row]), int(account.end_ns[row])
        cuts: Iterable[tuple[int, int, bool]] = ((begin, end, False),)
        if cause == _COLLECTIVE:
            waited_for = account.root_kind[row] == RootKind.COLLECTIVE
            place = int(account.root[row] if waited_for else account.place[row])
            cuts = split(waits[place], begin, end)
        for first, last, waiting in cuts:
            rows.append(row)
            starts.append(first)
            ends.append(last)
            causes.append(NUMBER_OF[Cause.COLLECTIVE_WAIT] if waiting else cause)
    parted = account.where(np.array(rows, dtype=np.int64))
    return replace(
        parted,
        start_ns=np.array(starts, dtype=np.int64),
        end_ns=np.array(ends, dtype=np.int64),
        cause=np.array(causes, dtype=np.uint8),
    )


def _claimed(step: MeasuredStep, place: int, piece: Piece, cut: Cut) -> Cut:
    """Put a stretch under the first cause that claims it."""
    begin, end, cause = cut
    stretch = Stretch(
        begin=begin, end=end, cause=cause, place=place, kind=piece.kind, root=piece.row
    )
    taken = next((other for other, claims in _CLAIMING if claims(step, stretch)), cause)
    return begin, end, taken


def _cut_rank(
    computes: Intervals, host: RankHost, passes: Intervals, length: int
) -> tuple[tuple[I64, I64, I64], list[tuple[int, int]]]:
    """Return what a rank did, and gaps inside its passes, by cause; and its waits between them."""
    collectives, data = host.collectives, host.data_parallel
    edges = [np.array([0, length])]
    for intervals in (computes, collectives, data, passes, host.unissued, host.synchronised):
        edges += [intervals.start_ns, intervals.end_ns]
    moments = np.unique(np.clip(np.concatenate(edges), 0, length))
    start, end = moments[:-1], moments[1:]
    occupied = _covers(computes, start) | _covers(collectives, start) | _covers(data, start)
    waits = ~occupied & ~_covers(passes, start)
    whose = np.where(_covers(host.synchronised, start), _HOST_SYNC, _HOST)
    cause = np.where(_covers(host.unissued, start), whose, _UNEXPLAINED)
    cause = np.where(_covers(data, start), _DATA_PARALLEL, cause)
    cause = np.where(_covers(collectives, start), _COLLECTIVE, cause)
    cause = np.where(_covers(computes, start), _COMPUTE, cause)
    first = waits & ~np.concatenate(([False], waits[:-1]))
    last = waits & ~np.concatenate((waits[1:], [False]))
    return (
        (start[~waits], end[~waits], cause[~waits]),
        list(zip(start[first].tolist(), end[last].tolist(), strict=True)),
    )


def _covers(intervals: Intervals, moments: I64) -> Flags:
    """Tell which moments lie in one of some intervals."""
    begun = np.searchsorted(intervals.start_ns, moments, side="right")
    over = np.searchsorted(intervals.end_ns, moments, side="right")
    inside: Flags = begun > over
    return inside


def _in_order(place: int, known: tuple[I64, I64, I64], rows: _Rows) -> dict[str, AnyArray]:
    """Lay what a rank did and what it waited for one after the other."""
    start = np.concatenate((known[0], np.array(rows.start, dtype=np.int64)))
    order = np.argsort(start)
    # The host of a rank is to blame for gaps inside its own passes.
    late, kept = known[2] == _HOST, known[2] == _HOST_SYNC
    kind = np.where(late, RootKind.HOST, np.where(kept, RootKind.HOST_SYNC, RootKind.NOTHING))
    root = np.where(late | kept, place, -1)
    columns: dict[str, AnyArray] = {
        "start_ns": start,
        "end_ns": np.concatenate((known[1], np.array(rows.end, dtype=np.int64))),
        "cause": np.concatenate((known[2], np.array(rows.cause, dtype=np.int64))).astype(np.uint8),
        "root_kind": np.concatenate((kind, np.array(rows.kind, dtype=np.int64))).astype(np.uint8),
        "root": np.concatenate((root, np.array(rows.root, dtype=np.int64))).astype(np.int32),
        "queued": np.concatenate((np.zeros(len(root), dtype=bool), np.array(rows.queued, bool))),
    }
    ordered = {name: column[order] for name, column in columns.items()}
    return ordered | {"place": np.full(len(order), place, dtype=np.int32)}


def cut_steps(
    begin: int, end: int, parts: tuple[tuple[int, Cause], ...], rest: Cause
) -> Iterator[Cut]:
    """Cut a stretch at the given distances from its begin, each under its cause."""
    at = begin
    for distance, cause in parts:
        until = min(end, max(at, begin + distance))
        if at < until:
            yield at, until, cause
            at = until
    if at < end:
        yield at, end, rest


def clip(intervals: Intervals, begin: int, length: int) -> Intervals:
    """Return intervals as they lie in a window, counted from its start."""
    start = np.clip(intervals.start_ns - begin, 0, length)
    end = np.clip(intervals.end_ns - begin, 0, length)
    kept = end > start
    return Intervals(start_ns=start[kept], end_ns=end[kept])


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """Intervals that cover ranks and window exactly, sorted by rank and start."""

    place: I32
    start_ns: I64
    """From the start of the window."""
    end_ns: I64
    cause: U8
    root_kind: U8
    root: I32
    """The row of the pass or message waited for; the place of the rank whose host was late."""
    queued: Flags
    """Somewhere on the way a message stood behind another one in its queue."""

    def __len__(self) -> int:
        return len(self.start_ns)

    @property
    def length_ns(self) -> I64:
        """How long each is."""
        length: I64 = self.end_ns - self.start_ns
        return length

    def where(self, kept: Flags | I64) -> Account:
        """Return a part of the rows."""
        return Account(**{column.name: getattr(self, column.name)[kept] for column in fields(self)})

    def total_of(self, cause: Cause) -> int:
        """Return the nanoseconds under a cause."""
        return int(self.length_ns[self.cause == NUMBER_OF[cause]].sum())

    def totals(self) -> dict[Cause, int]:
        """Return the nanoseconds under every cause."""
        sums = np.zeros(len(CAUSES), dtype=np.int64)
        np.add.at(sums, self.cause, self.length_ns)
        return dict(zip(CAUSES, sums.tolist(), strict=True))


_EXAMPLES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A wait to look at in a viewer: the waiting rank's file, the moment, the length."""

    file: str
    ts_us: float
    dur_us: float
    rank: int
    waits_for: str
    """`3B5` for a pass (stage, kind, microbatch), `2→3` for a hop, empty for a host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Culprit:
    """Something that ranks waited for under one cause."""

    cause: Cause
    rank: int
    """Whose pass or host it was; the sender's of a hop."""
    stage: int | None = None
    kind: str | None = None
    hop: tuple[int, int] | None = None
    """Sending and receiving rank."""
    wait_ns: int
    """All ranks and steps together."""
    examples: tuple[Example, ...] = ()


def find_culprits(
    steps: Sequence[MeasuredStep],
    accounts: Sequence[Account],
    ranks: tuple[RankTimeline, ...],
    waiter: int | None = None,
    most: int | None = None,
) -> tuple[Culprit, ...]:
    """List whom ranks waited for, the longest first; or the `most` that one rank (by place) did.

    A pipeline of hundreds of stages has millions of waits: they are grouped as columns, and only
    examples are looked at one by one.
    """
    kept = [_waits_of(account, waiter) for account in accounts]
    number = np.repeat(np.arange(len(steps)), [len(rows) for rows in kept])
    rows = np.concatenate(kept) if kept else np.zeros(0, dtype=np.intp)
    if not len(rows):
        return ()
    pairs = list(zip(steps, accounts, kept, strict=True))
    columns = np.concatenate([_identities(*pair) for pair in pairs], axis=1)
    length = np.concatenate([account.length_ns[mine] for _, account, mine in pairs])
    group = np.zeros(len(rows), dtype=np.int64)
    for column in columns:
        _, value = np.unique(column, return_inverse=True)
        _, group = np.unique(group * (int(value.max()) + 1) + value, return_inverse=True)
    total = np.zeros(int(group.max()) + 1, dtype=np.int64)
    np.add.at(total, group, length)
    longest_first = np.lexsort((-length, group))  # stable: of equal ones, the earlier
    begins = np.searchsorted(group[longest_first], np.arange(len(total)))
    first = np.full(len(total), len(rows))
    np.minimum.at(first, group, np.arange(len(rows)))
    cause, rank = columns[0][first], columns[1][first]
    names = np.array([str(each) for each in CAUSES])[cause]
    found = []
    for row in np.lexsort((first, rank, names, -total))[:most].tolist():
        mine = longest_first[begins[row] : begins[row] + _EXAMPLES]
        examples = [
            _example(steps[number[at]], accounts[number[at]], int(rows[at]), ranks)
            for at in mine[group[mine] == row].tolist()
        ]
        _, _, stage, kind, destination = columns[:, first[row]].tolist()
        found.append(
            Culprit(
                cause=CAUSES[cause[row]],
                rank=int(rank[row]),
                stage=None if stage < 0 else stage,
                kind=None if kind < 0 else PassKind(kind).name,
                hop=None if destination < 0 else (int(rank[row]), destination),
                wait_ns=int(total[row]),
                examples=tuple(examples),
            )
        )
    return tuple(found)


def _waits_of(account: Account, waiter: int | None) -> NDArray[np.intp]:
    """Return the rows that waited for something: of all, or of one rank."""
    first, last = 0, len(account)
    if waiter is not None:
        first, last = np.searchsorted(account.place, (waiter, waiter + 1)).tolist()
    return first + np.flatnonzero(account.root_kind[first:last] != RootKind.NOTHING)


def _identities(step: MeasuredStep, account: Account, rows: NDArray[np.intp]) -> I64:
    """Return what makes waits those for the same: cause, rank, stage, kind of pass, receiver."""
    program, root = step.program, account.root[rows]
    ranks = np.array(program.ranks, dtype=np.int64)
    found = np.full((5, len(rows)), -1, dtype=np.int64)
    found[0] = account.cause[rows]
    kind = account.root_kind[rows]
    passes, messages = kind == RootKind.PASS, kind == RootKind.MESSAGE
    of_rank = ~passes & ~messages
    found[1, passes] = ranks[program.passes.place[root[passes]]]
    found[2, passes] = program.passes.stage[root[passes]]
    found[3, passes] = program.passes.kind[root[passes]]
    places = program.batches.place
    found[1, messages] = ranks[places[program.messages.sent[root[messages]]]]
    found[4, messages] = ranks[places[program.messages.received[root[messages]]]]
    found[1, of_rank] = ranks[root[of_rank]]
    return found


def _name(step: MeasuredStep, account: Account, row: int) -> str:
    """Name the very pass or hop of a wait; nothing for a host."""
    program, root = step.program, int(account.root[row])
    if account.root_kind[row] == RootKind.PASS:
        passes = program.passes
        return f"{passes.stage[root]}{PassKind(passes.kind[root]).name}{passes.microbatch[root]}"
    if account.root_kind[row] == RootKind.MESSAGE:
        ranks, places = program.ranks, program.batches.place
        source = ranks[places[program.messages.sent[root]]]
        return f"{source}→{ranks[places[program.messages.received[root]]]}"
    return ""


def name_root(step: MeasuredStep, account: Account, row: int) -> str:
    """Name what a row of the account waited for; nothing where nobody knows."""
    kind = account.root_kind[row]
    if kind == RootKind.NOTHING:
        return ""
    name = _name(step, account, row)
    if name:
        return name
    rank = step.program.ranks[int(account.root[row])]
    return f"host of rank {rank}" if kind in {RootKind.HOST, RootKind.HOST_SYNC} else f"rank {rank}"


def _example(
    step: MeasuredStep, account: Account, row: int, ranks: tuple[RankTimeline, ...]
) -> Example:
    waiting = ranks[account.place[row]]
    return Example(
        file=waiting.file,
        ts_us=waiting.stamp_us(step.begin_ns + int(account.start_ns[row])),
        dur_us=int(account.end_ns[row] - account.start_ns[row]) / 1000,
        rank=waiting.rank,
        waits_for=_name(step, account, row),
    )
