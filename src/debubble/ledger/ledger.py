"""A `Timeline` in → the `Ledger` of one pipeline: causes, culprits, savings.

`build_ledger` adds up the accounts of the kept steps (`account.py`), and asks what each would take
without each cause (`savings.py`); `job_around` tells what a pipeline shares its batches with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from debubble.errors import Code, Gap
from debubble.ledger.account import (
    Account,
    Accounts,
    account_step,
    find_culprits,
)
from debubble.ledger.causes import (
    OF_KERNELS_AND_HOSTS,
    REMEDIES,
    Cause,
)
from debubble.ledger.savings import (
    HEAD_OF_LINE,
    Remedies,
    Remedy,
    Replays,
    Saving,
    replay_step,
)
from debubble.links.hop_times import Hop, expect_wire, wires_between
from debubble.simulate.costs.passes import (
    PassCosts,
    collectives_of,
    data_parallel_of,
    fit_passes,
    inside_passes,
    measure_passes,
)
from debubble.simulate.costs.uneven_data import even_times
from debubble.simulate.events import OrderCycle
from debubble.simulate.measured import MeasuredStep, measure_step
from debubble.timeline.figures import PipelineFigures
from debubble.timeline.model import (
    I64,
    Intervals,
    RankTimeline,
    Timeline,
    without,
)
from debubble.timeline.replicas import Workers
from debubble.timeline.steps import only_steps
from debubble.units import counted, show_percent

if TYPE_CHECKING:
    from debubble.ledger.hop_health import LinkHealth


# What buys less than a fiftieth of the batch is not worth a name: steps vary by more. Two remedies
# hide each other where together they buy so much more than one by one.
MATTERS = 0.02
# Enough for medians; a capture of a thousand steps is not worth minutes.
_MOST_STEPS = 8
# What takes less of the time hides nothing worth a word, but hosts that stand until a collective is
# over: these show where it does not, and without it they come next.
_SEEN = 0.01
# A profiler adds to each launch. Megatron with experts, its hosts late for 20 % of the batch, was a
# fifth slower under it; other runs, late for 5 % or less, by a twentieth at most.
_HOSTS_LATE = 0.1
# A replay that misses the step as it is by more says nothing of a step that is changed.
MOST_OFF = 0.03


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What runs beside a pipeline, where a batch is as slow as the slowest of all."""

    workers: Workers = field(default_factory=Workers)
    """Of all pipelines, this one's too."""
    alike: tuple[int, ...] = ()
    """Other pipelines of the timeline: what data they hold counts where all are to hold as much."""
    beside: tuple[int, ...] = ()
    """Those of them that are replayed: a repair would reach them as well."""
    longest_ns: Mapping[int, int] = field(default_factory=dict)
    """Of each step, the longest window of all other pipelines."""
    not_replayed_ns: Mapping[int, int] = field(default_factory=dict)
    """The same of those that are not in `beside`: nothing puts their devices right."""
    batch_latency_ns: int | None = None
    """In the middle of the steps, the slowest pipeline's of each, where that is not this one."""

    def excess_of(self, pipeline: int) -> dict[tuple[int, int], int]:
        """Return what slow devices take more in a pipeline, by stage and kind of pass."""
        slow = [worker for worker in self.workers.slow if worker.pipeline == pipeline]
        return {key: more for worker in slow for key, more in worker.excess_ns.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger(Accounts):
    """Where the time of a pipeline's steps went. Sums are over all steps, exact to the ns."""

    steps: tuple[MeasuredStep, ...]
    replays: tuple[Replays, ...]
    """Empty where the order of the passes contradicts itself."""
    remedies: tuple[Remedies, ...]
    batch_latency_ns: int
    """What shares are of: the measured batch in the middle of the kept steps."""
    job: Job
    links: LinkHealth | None = None
    """What each hop takes, whether it is slow and what that costs: told here for all who ask."""

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

    @property
    def replay_error(self) -> float | None:
        """How far the replay of the unchanged step lands from the measured window; the worst."""
        errors = [replay.unchanged_ns / replay.measured_ns - 1 for replay in self.replays]
        return max(errors, key=abs) if errors else None


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
    costs = {number: cost.with_data(heavy) for (number, cost), heavy in _weigh_data(costs, job)}
    even = even_times(cost.data for cost in costs.values())
    if not even:
        costs = {number: replace(cost, data={}) for number, cost in costs.items()}

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
        others = [measured for other, measured in ran.items() if other != number]
        return tuple(
            Remedies(
                step=step,
                costs=costs[number],
                **_inside_passes(step, timeline, ranks),
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
    by_cause = remedies_for(timers=ranks[0].timers)
    pairs = _seen_together(by_cause, accounts)
    try:
        replays = tuple(replay_step(remedy, by_cause, pairs) for remedy in remedies)
    except OrderCycle as error:
        replays = ()
        gaps.append(Gap(code=Code.ORDER_CYCLE, message=f"no replay: {error}", hint=error.hint))
    errors = [abs(replay.unchanged_ns / replay.measured_ns - 1) for replay in replays]
    if errors and median(errors) > MOST_OFF:
        replays = ()
        hint = "capture whole steps of all ranks, with kernels and messages; the shares of causes"
        gaps.append(replay_misses(median(errors), f"{hint} are measured and remain valid"))
    together = {step.number: [replay] for step, replay in zip(measured, replays, strict=False)}
    for number in job.beside if together else ():
        for remedy in remedies_of(number):
            together[remedy.step.number].append(replay_step(remedy, by_cause, pairs))
    return Ledger(
        ranks=ranks,
        steps=measured,
        accounts=accounts,
        replays=replays,
        remedies=remedies,
        culprits=find_culprits(accounts, ranks),
        savings=_savings(
            together, job.batch_latency_ns or batch_latency_ns, job, timers=ranks[0].timers
        ),
        gaps=tuple(gaps),
        middle=tuple(steps.index(step) for step in middle) or _middle_of(accounts),
        batch_latency_ns=batch_latency_ns
        or round(median(int(step.times.window_ns) for step in measured)),
        job=job,
    )


def replay_misses(error: float, hint: str) -> Gap:
    """Say that a replay is too far off for savings."""
    return Gap(
        code=Code.REPLAY_MISSES,
        message=f"replay error {show_percent(abs(error))} (limit {show_percent(MOST_OFF)}): no "
        "savings are predicted",
        hint=hint,
    )


def _weigh_data(
    costs: Mapping[int, PassCosts], job: Job
) -> Iterator[tuple[tuple[int, PassCosts], float]]:
    """Yield each pipeline's costs, and how many times as long as elsewhere its data make them."""

    def lower_middle(values: Sequence[float]) -> float:
        return sorted(values)[(len(values) - 1) // 2]

    stages = {key for cost in costs.values() for key in cost.sound}
    usual = {
        key: lower_middle([cost.sound[key] for cost in costs.values() if key in cost.sound])
        for key in stages
    }
    for number, cost in costs.items():
        times = [length / usual[key] for key, length in cost.sound.items()]
        yield (number, cost), lower_middle(times) if number in job.workers.uneven else 1.0


def _middle_of(accounts: Sequence[Account]) -> tuple[int, ...]:
    """Return the step in the middle by its share of compute; of an even number, both."""
    useful = [account.total_of(Cause.COMPUTE) / account.length_ns.sum() for account in accounts]
    order = np.argsort(useful, kind="stable").tolist()
    return tuple(sorted(order[(len(order) - 1) // 2 : len(order) // 2 + 1]))


def _spread(count: int) -> list[int]:
    """Return all rows, or as many as are enough, at even distances."""
    return sorted({round(row) for row in np.linspace(0, count - 1, min(count, _MOST_STEPS))})


def _inside_passes(
    step: MeasuredStep, timeline: Timeline, ranks: tuple[RankTimeline, ...]
) -> dict[str, I64]:
    """Return how long each pass was held up, in the order of the program; names of `Remedies`."""
    passes = timeline.passes
    names = list(step.program.ranks)
    in_step = passes.where((passes.step == step.number) & np.isin(passes.rank, names))
    place = np.array([names.index(rank) for rank in in_step.rank.tolist()])
    order = np.lexsort((in_step.start_ns, place))

    def late_host(rank: RankTimeline) -> Intervals:
        """Return when a host had not launched what runs next, and nothing kept it."""
        return without(rank.unissued, rank.synchronised)

    held_by: dict[str, Callable[[RankTimeline], Intervals]] = {
        "collectives_ns": collectives_of,
        "data_ns": data_parallel_of,
        "late_ns": late_host,
        "kept_ns": lambda rank: without(rank.unissued, late_host(rank)),
    }
    return {name: inside_passes(in_step, ranks, of)[order] for name, of in held_by.items()}


def remedies_for(*, timers: bool) -> dict[Cause, Remedy]:
    """Return what can be put right; nothing that a job's own timers do not show."""
    return {
        cause: remedy
        for cause, remedy in REMEDIES.items()
        if not (timers and cause in OF_KERNELS_AND_HOSTS)
    }


def _seen_together(
    by_cause: Iterable[Cause], accounts: Sequence[Account]
) -> list[tuple[Cause, Cause]]:
    """Return pairs of causes that take so much time that one may hide the other."""
    total = sum(int(account.length_ns.sum()) for account in accounts)
    seen = [
        cause
        for cause in by_cause
        if cause is not Cause.TRANSFER  # every pipeline has it, and no remedy removes it
        and sum(account.total_of(cause) for account in accounts)
        > (0 if cause is Cause.HOST_SYNC else _SEEN * total)
    ]
    return list(combinations(seen, 2))


def _savings(
    together: Mapping[int, Sequence[Replays]], whole: int | None, job: Job, *, timers: bool
) -> tuple[Saving, ...]:
    """Return what removing each cause would buy, and the pair of them that hide each other most.

    A cause is removed from all pipelines of a step that are replayed: a batch is as slow as the
    slowest.
    """
    if not together:
        return ()

    def saved_in(step: int, causes: tuple[str, ...]) -> int:
        """Hold the slowest pipeline of a step against the slowest without something.

        Pipelines that are not replayed keep slow devices, hold as much data as all others do, and
        gain of anything else what those that are replayed mostly do.
        """
        replays = together[step]
        after = [
            replay.measured_ns - replay.unchanged_ns + replay.without_ns[causes]
            for replay in replays
        ]
        others = job.not_replayed_ns.get(step, 0)
        gains = [
            window / max(replay.measured_ns, 1)
            for replay, window in zip(replays, after, strict=True)
        ]
        left = 0.0 if Cause.DATA in causes else 1.0 if causes == (Cause.WORKER,) else median(gains)
        return max(others, *(replay.measured_ns for replay in replays)) - max(
            round(left * others), *after
        )

    every = next(iter(together.values()))[0].without_ns
    saved = {
        causes: round(median(saved_in(step, causes) for step in together))
        for causes in every
        if not (timers and causes == (HEAD_OF_LINE,))
    }
    whole = whole or round(
        median(max(replay.measured_ns for replay in replays) for replays in together.values())
    )
    hidden = {
        pair: more
        for pair, more in saved.items()
        if len(pair) > 1
        and more - sum(max(saved[(cause,)], 0) for cause in pair) >= MATTERS * whole
    }
    most = max(hidden, key=lambda pair: hidden[pair], default=())
    savings = [
        Saving(causes=causes, batch_latency_ns=whole - saved_ns, saved_ns=saved_ns)
        for causes, saved_ns in saved.items()
        if len(causes) == 1 or causes == most
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
            hint="time unprofiled steps, as `debubble capture` does",
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
