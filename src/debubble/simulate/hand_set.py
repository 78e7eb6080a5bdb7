"""Costs as a person sets them in → one simulated run of an order out.

Costs may be times or plain numbers. Of plain numbers only ratios count: a unit is run as one
millisecond.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from debubble.errors import UsageError
from debubble.schedules import Order
from debubble.simulate.as_timeline import as_timeline
from debubble.simulate.communication import Communication
from debubble.simulate.engine import Engine
from debubble.simulate.given_lengths import GivenCosts, give_lengths
from debubble.simulate.planned import plan_program
from debubble.timeline.model import I64, PassKind, Timeline
from debubble.units import NS_PER_S, counted

UNIT_NS = 1_000_000
# Of one pass or message: the most of them that are simulated still end within 64 bits.
MOST_NS = 1e13


@dataclass(frozen=True, slots=True, kw_only=True)
class HandSet:
    """Nanoseconds, one value for all or one a stage; None where nothing was said."""

    forward: Sequence[float] | None = None
    backward: Sequence[float] | None = None
    input_grad: Sequence[float] | None = None
    weight_grad: Sequence[float] | None = None
    transfer: Sequence[float] = (0.0,)
    """One for all hops, or one a hop: from each stage to the next."""


def settle_costs(hand_set: HandSet, stages: int) -> GivenCosts:
    """Fill in what was not said: a backward pass is two forward ones, and its halves are equal."""
    if hand_set.backward and (hand_set.input_grad or hand_set.weight_grad):
        raise UsageError(
            "a backward pass is its input gradient and its weight gradient",
            hint="give --backward, or --input-grad and --weight-grad",
        )
    if bool(hand_set.input_grad) != bool(hand_set.weight_grad):
        raise UsageError(
            "half of the backward pass is missing", hint="give --input-grad and --weight-grad"
        )
    forward = _spread("--forward", hand_set.forward or (UNIT_NS,), stages, "stage")
    if not forward.all():
        raise UsageError("a forward pass takes no time", hint="give --forward more than 0")
    if hand_set.backward:
        both = _spread("--backward", hand_set.backward, stages, "stage")
        inputs = both // 2
        weights = both - inputs
    elif hand_set.input_grad and hand_set.weight_grad:
        inputs = _spread("--input-grad", hand_set.input_grad, stages, "stage")
        weights = _spread("--weight-grad", hand_set.weight_grad, stages, "stage")
    else:
        inputs = weights = forward
    return GivenCosts(
        passes={
            PassKind.F: forward,
            PassKind.B: inputs + weights,
            PassKind.I: inputs,
            PassKind.W: weights,
        },
        one_way=_spread("--transfer", hand_set.transfer, stages - 1, "hop"),
    )


def simulate_order(order: Order, costs: GivenCosts, communication: Communication) -> Timeline:
    """Run an order once."""
    program = plan_program(order, communication)
    return as_timeline(program, Engine(program).run(give_lengths(program, costs)))


def mean_lengths(passes: Mapping[PassKind, I64]) -> dict[str, float]:
    """Return what each kind of pass would take if all stages were equal."""
    return {kind.name: float(of_stage.mean()) for kind, of_stage in passes.items()}


def _spread(flag: str, values: Sequence[float], count: int, what: str) -> I64:
    if len(values) not in {1, count}:
        raise UsageError(
            f"{flag} has {counted(len(values), 'value')} for {counted(count, what)}",
            hint=f"give one value, or {count}, one a {what}, separated by commas",
        )
    if max(values) > MOST_NS:
        raise UsageError(
            f"a value of {flag} is too large to count in nanoseconds",
            hint=f"at most {MOST_NS / NS_PER_S:,.0f}s, or {MOST_NS / UNIT_NS:,.0f} without a unit",
        )
    given = np.rint(np.array(values, dtype=np.float64)).astype(np.int64)
    return np.broadcast_to(given, count).copy()
