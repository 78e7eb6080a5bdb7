"""A measured run in → everything that what-ifs of it are made of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from debubble.costs.pass_model import PassModel, fit_passes
from debubble.costs.passes import data_parallel_of, inside_passes
from debubble.costs.wire_pools import WirePools, pool_wires
from debubble.errors import UsageError
from debubble.simulate.events import NEVER_NS
from debubble.simulate.lengths import pass_gaps
from debubble.simulate.measured import MeasuredStep, measure_step
from debubble.timeline.figures import PipelineFigures
from debubble.timeline.keep import only_steps
from debubble.timeline.model import Intervals, RankTimeline, Timeline, without

Moment = tuple[int, int, str]
"""Stage, kind, and whether of the first, the last or any other microbatch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """What one run tells of passes, messages and hosts."""

    ranks: tuple[RankTimeline, ...]
    passes: PassModel
    wires: WirePools
    split: tuple[int, ...] | None
    """Layers of each stage; None where they could not be told."""
    steps: tuple[int, ...]
    """That were measured."""
    microbatches: int
    schedule: str | None
    chunks: int
    data_ns: dict[Moment, tuple[int, int]]
    """What a pass waits for gathers and reductions of data parallelism: in its midst, before it."""
    data_occupies: float
    """Of what is gathered in the midst of passes, the share that occupies a rank by definition."""
    pass_gap_ns: int
    """From when a pass could start to its start; a host that its device keeps has yet to launch."""
    batch_gap_ns: int
    outside_ns: int
    """From a step's window to the next one's: optimizer, reductions, data loading."""
    window_ns: int
    bubble_fraction: float
    busy_share: float
    """Of a pass's stretch, what is compute."""


def measure_source(
    timeline: Timeline, figures: PipelineFigures, split: Sequence[int] | None = None
) -> Source:
    """Fit a run's costs; the user may state the layers of each stage."""
    if not figures.windows or figures.microbatches is None or figures.batch_latency_ns is None:
        raise UsageError(
            "no step that can be planned with: no window, or no count of microbatches",
            hint="`debubble find` says why; capture whole steps of all ranks",
        )
    ranks, steps = figures.ranks, [window.step for window in figures.windows]
    kept = only_steps(timeline, steps)
    stages = sum(len(rank.stages) for rank in ranks)
    known = tuple(split) if split else _layers_found(ranks)
    if known is not None and len(known) != stages:
        raise UsageError(
            f"{len(known)} stages have layers, and the run has {stages} stages",
            hint="give the layers of each stage, such as 4,4,4,4",
        )
    measured = [measure_step(kept, figures.pipeline, step) for step in steps]
    passes = kept.passes.where(np.isin(kept.passes.rank, [rank.rank for rank in ranks]))
    gathers = inside_passes(passes, ranks, data_parallel_of)
    stretch = (passes.end_ns - passes.start_ns - gathers).sum()
    return Source(
        ranks=ranks,
        passes=fit_passes(kept, figures.pipeline, known),
        wires=pool_wires(kept, figures.pipeline),
        split=known,
        steps=tuple(steps),
        microbatches=figures.microbatches,
        schedule=figures.schedule,
        chunks=max(len(rank.stages) for rank in ranks),
        data_ns=_waited_for_data(kept, ranks, measured),
        data_occupies=float(
            inside_passes(passes, ranks, _occupying_data).sum() / max(gathers.sum(), 1)
        ),
        pass_gap_ns=_pass_gap(measured),
        batch_gap_ns=_batch_gap([step.lengths.batch_gaps for step in measured]),
        outside_ns=_between(figures),
        window_ns=figures.batch_latency_ns,
        bubble_fraction=figures.bubble_fraction or 0.0,
        busy_share=float(passes.busy_ns.sum() / max(stretch, 1)),
    )


def _pass_gap(measured: Sequence[MeasuredStep]) -> int:
    """Return the mean gap before a pass, as its device sees it: a planned run has no host."""
    gaps = []
    for step in measured:
        never = np.full(len(step.program.passes), NEVER_NS)
        found = pass_gaps(step.program, step.times, never) - step.data_gaps_ns
        gaps.append(np.maximum(found[found < -NEVER_NS // 2], 0))
    every = np.concatenate(gaps)
    return round(float(every.mean())) if len(every) else 0


def _occupying_data(rank: RankTimeline) -> Intervals:
    """Return gathers and reductions that count as occupied: those issued among passes."""
    return without(rank.data_parallel, without(rank.data_parallel, rank.occupied))


def _waited_for_data(
    timeline: Timeline, ranks: Sequence[RankTimeline], measured: Sequence[MeasuredStep]
) -> dict[Moment, tuple[int, int]]:
    """Return the means of each stage and kind, of first, last and other microbatches."""
    inside_ns: dict[Moment, int] = {}
    before_ns: dict[Moment, int] = {}
    count: Counter[Moment] = Counter()
    for step in measured:
        passes = timeline.passes.where(
            (timeline.passes.step == step.number)
            & np.isin(timeline.passes.rank, [rank.rank for rank in ranks])
        )
        inside = inside_passes(passes, tuple(ranks), data_parallel_of)
        table, last = step.program.passes, int(passes.microbatch.max(initial=0))
        for columns, total in (
            ((passes.stage, passes.kind, passes.microbatch, inside), inside_ns),
            ((table.stage, table.kind, table.microbatch, step.data_gaps_ns), before_ns),
        ):
            for stage, kind, number, length in zip(*(c.tolist() for c in columns), strict=True):
                key = stage, kind, moment_of(number, last)
                total[key] = total.get(key, 0) + length
                count[key] += total is inside_ns
    means = {
        key: (round(inside_ns.get(key, 0) / of), round(before_ns.get(key, 0) / of))
        for key, of in count.items()
        if of
    }
    return {key: both for key, both in means.items() if any(both)}


def moment_of(microbatch: int, last: int) -> str:
    """Say which of a step's microbatches gathers or reduces: its first, its last, or any other."""
    if microbatch == 0:
        return "first"
    return "last" if microbatch == last else "other"


def _between(figures: PipelineFigures) -> int:
    """Return what lies between two windows, in the middle; steps left out are no neighbours."""
    gaps = [
        after.start_ns - before.end_ns
        for before, after in pairwise(figures.windows)
        if after.step == before.step + 1
    ]
    return max(0, round(float(np.median(gaps)))) if gaps else 0


def _batch_gap(gaps: Sequence[np.ndarray[tuple[int], np.dtype[np.int64]]]) -> int:
    every = np.concatenate(gaps)
    return round(float(every.mean())) if len(every) else 0


def _layers_found(ranks: Sequence[RankTimeline]) -> tuple[int, ...] | None:
    found = {layers.stage: layers.layers for rank in ranks for layers in rank.layers}
    stages = sorted(stage for rank in ranks for stage in rank.stages)
    return tuple(found[stage] for stage in stages) if set(stages) <= set(found) else None
