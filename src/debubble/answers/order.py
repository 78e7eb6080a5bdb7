"""An order of passes that was looked for in → what is answered of it."""

from __future__ import annotations

from debubble.answers.base import Part
from debubble.plan.levers.order import Ordered
from debubble.plan.plan import Plan
from debubble.schedules import format_order
from debubble.units import NS_PER_S, counted, show_duration, show_share


class OrderPart(Part, frozen=True, kw_only=True):
    """What an order of its own buys beyond the best schedule with a name."""

    option: int
    """Its place among all options."""
    named: str
    named_latency_s: float
    beyond_named_fraction: float
    """Of the latency of the best with a name."""
    lower_bound_s: float
    """No order of these stages can be under it, with messages as a delay a hop."""
    above_bound_fraction: float
    rounds: int
    judged_rounds: int
    """Rounds in which orders were judged by the simulator that prices all options."""
    orders_tried: int
    order: str
    """The passes of each rank, as CSV."""


def answer_order(plan: Plan, ordered: Ordered) -> OrderPart:
    """Say where it stands among the options, and how far it was looked for."""
    found, correction = ordered.looked.found, plan.baseline.correction
    return OrderPart(
        option=plan.options.index(ordered.option),
        named=ordered.named_as,
        named_latency_s=ordered.named.window_ns / NS_PER_S,
        beyond_named_fraction=ordered.beyond_named,
        lower_bound_s=found.bound * correction / NS_PER_S,
        above_bound_fraction=found.window / found.bound - 1,
        rounds=found.rounds,
        judged_rounds=found.judged_rounds,
        orders_tried=found.tried,
        order=format_order(ordered.option.change.order or []),
    )


def say_order(ordered: Ordered) -> str:
    """Say what an order of its own buys beyond the best with a name, and how far it can go."""
    found = ordered.looked.found
    rounds = counted(found.rounds + found.judged_rounds, "round")
    return (
        f"Beyond the best schedule with a name, {ordered.named_as}, an order of its own buys "
        f"{show_share(ordered.beyond_named)}: {show_duration(ordered.option.window_ns)} instead of "
        f"{show_duration(ordered.named.window_ns)} ({rounds}; with messages as a delay a hop it is "
        f"{show_share(found.window / found.bound - 1)} above what no order can be under)."
    )
