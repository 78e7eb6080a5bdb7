"""Sizes or an order in → the bubble that theory gives."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from debubble.simulate.communication import Communication
from debubble.simulate.hand_set import GivenCosts, run_order
from debubble.timeline.model import PassKind
from debubble.timeline.schedules import Order

_DIGITS = 1e9


def bubble_fraction(p: int, m: int) -> float:
    """Return the share of a step that ranks wait: equal stages, free transfers, one stage a rank.

    It holds for forward-only, GPipe and 1F1B alike.
    """
    return (p - 1) / (m + p - 1)


def bubble_fraction_of_stream(p: int, k: float) -> float:
    """Return the share of time that ranks wait with k batches in flight at all times."""
    return max(0.0, 1 - k / p)


def ideal_bubble(order: Order, duration: Mapping[str, float]) -> float:
    """Return the share of time that ranks wait when nothing but the order makes them wait."""
    stages = 1 + max(action.stage for actions in order for action in actions)
    # To nine digits, whatever the unit.
    scale = _DIGITS / max(duration.values())
    passes = {
        PassKind[kind]: np.full(stages, round(took * scale)) for kind, took in duration.items()
    }
    _, times = run_order(order, GivenCosts(passes=passes), Communication.LATENCY)
    busy = int((times.pass_end - times.pass_start).sum())
    return 1 - busy / (len(order) * int(times.window_ns))
