"""A measured run in → what it tells of the costs of a changed run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from debubble.errors import UsageError
from debubble.simulate.costs.passes import (
    PassModel,
    data_parallel_of,
    fit_passes,
    inside_passes,
)
from debubble.simulate.costs.wire_pools import Hop, SlowHop, WirePools, pool_wires
from debubble.simulate.events import NEVER_NS
from debubble.simulate.lengths import batch_gaps, pass_gaps
from debubble.simulate.measured import MeasuredStep, measure_step
from debubble.timeline.figures import PipelineFigures
from debubble.timeline.model import (
    I64,
    Intervals,
    RankTimeline,
    Timeline,
    surely_share,
    without,
)
from debubble.timeline.steps import only_steps
from debubble.units import show_ranks

# The standard error of a median over that of a mean.
OF_MEDIAN = 1.25

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
    """From when a batch of messages could start to its start."""
    outside_ns: int
    """From a step's window to the next one's: optimizer, reductions, data loading."""
    window_ns: int
    window_spread: float
    """How unsure the middle of few steps is, of its logarithm."""
    bubble_fraction: float
    busy_share: float
    """Of a pass's stretch, what is compute."""
    repaired: bool = False
    """Hops that were slow in the run are taken to be as the others are."""
    shared: bool = False
    """All ranks are on one device."""


def measure_source(
    timeline: Timeline,
    figures: PipelineFigures,
    split: Sequence[int] | None = None,
    slow: Mapping[Hop, SlowHop] | None = None,
) -> Source:
    """Fit a run's costs; the user may state the layers of each stage.

    Hops that were judged `slow`, by ranks, come with how many times as long their messages take.
    """
    if not figures.windows or figures.microbatches is None or figures.batch_latency_ns is None:
        raise UsageError(
            "no step that can be planned with: no window, or no count of microbatches",
            hint="`debubble find` says why; capture whole steps of all ranks",
        )
    if figures.absent:
        ranks_missed = (
            f"{'rank' if len(figures.absent) == 1 else 'ranks'} {show_ranks(figures.absent)}"
        )
        raise UsageError(
            f"predictions need all ranks of the pipeline: no trace of {ranks_missed}",
            hint="capture all ranks; `debubble inspect` says what is wrong with their files",
        )
    ranks, steps = figures.ranks, [window.step for window in figures.windows]
    kept = only_steps(timeline, steps)
    stages = sorted(stage for rank in ranks for stage in rank.stages)
    known = tuple(split) if split else None
    found = {layers.stage: layers.layers for rank in ranks for layers in rank.layers}
    if known is None and set(stages) <= set(found):
        known = tuple(found[stage] for stage in stages)
    if known is not None and len(known) != len(stages):
        raise UsageError(
            f"{len(known)} stages have layers, and the run has {len(stages)} stages",
            hint="give the layers of each stage, such as 4,4,4,4",
        )
    measured = [measure_step(kept, figures.pipeline, step) for step in steps]
    passes = kept.passes.where(np.isin(kept.passes.rank, [rank.rank for rank in ranks]))
    gathers = inside_passes(passes, ranks, data_parallel_of)
    stretch = (passes.end_ns - passes.start_ns - gathers).sum()
    # Steps left out are no neighbours.
    between = [
        after.start_ns - before.end_ns
        for before, after in pairwise(figures.windows)
        if after.step == before.step + 1
    ]
    return Source(
        ranks=ranks,
        passes=fit_passes(kept, figures.pipeline, known),
        wires=pool_wires(kept, figures.pipeline, slow),
        split=known,
        steps=tuple(steps),
        microbatches=figures.microbatches,
        schedule=figures.schedule,
        chunks=max(len(rank.stages) for rank in ranks),
        data_ns=_waited_for_data(kept, ranks, measured),
        data_occupies=float(
            inside_passes(passes, ranks, _occupying_data).sum() / max(gathers.sum(), 1)
        ),
        pass_gap_ns=_rounded(np.mean, [_gaps_of_devices(step) for step in measured]),
        batch_gap_ns=_rounded(np.median, [_gaps_of_batches(step) for step in measured]),
        outside_ns=max(0, round(float(np.median(between)))) if between else 0,
        window_ns=figures.batch_latency_ns,
        window_spread=_spread_of_middle([w.end_ns - w.start_ns for w in figures.windows]),
        bubble_fraction=figures.bubble_fraction or 0.0,
        busy_share=float(passes.busy_ns.sum() / max(stretch, 1)),
        shared=surely_share(ranks),
    )


def _spread_of_middle(windows_ns: Sequence[int]) -> float:
    """Return the standard error of the median of some steps, as a share of it."""
    if len(windows_ns) < 2:
        return 0.0
    spread = float(np.std(windows_ns, ddof=1) / np.mean(windows_ns))
    return OF_MEDIAN * spread / float(np.sqrt(len(windows_ns)))


def _gaps_of_devices(step: MeasuredStep) -> I64:
    """Return the gaps before passes as devices see them: a planned run has no host."""
    never = np.full(len(step.program.passes), NEVER_NS)
    found = pass_gaps(step.program, step.times, never) - step.data_gaps_ns
    gaps: I64 = np.maximum(found[found < -NEVER_NS // 2], 0)
    return gaps


def _gaps_of_batches(step: MeasuredStep) -> I64:
    """Return the gaps before batches of messages."""
    found = batch_gaps(step.program, step.times, step.lengths.batch_floor)
    gaps: I64 = np.maximum(found[found < -NEVER_NS // 2], 0)
    return gaps


def _rounded(statistic: Callable[[I64], float], parts: Sequence[I64]) -> int:
    every = np.concatenate(parts)
    return round(float(statistic(every))) if len(every) else 0


def _occupying_data(rank: RankTimeline) -> Intervals:
    """Return gathers and reductions that count as occupied: those issued among passes."""
    return without(rank.data_parallel, without(rank.data_parallel, rank.occupied))


def _waited_for_data(
    timeline: Timeline, ranks: Sequence[RankTimeline], measured: Sequence[MeasuredStep]
) -> dict[Moment, tuple[int, int]]:
    """Return the means of each stage and kind, of first, last and other microbatches."""
    inside_ns: Counter[Moment] = Counter()
    before_ns: Counter[Moment] = Counter()
    count: Counter[Moment] = Counter()
    for step in measured:
        passes = timeline.passes.where(
            (timeline.passes.step == step.number)
            & np.isin(timeline.passes.rank, [rank.rank for rank in ranks])
        )
        inside = inside_passes(passes, tuple(ranks), data_parallel_of)
        last = int(passes.microbatch.max(initial=0))
        for table, lengths, total in (
            (passes, inside, inside_ns),
            (step.program.passes, step.data_gaps_ns, before_ns),
        ):
            columns = (table.stage, table.kind, table.microbatch, lengths)
            for stage, kind, number, length in zip(*(c.tolist() for c in columns), strict=True):
                key = stage, kind, moment_of(number, last)
                total[key] += length
                count[key] += total is inside_ns
    means = {
        key: (round(inside_ns[key] / of), round(before_ns[key] / of))
        for key, of in count.items()
        if of
    }
    return {key: both for key, both in means.items() if any(both)}


def moment_of(microbatch: int, last: int) -> str:
    """Say which of a step's microbatches gathers or reduces: its first, its last, or any other."""
    if microbatch == 0:
        return "first"
    return "last" if microbatch == last else "other"
