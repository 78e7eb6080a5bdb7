"""Durations set by hand in → a run of a schedule.

Costs may be times or plain numbers. Of plain numbers only ratios count: a unit is run as one
millisecond.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from debubble.errors import UsageError
from debubble.simulate.communication import Communication
from debubble.simulate.engine import Engine
from debubble.simulate.events import NEVER_NS
from debubble.simulate.planned import plan_program
from debubble.simulate.program import Lengths, Program, Times
from debubble.timeline.model import I64, PassKind
from debubble.timeline.schedules import Order
from debubble.units import NS_PER_S, counted

UNIT_NS = 1_000_000
# Of one pass or message: the most of them that are simulated still end within 64 bits.
MOST_NS = 1e13


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenCosts:
    """Nanoseconds by stage or hop, the first dimension; a second one holds many candidates."""

    passes: Mapping[PassKind, I64]
    """Of each stage; a kind that the program does not run may be left out."""
    one_way: I64 | int = 0
    """Of the hop from each stage to the next, or one number for all."""


def settle_costs(costs: Mapping[str, Sequence[float]], stages: int) -> GivenCosts:
    """Fill in what was not said, by name: a backward pass is two forward ones; its halves equal.

    Of stages there is one value for all or one each, of transfers one for all hops or one each.
    """
    halves = [half for half in ("input_grad", "weight_grad") if half in costs]
    if "backward" in costs and halves:
        raise UsageError(
            "a backward pass is its input gradient and its weight gradient",
            hint="give --backward, or --input-grad and --weight-grad",
        )
    if len(halves) == 1:
        raise UsageError(
            "half of the backward pass is missing", hint="give --input-grad and --weight-grad"
        )
    known = {
        name: _spread(name, values, stages, "stage")
        for name, values in costs.items()
        if name != "transfer"
    }
    forward = known.get("forward", np.full(stages, UNIT_NS))
    if not forward.all():
        raise UsageError("a forward pass takes no time", hint="give --forward more than 0")
    backward = known.get("backward", 2 * forward)
    inputs = known.get("input_grad", backward // 2)
    weights = known.get("weight_grad", backward - inputs)
    return GivenCosts(
        passes={
            PassKind.F: forward,
            PassKind.B: inputs + weights,
            PassKind.I: inputs,
            PassKind.W: weights,
        },
        one_way=_spread("transfer", costs.get("transfer", (0.0,)), stages - 1, "hop"),
    )


def run_order(
    order: Order, costs: GivenCosts, communication: Communication
) -> tuple[Program, Times]:
    """Run an order once, as its program and when each part of it happens."""
    program = plan_program(order, communication)
    return program, Engine(program).run(give_lengths(program, costs))


def mean_of_stages(passes: Mapping[PassKind, I64]) -> dict[str, float]:
    """Return what each kind of pass would take if all stages were equal."""
    return {kind.name: float(of_stage.mean()) for kind, of_stage in passes.items()}


def give_lengths(program: Program, costs: GivenCosts) -> Lengths:
    """Give each pass and message of a program what its stage or hop takes."""
    passes, messages = program.passes, program.messages
    # From which stage to the next, one way or back.
    stage = passes.stage[messages.producer].astype(np.int64)
    hop = np.where(passes.kind[messages.producer] == PassKind.F, stage, stage - 1)
    wire = costs.one_way
    wire = np.full(len(hop), wire) if isinstance(wire, int) else wire[hop]
    # What is there already takes no time to be received.
    meets = messages.rendezvous.reshape(-1, *(1,) * (wire.ndim - 1))
    return Lengths(
        passes=_of_passes(program, costs.passes),
        pass_gaps=np.zeros(len(passes), dtype=np.int64),
        batch_gaps=np.zeros(len(program.batches), dtype=np.int64),
        sending=wire,
        wire=wire,
        drain=wire * meets,
        pass_floor=np.where(passes.before < 0, 0, NEVER_NS),
        batch_floor=np.full(len(program.batches), NEVER_NS),
    )


def _spread(name: str, values: Sequence[float], count: int, what: str) -> I64:
    flag = f"--{name.replace('_', '-')}"
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


def _of_passes(program: Program, costs: Mapping[PassKind, I64]) -> I64:
    passes = program.passes
    unknown = sorted(set(passes.kind.tolist()) - set(costs))
    if unknown:
        raise ValueError(f"no length for {', '.join(PassKind(kind).name for kind in unknown)}")
    stages, *wide = next(iter(costs.values())).shape
    table = np.zeros((len(PassKind), stages, *wide), dtype=np.int64)
    for kind, of_stage in costs.items():
        table[kind] = of_stage
    # One look-up of rows: with many candidates it is what takes the time.
    lengths: I64 = table.reshape(-1, *wide)[passes.kind.astype(np.int64) * stages + passes.stage]
    return lengths
