"""A measured run in → what every change starts from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from math import exp, log
from operator import attrgetter

from debubble.errors import NoFit, UsageError
from debubble.ledger.hop_health import LinkHealth, judge_links
from debubble.plan.change import Change, Setting
from debubble.simulate.communication import (
    MADE_UP,
    TOGETHER,
    Communication,
    beside_compute,
    possible_ways,
)
from debubble.simulate.costs.memory import (
    MemoryCosts,
    MemoryRun,
    PeakMemory,
    fit_memory,
    memory_run,
    predict_peaks,
)
from debubble.simulate.engine import Engine
from debubble.simulate.events import OrderCycle
from debubble.simulate.planned import planned_engine
from debubble.simulate.predict import WhatIf, enough_draws, predict
from debubble.simulate.source import Source, measure_source
from debubble.timeline.figures import PipelineFigures
from debubble.timeline.job import Basis, RunBasis
from debubble.timeline.model import PassKind, RankTimeline, Timeline, ranks_a_device, surely_share
from debubble.timeline.schedules import SCHEDULES, Order, count_stages, order_of
from debubble.units import counted, show_count, show_duration, show_percent

# More than a plan asks for; an engine of 4,000 passes takes a few megabytes.
_KEPT = 32
# A microbatch takes a stage no more: F, I and W.
_MOST_KINDS = 3
# Of a changed step many runs are drawn, which takes half a minute for so many.
MOST_PASSES = 50_000
# A simulation that misses the run as it is by more may not price anything.
FITS = 0.05
# Of models that fit, by so much the simulation misses the run as it is: recorded runs. Where the
# middle of few steps is less sure than that, most of the misfit is theirs.
_USUAL_MISFIT = 0.015
# Ties the middle of the draws to the measured run; enough for half a percent.
_DRAWS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """The run as it is."""

    source: Source
    schedule: str
    order: Order
    memory: MemoryCosts | None
    """None where the traces do not tell how it grows."""
    limits: tuple[float | None, ...]
    """Bytes that each rank may hold."""
    window_ns: float
    """The batch latency that changes are held against."""
    basis: Basis
    """Of that latency."""
    outside_ns: int
    """What a step takes besides, on the same basis; below 0 where batches overlap a little."""
    correction: float
    """What the run took against what its own simulation says, as far as its steps are sure of it;
    predictions are multiplied by it."""
    misfit: float
    """By how much the simulation of the run as it is misses it, of the logarithm."""
    communication: Communication
    """How messages travel: that way, of those its framework has, whose simulation lands nearest."""
    slow_ranks: tuple[int, ...] = ()
    """Whose devices are slower than those of the same stages in other replicas."""

    @property
    def ranks(self) -> tuple[RankTimeline, ...]:
        """The ranks of the pipeline, first to last."""
        return self.source.ranks

    @property
    def setting(self) -> Setting:
        """What emitters need to know of the run."""
        split = self.source.split
        return Setting(
            ranks=len(self.ranks),
            layers=sum(split) if split else None,
            microbatches=self.source.microbatches,
            schedule=self.schedule,
            chunks=self.source.chunks,
            microbatch_size=self.ranks[0].parallelism.microbatch_size,
            data_parallel=self.ranks[0].parallelism.data,
        )

    @property
    def others(self) -> tuple[int | None, ...]:
        """Bytes of each rank's device that others hold; None where not known.

        Ranks that share a device are the others that each of them sees there.
        """
        if surely_share(self.ranks):
            return (None,) * len(self.ranks)
        return tuple(rank.memory.other_bytes if rank.memory else None for rank in self.ranks)

    @property
    def over_limit_bytes(self) -> float | None:
        """How much more than its limit the fullest rank takes as it is; None where not known."""
        over = [
            rank.peak_memory_bytes - limit
            for rank, limit in zip(self.ranks, self.limits, strict=True)
            if limit is not None and rank.peak_memory_bytes is not None
        ]
        return max(over) if over else None

    @property
    def no_fit(self) -> NoFit | None:
        """Why nothing may be priced by this run: its own simulation misses it; None: it fits."""
        if abs(self.misfit) <= log(1 + FITS):
            return None
        simulated, took = self.source.window_ns / exp(self.misfit), self.source.window_ns
        return NoFit(
            f"simulator error {show_percent(abs(simulated / took - 1))} (limit "
            f"{show_percent(FITS)}): simulated {show_duration(round(simulated))}, measured "
            f"{show_duration(took)}",
            hint="record more steps of all ranks",
        )

    def what_if(self, change: Change) -> WhatIf:
        """Turn a change into a run to be predicted.

        More stages than layers, and steps too long to wait for, are refused before their order is
        written.
        """
        schedule, ranks, microbatches, chunks = self._sizes(change)
        written = change.order
        stages = count_stages(schedule, ranks, chunks) if written is None else stages_of(written)
        layers = self.layers_of(change.split, stages)
        if written is None and stages * microbatches > MOST_PASSES:
            raise UsageError(
                f"{counted(microbatches, 'microbatch', 'microbatches')} on "
                f"{counted(stages, 'stage')} are more than can be simulated",
                hint=f"stages x microbatches may be {show_count(MOST_PASSES)}",
            )
        order = written or order_for(schedule, ranks, microbatches, chunks)
        # Of how many layers more, as a share, the forward pass runs again.
        recomputed = 0.0
        if change.recompute is not None:
            recomputed = float(change.recompute) - self.ranks[0].recomputed_share
        return WhatIf(
            order=order,
            communication=self._communication(change),
            layers=layers,
            token_scale=self.microbatch_scale(change),
            recomputed=recomputed,
            hops_ns=dict(change.hops_ns),
        )

    def engine(self, change: Change) -> Engine:
        """Return what runs the order of a change."""
        way, meets = self._communication(change), not self.source.wires.buffers
        if change.order is not None:
            return planned_engine(change.order, way, rendezvous=meets)
        return engine_for(self._sizes(change), way, rendezvous=meets)

    def _sizes(self, change: Change) -> tuple[str, int, int, int | None]:
        schedule = change.schedule or self.schedule
        microbatches = change.microbatches or self.source.microbatches
        chunks = change.chunks or (self.source.chunks if change.schedule is None else None)
        return schedule, len(self.ranks), microbatches, chunks

    def most_passes(self, change: Change) -> int:
        """Return how many passes a changed step has at most, before its order is written."""
        schedule, ranks, microbatches, chunks = self._sizes(change)
        about = SCHEDULES.get(schedule)
        kinds = _MOST_KINDS if about is None else min(len(about.kinds), _MOST_KINDS)
        least = 1 if about is None else about.least_chunks
        return ranks * (chunks or least) * microbatches * kinds

    def microbatch_scale(self, change: Change) -> float:
        """Return how large a microbatch is against the measured one."""
        tokens = change.token_scale or 1.0
        if change.hold == "batch" and change.microbatches:
            return tokens * self.source.microbatches / change.microbatches
        return tokens

    def layers_of(self, split: Sequence[int] | None, stages: int) -> tuple[float, ...]:
        """Return what the layers of each stage take after a change: even where stages are new."""
        now, known = self.source.passes.layers, self.source.split
        if split is None and stages == len(now):
            return now
        if known is None:
            raise UsageError(
                "the layers of each stage are unknown",
                hint="give --layers, such as 4,4,4,4",
            )
        if split is None:
            split = even_split(sum(known), stages)
        if len(split) != stages:
            raise UsageError(
                f"the split is for {len(split)} stages, the run would have {stages}",
                hint="give the layers of each stage, first stage first",
            )
        return tuple(self.source.passes.priced(split).tolist())

    def peaks(self, change: Change) -> tuple[PeakMemory, ...] | None:
        """Return the peak memory of each rank after a change."""
        if self.memory is None or (change.recompute is False and self.ranks[0].recomputes):
            return None  # what is kept without recomputing, a run that recomputes does not show
        what_if = self.what_if(change)
        layers = self.split_of(change, len(what_if.layers))
        return predict_peaks(
            self.memory,
            what_if.order,
            layers=layers,
            token_scale=self.microbatch_scale(change),
            recompute=what_if.recomputed > 0,
        )

    def split_of(self, change: Change, stages: int) -> tuple[int, ...] | None:
        """Return layers of each stage after a change: even where stages are new."""
        known = self.source.split
        if change.split is not None or known is None or len(known) == stages:
            return change.split or known
        return even_split(sum(known), stages)

    def _communication(self, change: Change) -> Communication:
        if change.overlap:
            return beside_compute(change.schedule or self.schedule, self.framework)
        if change.schedule in {None, self.schedule}:
            return self.communication
        if self.communication is Communication.LATENCY:
            return Communication.LATENCY
        ways = possible_ways(change.schedule or "", self.framework)
        return self.communication if self.communication in ways else ways[0]

    @property
    def framework(self) -> str | None:
        """Whose framework ran it, where that shows."""
        return self.ranks[0].parallelism.framework

    @property
    def trains(self) -> bool:
        """Whether it has backward passes."""
        return self.schedule != "forward-only"


def measure_baseline(  # noqa: PLR0913 (what the traces may not tell, one argument each)
    timeline: Timeline,
    figures: PipelineFigures,
    *,
    layers: Sequence[int] | None = None,
    limit_bytes: float | None = None,
    schedule: str | None = None,
    basis: RunBasis | None = None,
    links: LinkHealth | None = None,
) -> Baseline:
    """Fit a run, and hold its own simulation against it.

    A batch in the profiler is not the batch one serves: `basis` says what it takes without.
    """
    links = links or judge_links(timeline, figures)
    source = measure_source(timeline, figures, layers, links.slow_hops)
    name = schedule or source.schedule
    if name is None:
        raise UsageError("the schedule was not recognised", hint="give --schedule, such as 1f1b")
    if name == "forward-only" and any(kind != PassKind.F for kind, _, _ in source.passes.base):
        raise UsageError(
            "the run has backward passes: it is not forward-only",
            hint="leave --schedule out, or give the one that trained",
        )
    order = _order(source, name)
    memory = _memory_run(timeline, source, name)
    # As the traces have it, `source` says it.
    elsewhere = basis if basis is not None and basis.source != "traces" else None
    window_ns = (elsewhere and elsewhere.batch_latency_ns) or source.window_ns
    outside_ns = source.outside_ns * window_ns / source.window_ns
    if elsewhere is not None and elsewhere.step_time_ns:
        outside_ns = elsewhere.step_time_ns - window_ns
    way, off = _way_that_lands(source, name)
    return Baseline(
        source=source,
        schedule=name,
        order=order,
        memory=None if memory is None else fit_memory(memory),
        limits=_limits(source.ranks, limit_bytes),
        window_ns=window_ns,
        basis=basis.name if basis is not None else Basis.PROFILED,
        outside_ns=round(outside_ns),
        correction=_corrected(source, off) * window_ns / source.window_ns,
        misfit=log(off),
        communication=way,
    )


@lru_cache(maxsize=_KEPT)
def order_for(schedule: str, ranks: int, microbatches: int, chunks: int | None) -> Order:
    """Return the order of a schedule; it is shared, so leave it as it is."""
    return order_of(schedule, ranks, microbatches, chunks)


def stages_of(order: Order) -> int:
    """Return how many stages an order has."""
    last: int = max(map(attrgetter("stage"), chain.from_iterable(order)))
    return 1 + last


@lru_cache(maxsize=_KEPT)
def engine_for(
    sizes: tuple[str, int, int, int | None], communication: Communication, *, rendezvous: bool
) -> Engine:
    """Return what runs the order of these sizes."""
    return planned_engine(order_for(*sizes), communication, rendezvous=rendezvous)


def even_split(layers: int, stages: int) -> tuple[int, ...]:
    """Cut layers as evenly as can be; the first stages take what is left over."""
    if layers < stages:
        raise UsageError(
            f"{layers} layers cannot fill {stages} stages",
            hint="each stage needs at least one layer",
        )
    each, rest = divmod(layers, stages)
    return tuple(each + (stage < rest) for stage in range(stages))


def _memory_run(timeline: Timeline, source: Source, schedule: str) -> MemoryRun | None:
    """Return what a run tells of memory; None where it does not say what grows with what."""
    memories = [rank.memory for rank in source.ranks]
    if any(
        memory is None or memory.static_bytes is None or memory.per_microbatch_bytes is None
        for memory in memories
    ):
        return None
    return memory_run(timeline, source.ranks[0].pipeline, _order(source, schedule), source.split)


def _order(source: Source, schedule: str) -> Order:
    return order_for(*_sizes(source, schedule))


def _sizes(source: Source, schedule: str) -> tuple[str, int, int, int | None]:
    return schedule, len(source.ranks), source.microbatches, source.chunks


def _way_that_lands(source: Source, schedule: str) -> tuple[Communication, float]:
    """Return how a run communicated, and what it took against its simulation that way.

    Of the framework's ways, the usual one first, that which puts messages together where the run
    did so and whose simulation of the run as it is lands on it.
    Where the framework does not show and the usual way does not land, all others are tried. What
    puts messages together where the run did not, or the other way round, comes last. Where no
    message was seen, none is made up: results are there at once.
    """
    order = _order(source, schedule)
    framework = source.ranks[0].parallelism.framework
    ways = possible_ways(schedule, framework)
    found: list[tuple[Communication, float]] = []

    def lands(way: Communication) -> bool:
        same = WhatIf(order=order, communication=way, layers=source.passes.layers)
        engine = engine_for(_sizes(source, schedule), way, rendezvous=not source.wires.buffers)
        try:
            found_ns = predict(
                source,
                same,
                draws=enough_draws(order, _DRAWS),
                engine=engine,
                same_launch=True,
            ).window_ns
        except OrderCycle:
            return False
        found.append((way, source.window_ns / found_ns))
        return abs(log(found[-1][1])) <= log(1 + FITS)

    if not source.wires.one_way and not source.wires.both_ways:
        lands(Communication.LATENCY)
    else:
        alike = [way for way in ways if (way in TOGETHER) == source.wires.batched]
        fits = [way for way in alike if lands(way)]
        if not fits and framework is None:
            known = [way for way in Communication if way not in {*ways, *MADE_UP}]
            others = [way for way in known if (way in TOGETHER) == source.wires.batched]
            fits = [way for way in others if lands(way)]
        if not fits and not alike:
            for way in ways:
                lands(way)
    if not found:
        lands(Communication.LATENCY)
    return min(found, key=lambda way_and_off: abs(log(way_and_off[1])))


def _corrected(source: Source, off: float) -> float:
    """Return by what predictions are multiplied: what the model misses, few steps' chance aside."""
    sure = _USUAL_MISFIT**2 / (_USUAL_MISFIT**2 + source.window_spread**2)
    corrected: float = off**sure
    return corrected


def _limits(ranks: Sequence[RankTimeline], limit_bytes: float | None) -> tuple[float | None, ...]:
    """Return each rank's memory: as given, else its device's, shared where ranks share that."""
    if limit_bytes is not None:
        return (limit_bytes,) * len(ranks)
    parts = ranks_a_device(ranks)
    known = [rank.memory.limit_bytes if rank.memory else None for rank in ranks]
    return tuple(None if limit is None else limit / parts for limit in known)
