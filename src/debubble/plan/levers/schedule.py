"""The lever of order: every schedule that the framework can run."""

from __future__ import annotations

from collections.abc import Iterator

from debubble.errors import UsageError
from debubble.plan.change import SEARCHED, Change
from debubble.plan.emit.torch import TORCH_SCHEDULES
from debubble.plan.lever import Lever, Start
from debubble.plan.option import Idea
from debubble.timeline.schedules import SCHEDULES

FROM_FILE = "schedules that torch lacks run from an order file (CSV)"


def ideas(start: Start) -> Iterator[Idea]:
    """Yield every other schedule of the run's kind, or what forbids it."""
    baseline = start.baseline
    trains = baseline.trains
    for name, schedule in SCHEDULES.items():
        if name == baseline.schedule or (name == "forward-only") == trains:
            continue
        chunks = max(baseline.source.chunks, schedule.least_chunks)
        if schedule.most_chunks is not None:
            chunks = min(chunks, schedule.most_chunks)
        change = Change(schedule=name, chunks=chunks)
        try:
            baseline.what_if(change)
        except UsageError as error:
            yield Idea(lever="schedule", change=change, reason=error.with_cure)
        else:
            assumed = () if name in TORCH_SCHEDULES else (FROM_FILE,)
            yield Idea(lever="schedule", change=change, assumptions=assumed)


def words(change: Change) -> str:
    """Name the schedule of a change."""
    if not change.schedule or change.schedule == SEARCHED:
        return ""
    chunks = f" with {change.chunks} stages per rank" if (change.chunks or 1) > 1 else ""
    return f"schedule {change.schedule}{chunks}"


LEVER = Lever(key="schedule", position=20, ideas=ideas, words=words, shown=3)
