"""A `Timeline` in → the steps that figures are made of, and why the others are not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from debubble.errors import Code, Gap
from debubble.timeline.model import Passes, PassKind, RankTimeline, Timeline
from debubble.trace.run_gaps import show_ranks

# Of so few steps none is left out for being cold: what is left would be too little to measure.
_ALWAYS_KEPT = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """A step that no figure is made of."""

    step: int
    why: Code


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """The steps of one pipeline."""

    kept: tuple[int, ...]
    left_out: tuple[LeftOut, ...]
    partial: bool
    """No step is whole: the figures are of parts."""
    gaps: tuple[Gap, ...]


def choose_steps(timeline: Timeline, pipeline: int, asked: int | None = None) -> Chosen:
    """Keep the steps that all ranks hold whole, without those in which set-up was seen.

    A step that was asked for is kept anyway, if all ranks hold some of it.
    """
    ranks = timeline.ranks_of(pipeline)
    names = [rank.rank for rank in ranks]
    passes = timeline.passes.where(np.isin(timeline.passes.rank, names))
    holders = {step: set(passes.rank[passes.step == step].tolist()) for step in timeline.steps}
    absent = {step: set(names) - held for step, held in holders.items() if held}
    common = [step for step, without in absent.items() if not without]
    cold = _cold(ranks, common)
    cut = {step: found for step in common if (found := _cut_on(passes, ranks, step))}
    if sum(step not in cut or step in cold for step in common) <= _ALWAYS_KEPT:
        cold = {}
    cut = {step: found for step, found in cut.items() if step not in cold}
    whole = [step for step in common if step not in cut]
    warm = [step for step in whole if step not in cold]
    kept = warm or whole or common
    if asked in common:
        kept = sorted({*kept, asked})
    uneven = {step: without for step, without in absent.items() if without}
    reasons = ((uneven, Code.UNEVEN_STEPS), (cut, Code.CUT_STEPS), (cold, Code.COLD_STEPS))
    left_out = [
        LeftOut(step=step, why=code)
        for steps, code in reasons
        for step in steps
        if step not in kept
    ]
    return Chosen(
        kept=tuple(kept),
        left_out=tuple(sorted(left_out, key=lambda one: one.step)),
        partial=asked in cut or (bool(kept) and not whole),
        gaps=tuple(_gaps(uneven, cut, cold, kept)),
    )


def only_steps(timeline: Timeline, steps: Iterable[int]) -> Timeline:
    """Return a timeline that knows no other passes and transfers; its ranks stay as busy."""
    kept = tuple(steps)
    passes, transfers = timeline.passes, timeline.transfers
    return replace(
        timeline,
        steps=kept,
        passes=passes.where(np.isin(passes.step, kept)),
        transfers=transfers.where(np.isin(transfers.step, kept)),
    )


def _cold(ranks: Sequence[RankTimeline], steps: Sequence[int]) -> dict[int, str]:
    seen: dict[int, str] = {}
    for rank in ranks:
        for step, what in rank.set_up:
            if step in steps:
                seen.setdefault(step, f"{what} (rank {rank.rank})")
    return seen if len(seen) < len(steps) else {}


def _cut_on(passes: Passes, ranks: Sequence[RankTimeline], step: int) -> set[int]:
    """Return the ranks that hold only a part of a step.

    Every stage runs all microbatches forward, and each of them backward if it does so at all: the
    first stages of a model may be frozen.
    """
    here = passes.where(passes.step == step)
    counts = {
        stage: np.bincount(here.kind[here.stage == stage], minlength=len(PassKind))
        for stage in np.unique(here.stage).tolist()
    }
    most = max(int(count.max()) for count in counts.values())
    backward = {stage: _backward(count) for stage, count in counts.items()}
    unfinished = {stage for stage, count in backward.items() if 0 < count < most}
    if unfinished:
        unfinished |= {stage for stage, count in backward.items() if count == 0}
    cut = {stage for stage, count in counts.items() if count[PassKind.F] < most} | unfinished
    return {rank.rank for rank in ranks if cut & set(rank.stages) or step in rank.unfinished}


def _backward(count: np.ndarray[tuple[int], np.dtype[np.int64]]) -> int:
    """Return for how many microbatches all gradients were computed."""
    return int(count[PassKind.B] + count[PassKind.W])


def _gaps(
    uneven: Mapping[int, set[int]],
    cut: Mapping[int, set[int]],
    cold: Mapping[int, str],
    kept: Sequence[int],
) -> Iterable[Gap]:
    if uneven:
        yield Gap(
            code=Code.UNEVEN_STEPS,
            message=f"{_named(uneven)} left out: {_ranks(uneven)} did not capture "
            + ("it" if len(uneven) == 1 else "all of them"),
            hint="capture the same steps on all ranks",
        )
    if cut:
        parts = [step for step in cut if step in kept]
        yield Gap(
            code=Code.CUT_STEPS,
            message=f"{_named(cut)} captured in part by {_ranks(cut)}; "
            + ("there is no whole one, so figures are of the part" if parts else "left out"),
            hint="let the capture begin and end between two steps",
        )
    if cold:
        step, what = next(iter(cold.items()))
        yield Gap(
            code=Code.COLD_STEPS,
            message=f"{_named(cold)} left out: set-up was seen in step {step}, {what}",
            hint="let the job run a few steps before the capture",
        )


def _named(steps: Iterable[int]) -> str:
    numbers = sorted(steps)
    return f"{'step' if len(numbers) == 1 else 'steps'} {show_ranks(numbers)}"


def _ranks(steps: Mapping[int, set[int]]) -> str:
    ranks = sorted(set().union(*steps.values()))
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {show_ranks(ranks)}"
