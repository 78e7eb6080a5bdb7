"""The lever of the schedule: all orders that can run here, and why the others cannot."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from debubble.errors import UsageError
from debubble.plan.baseline import Baseline
from debubble.plan.change import Change
from debubble.plan.option import Idea
from debubble.schedules import SCHEDULES
from debubble.schedules.registry import Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """Something that will not be done, and why."""

    lever: str
    change: Change
    reason: str


def ideas(baseline: Baseline, microbatches: int | None = None) -> Iterator[Idea | Refused]:
    """Yield every other schedule of the run's kind, or what forbids it."""
    trains = baseline.schedule != "forward-only"
    for name, schedule in SCHEDULES.items():
        if name == baseline.schedule or (name == "forward-only") == trains:
            continue
        chunks = _chunks(baseline, schedule)
        change = Change(schedule=name, chunks=chunks, microbatches=microbatches)
        try:
            baseline.what_if(change)
        except UsageError as error:
            yield Refused(lever="schedule", change=change, reason=error.message)
        else:
            yield Idea(lever="schedule", change=change, assumptions=_assumed(name))


def _chunks(baseline: Baseline, schedule: Schedule) -> int:
    least, most = schedule.least_chunks, schedule.most_chunks
    if most is not None:
        return min(max(baseline.source.chunks, least), most)
    return max(baseline.source.chunks, least)


def _assumed(name: str) -> tuple[str, ...]:
    if name in {"zb-h1", "zb-h2"}:
        return ("torch runs it as an order of your own (CSV), through its runtime",)
    return ()
