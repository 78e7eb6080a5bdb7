"""The lever of activations: the other way to have them, recomputed or kept."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

from debubble.plan.baseline import Baseline
from debubble.plan.change import Change
from debubble.plan.lever import Lever, Start
from debubble.plan.levers import schedule
from debubble.plan.option import (
    Idea,
    all_fit,
    headroom_after,
    quick_latency_s,
    splits_backward,
)
from debubble.simulate.events import OrderCycle


def ideas(start: Start) -> Iterator[Idea]:
    """Yield the other way, where a run trains and its layers are known."""
    baseline = start.baseline
    if not baseline.trains or baseline.source.split is None:
        return
    recomputes = baseline.ranks[0].recomputes
    yield Idea(lever="recompute", change=Change(recompute=not recomputes))
    if not recomputes:
        yield from _where_memory_lacks(start)


def _where_memory_lacks(start: Start) -> Iterator[Idea]:
    """Yield the quickest of what does not fit as it is, and does if some stages recompute.

    Those of ranks that lack memory: ranks hold what they hold whatever others do. Not of schedules
    with weight gradients apart: torch would recompute once more for each of them.
    """
    baseline = start.baseline
    candidates = [Idea(lever="recompute", change=Change())]
    candidates += [idea for idea in schedule.ideas(start) if isinstance(idea, Idea)]
    timed = []
    for number, idea in enumerate(candidates):
        stages = _lacking(baseline, idea.change)
        if not stages:
            continue
        change = replace(idea.change, recompute_stages=stages)
        if all_fit(headroom_after(baseline, change)):
            with suppress(OrderCycle):
                seconds = quick_latency_s(baseline, change)
                lighter = Idea(lever="recompute", change=change, assumptions=idea.assumptions)
                timed.append((seconds, number, lighter))
    if timed:
        yield min(timed, key=lambda one: one[:2])[2]


def _lacking(baseline: Baseline, change: Change) -> tuple[int, ...]:
    """Return the stages of ranks that do not fit; none where that would not help."""
    order, left = baseline.what_if(change).order, headroom_after(baseline, change)
    if left is None or splits_backward(order):
        return ()
    return tuple(
        sorted(
            {
                action.stage
                for actions, rank in zip(order, left, strict=True)
                for action in actions
                if rank.fits is False
            }
        )
    )


def words(change: Change) -> str:
    """Say what becomes of activations."""
    parts = []
    if change.recompute is not None:
        parts.append("activations recomputed" if change.recompute else "activations kept")
    if change.recompute_stages:
        names = ", ".join(map(str, change.recompute_stages))
        of = "stage" if len(change.recompute_stages) == 1 else "stages"
        parts.append(f"activations of {of} {names} recomputed")
    return ", ".join(parts)


LEVER = Lever(key="recompute", position=60, ideas=ideas, words=words)
