"""The rate of a hop in → what its messages would take, against those that were measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from debubble.errors import UsageError
from debubble.plan.baseline import Baseline
from debubble.plan.option import Idea
from debubble.timeline.schedules import Order
from debubble.units import NS_PER_S

Hop = tuple[int, int]
"""The rank that sends and the rank that receives."""


def set_hops(baseline: Baseline, idea: Idea, rates: Mapping[Hop, float]) -> Idea:
    """Let messages of some hops travel at so many bytes per second.

    What is slower than hops usually are takes that long at least; what is quicker shrinks what
    was measured, tails and all.
    """
    what_if = baseline.what_if(idea.change)
    names = [rank.rank for rank in baseline.ranks]
    positions = {name: position for position, name in enumerate(names)}
    hops = set(hops_of(what_if.order))
    wires = baseline.source.wires.of_size(what_if.token_scale)
    size = baseline.source.wires.message_bytes * what_if.token_scale
    if size <= 0:
        hint = "record with record_shapes=True"
        if baseline.ranks[0].timers:
            hint = "give the table a column of bytes, in the rows of sends or receives"
        raise UsageError("the size of messages is unknown", hint=hint)
    slower: dict[Hop, int] = {}
    quicker: dict[Hop, float] = {}
    typical = wires.one_way
    for (sender, receiver), rate in rates.items():
        hop = positions.get(sender, -1), positions.get(receiver, -1)
        if hop not in hops:
            known = ", ".join(f"{names[here]}:{names[there]}" for here, there in sorted(hops))
            raise UsageError(
                f"no message goes from rank {sender} to rank {receiver}", hint=f"hops are {known}"
            )
        takes = size / rate * NS_PER_S
        if takes >= typical:
            slower[hop] = round(takes)
        else:
            quicker[hop] = takes / typical
    return replace(idea, wire_ns=slower, wire_scale=quicker)


def hops_of(order: Order) -> Iterator[Hop]:
    """Yield the hops that messages of an order take, by positions in the pipeline."""
    holder = {
        action.stage: position for position, actions in enumerate(order) for action in actions
    }
    trains = any(action.kind != "F" for actions in order for action in actions)
    for stage, here in holder.items():
        ahead = holder.get(stage + 1, here)
        if ahead != here:
            yield here, ahead
            if trains:
                yield ahead, here
