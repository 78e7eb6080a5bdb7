"""A schedule as the user states it, and a `Timeline`, in → its order here, where they differ."""

from __future__ import annotations

from dataclasses import dataclass

from debubble.errors import Code, Gap, UsageError
from debubble.schedules import Order, Statement
from debubble.timeline.model import Timeline
from debubble.timeline.recognise import Deviation, as_schedules_count, find_deviation
from debubble.units import show_count


@dataclass(frozen=True, slots=True, kw_only=True)
class StatedSchedule:
    """What the user states, held against what was measured."""

    name: str
    order: Order | None
    """None where it has none for what was run."""
    deviation: Deviation | None
    gaps: tuple[Gap, ...]

    @property
    def chunks(self) -> int | None:
        """The most stages that a rank has by it."""
        if self.order is None:
            return None
        return max(len({action.stage for action in actions}) for actions in self.order)

    @property
    def agrees(self) -> bool | None:
        """Whether all ranks followed it; None where that was not looked at."""
        if any(gap.code is Code.SCHEDULE_UNCHECKED for gap in self.gaps):
            return None
        return not self.gaps


def hold_against(
    statement: Statement,
    timeline: Timeline,
    pipeline: int,
    microbatches: int | None,
    *,
    streams: bool,
) -> StatedSchedule:
    """Make the stated order for this run and look where the run left it."""
    ranks = as_schedules_count(timeline, pipeline)
    name = statement.text
    if streams:
        return _unchecked(name, "batches overlap, so that no step has an order")
    if set(ranks[0].members) - {rank.rank for rank in ranks}:
        return _unchecked(name, "a rank of the pipeline has no trace")
    if microbatches is None:
        return _unchecked(name, "steps or stages differ in their microbatches")
    chunks = max(len(rank.stages) for rank in ranks)
    try:
        order = statement.order_for(len(ranks), microbatches, chunks)
    except UsageError as why:
        return _without_order(name, Code.SCHEDULE_DIFFERS, f"this cannot be {name}: {why.message}")
    deviation = find_deviation(timeline, pipeline, order)
    gaps = (_differs(name, deviation),) if deviation else ()
    return StatedSchedule(name=name, order=order, deviation=deviation, gaps=gaps)


def _unchecked(name: str, why: str) -> StatedSchedule:
    message = f"not held against the stated schedule {name}: {why}"
    return _without_order(name, Code.SCHEDULE_UNCHECKED, message)


def _without_order(name: str, code: Code, message: str) -> StatedSchedule:
    gap = Gap(code=code, message=message, hint="leave --schedule out to see what is recognised")
    return StatedSchedule(name=name, order=None, deviation=None, gaps=(gap,))


def _differs(name: str, off: Deviation) -> Gap:
    ran = f"ran {off.found}" if off.found else "ran nothing more"
    has = f"has {off.expected}" if off.expected else "has nothing more"
    return Gap(
        code=Code.SCHEDULE_DIFFERS,
        message=f"left the stated schedule {name} in step {off.step}: "
        f"as pass {show_count(off.place + 1)} it {ran}, where {name} {has}",
        hint="theory is that of what was stated, by --schedule or by the sidecars",
        rank=off.rank,
    )
