"""csv: the order of passes as a file, which torchtitan and torch's runtime load."""

from __future__ import annotations

from debubble.errors import UsageError
from debubble.plan.change import Change, Setting
from debubble.plan.emit.aim import aim_of, microbatches_of, only_splits, schedule_of
from debubble.schedules import SCHEDULES, format_order, order_of, read_order

FILE = "order.csv"
"""What other emitters call the file that this one fills."""


def emit(change: Change, setting: Setting) -> str:
    """Write the order; the split of layers is no part of it."""
    aim = aim_of(change, setting, layers_matter=False)
    if only_splits(change):
        raise UsageError(
            "an order of passes says nothing of layers",
            hint="write the split for the framework that you run",
        )
    schedule = schedule_of(aim)
    if schedule not in SCHEDULES:
        return format_order(read_order(schedule))
    return format_order(order_of(schedule, aim.ranks, microbatches_of(aim), aim.chunks))


POSITION = 100
EMITTERS = {"csv": emit}
