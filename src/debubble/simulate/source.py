"""A measured run in → everything that what-ifs of it are made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from debubble.costs.pass_model import PassModel, fit_passes
from debubble.costs.wire_pools import WirePools, pool_wires
from debubble.errors import UsageError
from debubble.simulate.measured import measure_step
from debubble.timeline.figures import PipelineFigures
from debubble.timeline.keep import only_steps
from debubble.timeline.model import RankTimeline, Timeline


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
    pass_gap_ns: int
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
    stretch = (passes.end_ns - passes.start_ns).sum()
    return Source(
        ranks=ranks,
        passes=fit_passes(kept, figures.pipeline, _weights(ranks, known, stages)),
        wires=pool_wires(kept, figures.pipeline),
        split=known,
        steps=tuple(steps),
        microbatches=figures.microbatches,
        schedule=figures.schedule,
        chunks=max(len(rank.stages) for rank in ranks),
        pass_gap_ns=round(float(np.mean([step.lengths.pass_gaps.mean() for step in measured]))),
        batch_gap_ns=_batch_gap([step.lengths.batch_gaps for step in measured]),
        outside_ns=_between(figures),
        window_ns=figures.batch_latency_ns,
        bubble_fraction=figures.bubble_fraction or 0.0,
        busy_share=float(passes.busy_ns.sum() / max(stretch, 1)),
    )


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


def _weights(
    ranks: Sequence[RankTimeline], split: Sequence[int] | None, stages: int
) -> tuple[float, ...]:
    """Return each stage's layers and, in layers, what comes before and after them."""
    if split is None:
        return (1.0,) * stages
    weights = [float(layers) for layers in split]
    for rank in ranks:
        for layers in rank.layers:
            if layers.layer_ns > 0:
                extra = (layers.before_ns + layers.after_ns) / layers.layer_ns
                weights[layers.stage] += extra if extra >= _LEAST_EXTRA else 0.0
    return tuple(weights)


# Less than this of a layer is what lies between layers, not an embedding or a head.
_LEAST_EXTRA = 0.1
