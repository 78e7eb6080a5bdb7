"""The lever of an order made for this run: what it buys beyond the best schedule with a name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from debubble.errors import UsageError
from debubble.plan.advice import WORTH
from debubble.plan.change import SEARCHED, Change
from debubble.plan.lever import Lever, Start
from debubble.plan.levers import recompute, schedule
from debubble.plan.option import (
    Idea,
    Option,
    all_fit,
    headroom_after,
    quick_latency_s,
    splits_backward,
    weigh,
)
from debubble.simulate.events import OrderCycle
from debubble.units import counted, show_percent

if TYPE_CHECKING:
    from debubble.plan.orders.search import FoundOrder

# Schedules that are nearly as quick by their means are weighed in full: the best of those counts.
_WEIGHED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderChoice:
    """An order that a search found, and the best schedule with a name beside it."""

    option: Option
    named: Option | None
    """None where none fits the memory of all ranks, recomputing or not."""
    named_as: str
    found: FoundOrder

    @property
    def beyond_named(self) -> float | None:
        """What it gains in latency beyond the best with a name, as a share of that."""
        return None if self.named is None else 1 - self.option.window_ns / self.named.window_ns


def ideas(start: Start) -> Iterator[OrderChoice | Idea]:
    """Yield the best order that a search finds, weighed, if one was asked for."""
    baseline, question = start.baseline, start.search
    if question is None:
        return
    if not baseline.trains:
        raise UsageError("forward passes have one order only", hint="leave --search out")
    from debubble.plan.orders.search import find_order  # noqa: PLC0415 (an annex)

    split = None if start.partition is None else start.partition.split
    found = find_order(baseline, question, split)
    if found is None:
        reason = "no order fits the memory of all ranks"
        yield Idea(lever="order", change=Change(), reason=reason)
        return
    named_as, named = _best_named(start)
    if found.name is None:
        idea = Idea(lever="order", change=found.change, assumptions=(schedule.FROM_FILE,))
        option = weigh(baseline, idea)
        ordered = OrderChoice(option=option, named=named, named_as=named_as, found=found)
        if ordered.beyond_named is None or ordered.beyond_named > WORTH:
            yield ordered
            return
    yield Idea(
        lever="order",
        change=Change(),
        reason=f"no order found in {counted(found.rounds, 'round')} beats {named_as} by 1 %; the "
        f"best is {show_percent(found.latency_s / found.lower_bound_s - 1)} above the lower bound",
    )


def _best_named(start: Start) -> tuple[str, Option | None]:
    """Return the best of all schedules with a name that fit, the run's own among them.

    Each as layers are cut, and with the best split: an order is not praised for a split. And each
    with all stages recomputing: where memory is little, that is what there is to choose from.
    """
    baseline = start.baseline
    found = [Idea(lever="schedule", change=Change())]
    found += [idea for idea in schedule.ideas(start) if not idea.reason]
    split = None if start.partition is None else start.partition.split
    if split is not None:
        found += [
            replace(idea, change=replace(idea.change, split=split))
            for idea in found
            if len(baseline.what_if(idea.change).layers) == len(split)
        ]
    if baseline.memory is not None and not baseline.ranks[0].recomputes:
        # Not where weight gradients run apart: torch would recompute for each of them.
        found += [
            replace(idea, change=replace(idea.change, recompute=True))
            for idea in found
            if not splits_backward(baseline.what_if(idea.change).order)
        ]
    timed: list[tuple[float, int, Idea]] = []
    for idea in found:
        if all_fit(headroom_after(baseline, idea.change)) is False:
            continue
        try:
            timed.append((quick_latency_s(baseline, idea.change), len(timed), idea))
        except OrderCycle:
            continue
    first = sorted(timed, key=lambda one: one[:2])[:_WEIGHED]
    weighed = [weigh(baseline, idea) for _, _, idea in first]
    best = min(weighed, key=lambda option: option.window_ns, default=None)
    if best is None:
        return "none", None
    name = best.change.schedule or baseline.schedule
    if best.change.split is not None and best.change.split != baseline.source.split:
        name += f" with split {','.join(map(str, best.change.split))}"
    if parts := recompute.words(best.change):
        name += f" with {parts}"
    return name, best


def words(change: Change) -> str:
    """Say that an order was made for the run."""
    if change.schedule != SEARCHED:
        return ""
    parts = ["searched order"]
    if (change.chunks or 1) > 1:
        parts.append(f"{change.chunks} stages per rank")
    return ", ".join(parts)


LEVER = Lever(key="order", position=25, ideas=ideas, words=words)
