"""ZB-V (arXiv 2401.10241, 6): two chunks a rank in a V, no waits if F, I and W are equal."""

from __future__ import annotations

from debubble.schedules.model import Action, Order
from debubble.schedules.placement import Shape, place_stages
from debubble.schedules.script import Script


def zbv(ranks: int, microbatches: int) -> Order:
    """Return the handcrafted order, as torch has it.

    It is made for 2 * ranks - 1 microbatches or more; with fewer, the rest is left out of it.
    """
    enough = max(2 * ranks - 1, microbatches)
    return [
        [
            action
            for action in _write(rank, ranks, stages, enough)
            if action.microbatch < microbatches
        ]
        for rank, stages in enumerate(place_stages(Shape.V, ranks, 2))
    ]


def _write(rank: int, ranks: int, stages: tuple[int, ...], microbatches: int) -> list[Action]:
    script = Script(*stages)
    ahead = 2 * (ranks - rank) - 1
    # Warm-up: until the V's other end has come back to this rank.
    script.run("F0", ahead)
    script.run("F1 F0", rank)
    script.run("F1 I1 W1", ranks - rank)
    # Steady, the last turns without new microbatches.
    script.run("F0 I0 W0 F1 I1 W1", microbatches - ahead - rank)
    script.run("I0 W0 F1 I1 W1", ranks - rank - 1)
    # Cool-down: input gradients first, as others wait for them.
    script.run("I0 I1", rank)
    script.run("I0 W0", ranks - rank)
    script.run("W1", rank)
    script.run("W0", rank)
    return script.actions
