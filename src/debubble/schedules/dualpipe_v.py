"""DualPipeV (DeepSeek): two chunks a rank in a V, a forward and a backward pass at a time."""

from __future__ import annotations

from debubble.schedules.model import Action, Order
from debubble.schedules.placement import Shape, place_stages
from debubble.schedules.script import Script


def dualpipe_v(ranks: int, microbatches: int) -> Order:
    """Return the order, as torch has it; it needs a microbatch for each stage."""
    return [
        _write(rank, ranks, stages, microbatches)
        for rank, stages in enumerate(place_stages(Shape.V, ranks, 2))
    ]


def _write(rank: int, ranks: int, stages: tuple[int, ...], microbatches: int) -> list[Action]:
    """Write the eight steps of DeepSeek's code."""
    script = Script(*stages)
    behind = ranks - rank - 1
    script.run("F0", 2 * behind)
    script.run("F0 F1", rank + 1)
    script.run("I1 W F1", behind)
    steady = microbatches - 2 * ranks + rank + 1
    if behind == 0:
        # The others wait for the V's turn: here the first pair is not made to overlap.
        script.run("F0 B1 F1&B0")
        steady -= 1
    script.run("F0&B1 F1&B0", steady)
    script.run("B1 F1&B0", behind)
    _wind_down(script, rank)
    script.run("W I0", behind)
    script.run("W", rank + 1)
    return script.actions


def _wind_down(script: Script, rank: int) -> None:
    """Run the last backward passes of both chunks; the second half puts off its weights."""
    full, odd = divmod(rank + 1, 2)
    script.run("B1 B0", full)
    script.run("B1 I0", odd)
    script.run("I1 I0", full)
