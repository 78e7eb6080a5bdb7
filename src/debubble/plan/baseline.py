"""A measured run in → what every lever starts from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from debubble.costs.memory import MemoryCosts, PeakMemory, fit_memory, predict_peaks
from debubble.costs.memory_run import MemoryRun, memory_run
from debubble.costs.pass_model import share_device
from debubble.errors import UsageError
from debubble.plan.change import Change, Setting
from debubble.schedules import Order, order_of
from debubble.simulate.communication import Communication, usual_communication
from debubble.simulate.pooled import Pooled, pool_sources
from debubble.simulate.predict import WhatIf, predict
from debubble.simulate.source import Source, measure_source
from debubble.timeline.figures import PipelineFigures
from debubble.timeline.model import RankTimeline, Timeline

# Ties the middle of the draws to the measured run; enough for half a percent.
_DRAWS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """The run as it is."""

    source: Source
    schedule: str
    order: Order
    memory: MemoryCosts | None
    """None where the traces hold no memory."""
    limits: tuple[float | None, ...]
    """Bytes of each rank's device."""
    correction: float
    """What the run took against what its own simulation says; predictions are multiplied by it."""
    pooled: Pooled | None = None
    """What another run adds, where one was given."""
    other_correction: float | None = None
    """Of that other run, by its own simulation."""

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

    def what_if(self, change: Change) -> WhatIf:
        """Turn a change into a run to be foretold."""
        schedule = change.schedule or self.schedule
        microbatches = change.microbatches or self.source.microbatches
        chunks = change.chunks or (self.source.chunks if change.schedule is None else None)
        order = change.order or order_of(schedule, len(self.ranks), microbatches, chunks)
        return WhatIf(
            order=order,
            communication=self._communication(schedule, change),
            weights=self.weights(change.split, stages_of(order)),
            token_scale=self.microbatch_scale(change),
        )

    def microbatch_scale(self, change: Change) -> float:
        """Return how large a microbatch is against the measured one."""
        tokens = change.token_scale or 1.0
        if change.hold == "batch" and change.microbatches:
            return tokens * self.source.microbatches / change.microbatches
        return tokens

    def correction_for(self, change: Change) -> float:
        """Return the run's own correction or, with other tokens, one between both runs'."""
        if self.pooled is None or self.other_correction is None or self.pooled.same_tokens:
            return self.correction
        way = (self.microbatch_scale(change) - 1) / (self.pooled.token_ratio - 1)
        way = min(max(way, 0.0), 1.0)
        both = self.correction ** (1 - way) * self.other_correction**way
        return float(both)

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
        if len(split) != stages:
            raise UsageError(
                f"the split is for {len(split)} stages, the run would have {stages}",
                hint="give the layers of each stage, first stage first",
            )
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
        layers = self.split_of(change, stages_of(order))
        return predict_peaks(
            self.memory, order, layers=layers, token_scale=self.microbatch_scale(change)
        )

    def split_of(self, change: Change, stages: int) -> tuple[int, ...] | None:
        """Return layers of each stage after a change: even where stages are new."""
        known = self.source.split
        if change.split is not None or known is None or len(known) == stages:
            return change.split or known
        return even_split(sum(known), stages)

    def _communication(self, schedule: str, change: Change) -> Communication:
        if change.overlap:
            return Communication.ASYNCHRONOUS
        return usual_communication(schedule)


@dataclass(frozen=True, slots=True, kw_only=True)
class AlsoRun:
    """Another run of the same model, as measured."""

    timeline: Timeline
    figures: PipelineFigures
    layers: Sequence[int] | None = None
    """Of each stage, where they are not told."""
    token_ratio: float | None = None
    """Tokens of a microbatch over those of the first run, where that was said."""


def measure_baseline(  # noqa: PLR0913 (a run, and all that may be said of it)
    timeline: Timeline,
    figures: PipelineFigures,
    *,
    layers: Sequence[int] | None = None,
    limit_bytes: float | None = None,
    schedule: str | None = None,
    also: AlsoRun | None = None,
) -> Baseline:
    """Fit a run, alone or with another of its model, and hold its own simulation against it."""
    source = measure_source(timeline, figures, layers)
    name = schedule or source.schedule
    if name is None:
        raise UsageError(
            "the schedule was not recognised", hint="say it with --schedule, such as 1f1b"
        )
    order = _order(source, name)
    memory = _memory_run(timeline, source, name)
    runs = [] if memory is None else [memory]
    pooled, correction = None, None
    if also is not None:
        other = measure_source(also.timeline, also.figures, also.layers)
        pooled = pool_sources(source, other, also.token_ratio)
        source = pooled.source
        more = _memory_run(also.timeline, other, other.schedule)
        runs += [more] if runs and more and pooled.same_tokens else []
        if other.schedule is not None:
            correction = _correction(other, _order(other, other.schedule), other.schedule)
    return Baseline(
        source=source,
        schedule=name,
        order=order,
        memory=fit_memory(runs) if runs else None,
        limits=_limits(source.ranks, limit_bytes),
        correction=_correction(source, order, name),
        pooled=pooled,
        other_correction=correction,
    )


def _memory_run(timeline: Timeline, source: Source, schedule: str | None) -> MemoryRun | None:
    """Return what a run tells of memory; None where it does not say what grows with what."""
    memories = [rank.memory for rank in source.ranks]
    if schedule is None or any(
        one is None or one.static_bytes is None or one.per_microbatch_bytes is None
        for one in memories
    ):
        return None
    return memory_run(timeline, source.ranks[0].pipeline, _order(source, schedule))


def _order(source: Source, schedule: str) -> Order:
    return order_of(schedule, len(source.ranks), source.microbatches, source.chunks)


def _correction(source: Source, order: Order, schedule: str) -> float:
    same = WhatIf(
        order=order, communication=usual_communication(schedule), weights=source.passes.layers
    )
    return source.window_ns / predict(source, same, draws=_DRAWS).window_ns


def _limits(ranks: Sequence[RankTimeline], limit_bytes: float | None) -> tuple[float | None, ...]:
    """Return each rank's memory: as given, else its device's, shared where ranks share that."""
    if limit_bytes is not None:
        return (limit_bytes,) * len(ranks)
    parts = len(ranks) if share_device(ranks) else 1
    known = [rank.memory.limit_bytes if rank.memory else None for rank in ranks]
    return tuple(None if limit is None else limit / parts for limit in known)


def stages_of(order: Order) -> int:
    """Return how many stages an order has."""
    return 1 + max(action.stage for actions in order for action in actions)


def even_split(layers: int, stages: int) -> tuple[int, ...]:
    """Cut layers as evenly as can be; the first stages take what is left over."""
    if layers < stages:
        raise UsageError(
            f"{layers} layers cannot fill {stages} stages", hint="a stage has one layer or more"
        )
    each, rest = divmod(layers, stages)
    return tuple(each + (stage < rest) for stage in range(stages))
