"""A measured run in → what every lever starts from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from operator import attrgetter

from debubble.costs.devices import surely_share
from debubble.costs.memory import MemoryCosts, PeakMemory, fit_memory, predict_peaks
from debubble.costs.memory_run import memory_run
from debubble.costs.wire_pools import pool_wires
from debubble.errors import UsageError
from debubble.plan.change import Change, Setting
from debubble.plan.prepared import engine_for, order_for
from debubble.schedules import Order
from debubble.simulate.communication import Communication, usual_communication
from debubble.simulate.engine import Engine
from debubble.simulate.predict import WhatIf, predict
from debubble.simulate.source import Source, measure_source
from debubble.timeline.figures import PipelineFigures
from debubble.timeline.model import PassKind, RankTimeline, Timeline

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
    """Bytes of each rank's device."""
    window_ns: float
    """The batch latency that changes are held against."""
    correction: float
    """What the run took against what its own simulation says; predictions are multiplied by it."""

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
        )

    @property
    def over_limit_bytes(self) -> float | None:
        """How much more than its limit the fullest rank takes as it is; None where not known."""
        over = [
            rank.peak_memory_bytes - limit
            for rank, limit in zip(self.ranks, self.limits, strict=True)
            if limit is not None and rank.peak_memory_bytes is not None
        ]
        return max(over) if over else None

    def what_if(self, change: Change) -> WhatIf:
        """Turn a change into a run to be foretold."""
        order = order_for(*self._sizes(change))
        scale = self.microbatch_scale(change)
        return WhatIf(
            order=order,
            communication=self._communication(change),
            weights=self.weights(change.split, stages_of(order)),
            pass_scale=scale,
            message_scale=scale,
        )

    def engine(self, change: Change) -> Engine:
        """Return what runs the order of a change."""
        return engine_for(
            self._sizes(change),
            self._communication(change),
            rendezvous=not self.source.wires.buffers,
        )

    def _sizes(self, change: Change) -> tuple[str, int, int, int | None]:
        schedule = change.schedule or self.schedule
        microbatches = change.microbatches or self.source.microbatches
        chunks = change.chunks or (self.source.chunks if change.schedule is None else None)
        return schedule, len(self.ranks), microbatches, chunks

    def microbatch_scale(self, change: Change) -> float:
        """Return how large a microbatch is against the measured one."""
        if change.hold == "batch" and change.microbatches:
            return self.source.microbatches / change.microbatches
        return 1.0

    def weights(self, split: Sequence[int] | None, stages: int) -> tuple[float, ...]:
        """Return stages in layers: embedding stays on the first one, the head on the last."""
        now, known = self.source.passes.layers, self.source.split
        if split is None and stages == len(now):
            return now
        if known is None:
            raise UsageError(
                "how many layers each stage has is not known",
                hint="say it with --layers, such as 4,4,4,4",
            )
        if split is None:
            split = even_split(sum(known), stages)
        first, last = now[0] - known[0], now[-1] - known[-1]
        weights = [float(layers) for layers in split]
        weights[0] += first
        weights[-1] += last
        return tuple(weights)

    def peaks(self, change: Change) -> tuple[PeakMemory, ...] | None:
        """Return the peak memory of each rank after a change."""
        if self.memory is None:
            return None
        order = self.what_if(change).order
        layers = change.split
        if layers is None and stages_of(order) != len(self.source.passes.layers):
            layers = even_split(sum(self.source.split or ()), stages_of(order))
        return predict_peaks(
            self.memory, order, layers=layers, token_scale=self.microbatch_scale(change)
        )

    def _communication(self, change: Change) -> Communication:
        if change.overlap:
            return Communication.ASYNCHRONOUS
        return usual_communication(change.schedule or self.schedule)


def measure_baseline(  # noqa: PLR0913 (what the traces may not tell, one argument each)
    timeline: Timeline,
    figures: PipelineFigures,
    *,
    layers: Sequence[int] | None = None,
    limit_bytes: float | None = None,
    schedule: str | None = None,
    repaired: tuple[int, int] | None = None,
    latency_ns: float | None = None,
) -> Baseline:
    """Fit a run, and hold its own simulation against it.

    A hop that will be repaired, by its ranks, tells nothing of what messages will take. A batch in
    the profiler is not the batch one serves: `latency_ns` is what it takes without.
    """
    if layers is not None:
        _check_layers(layers, figures)
    source = measure_source(timeline, figures, layers)
    name = schedule or source.schedule
    if name is None:
        raise UsageError(
            "the schedule was not recognised", hint="say it with --schedule, such as 1f1b"
        )
    if name == "forward-only" and any(kind != PassKind.F for kind, _, _ in source.passes.base):
        raise UsageError(
            "the run has backward passes: it is not forward-only",
            hint="leave --schedule out, or say which one trained",
        )
    sizes = (name, len(source.ranks), source.microbatches, source.chunks)
    order = order_for(*sizes)
    has_memory = all(rank.memory is not None for rank in source.ranks)
    usual = usual_communication(name)
    same = WhatIf(order=order, communication=usual, weights=source.passes.layers)
    engine = engine_for(sizes, usual, rendezvous=not source.wires.buffers)
    found = Baseline(
        source=source,
        schedule=name,
        order=order,
        memory=_memory(timeline, figures.pipeline, order) if has_memory else None,
        limits=_limits(source.ranks, limit_bytes),
        window_ns=latency_ns or source.window_ns,
        correction=(latency_ns or source.window_ns)
        / predict(source, same, draws=_DRAWS, engine=engine).window_ns,
    )
    if repaired is None:
        return found
    healthy = pool_wires(timeline, figures.pipeline, but=repaired)
    return replace(found, source=replace(source, wires=healthy))


def _check_layers(layers: Sequence[int], figures: PipelineFigures) -> None:
    """Refuse a split of another number of layers than was found."""
    found = [one for rank in figures.ranks for one in rank.layers]
    stages = sum(len(rank.stages) for rank in figures.ranks)
    count = sum(one.layers for one in found)
    if len(layers) == stages == len(found) and sum(layers) != count:
        raise UsageError(
            f"--layers adds up to {sum(layers)}, and the traces show {count} layers",
            hint=f"leave it out, or give {stages} numbers that add up to {count}",
        )


def _memory(timeline: Timeline, pipeline: int, order: Order) -> MemoryCosts | None:
    """Fit memory; None where a rank does not tell how its own grows."""
    try:
        return fit_memory([memory_run(timeline, pipeline, order)])
    except UsageError:
        return None


def _limits(ranks: Sequence[RankTimeline], limit_bytes: float | None) -> tuple[float | None, ...]:
    """Return each rank's memory: as given, else its device's, shared where ranks share that."""
    if limit_bytes is not None:
        return (limit_bytes,) * len(ranks)
    parts = len(ranks) if surely_share(ranks) else 1
    known = [rank.memory.limit_bytes if rank.memory else None for rank in ranks]
    return tuple(None if limit is None else limit / parts for limit in known)


def stages_of(order: Order) -> int:
    """Return how many stages an order has."""
    return 1 + int(max(map(attrgetter("stage"), chain.from_iterable(order))))


def even_split(layers: int, stages: int) -> tuple[int, ...]:
    """Cut layers as evenly as can be; the first stages take what is left over."""
    if layers < stages:
        raise UsageError(
            f"{layers} layers cannot fill {stages} stages", hint="a stage has one layer or more"
        )
    each, rest = divmod(layers, stages)
    return tuple(each + (stage < rest) for stage in range(stages))
