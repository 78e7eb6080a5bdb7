"""Sizes in → the order of passes per rank out. Order only: no durations, no idle slots."""

from __future__ import annotations

from debubble.timeline.schedules.finish import (
    Holdings,
    can_finish,
    check_order,
    hold,
)
from debubble.timeline.schedules.named import (
    SCHEDULES,
    Action,
    Order,
    Placement,
    Shape,
    candidate_orders,
    count_stages,
    order_of,
    place_stages,
    placement_of,
)
from debubble.timeline.schedules.stated import (
    Statement,
    format_order,
    parse_order,
    read_order,
    state_schedule,
)

__all__ = [
    "SCHEDULES",
    "Action",
    "Holdings",
    "Order",
    "Placement",
    "Shape",
    "Statement",
    "can_finish",
    "candidate_orders",
    "check_order",
    "count_stages",
    "format_order",
    "hold",
    "order_of",
    "parse_order",
    "place_stages",
    "placement_of",
    "read_order",
    "state_schedule",
]
