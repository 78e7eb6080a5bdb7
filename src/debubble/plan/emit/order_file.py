"""csv: the order of passes as a file, which torchtitan and torch's runtime load."""

from __future__ import annotations

from debubble.plan.change import Change, Setting
from debubble.plan.emit.aim import aim_of, cannot, microbatches_of, schedule_of
from debubble.timeline.schedules import format_order, order_of


def emit(change: Change, setting: Setting) -> str:
    """Write the order of a change that is an order and nothing else."""
    if change.split is not None:
        raise cannot("an order of passes", "a split", "write it for the framework that you run")
    if change.overlap is not None:
        raise cannot(
            "an order of passes",
            "how messages travel",
            "write it for the framework that you run",
        )
    return order_text(change, setting)


def order_text(change: Change, setting: Setting) -> str:
    """Write the order of passes of any change; whatever else it changes is no part of it."""
    aim = aim_of(change, setting, layers_matter=False)
    schedule = schedule_of(aim)
    if aim.order is not None:
        return format_order(aim.order)
    return format_order(order_of(schedule, aim.ranks, microbatches_of(aim), aim.chunks))


def order_beside(text: str, change: Change, setting: Setting) -> str | None:
    """Return the order of passes that a text names the file of; None where it names none."""
    return order_text(change, setting) if say_order(setting) in text else None


def say_order(setting: Setting) -> str:
    """Say in a comment what the file is."""
    return f"{setting.order_file}: the order of passes, written by `plan --emit` (-o names it)."


EMITTERS = {"csv": emit}
