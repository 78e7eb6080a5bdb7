"""Pipelines to be ordered, made by chance."""

from __future__ import annotations

import random

from debubble.plan.orders.construct import Pipeline
from debubble.timeline.schedules import Shape, place_stages


def random_pipeline(seed, ranks, microbatches, chunks=1, room=None):
    """Uneven stages, hops of different lengths, room for what 1F1B needs or for more."""
    chance = random.Random(seed)  # noqa: S311 (no secret)
    stages, pass_ns, hop_ns = ranks * chunks, {}, {}
    for stage in range(stages):
        forward, inputs, weights = (chance.randint(80, 200) for _ in range(3))
        took = {"F": forward, "I": inputs, "W": weights, "B": inputs + weights - 10}
        pass_ns |= {(kind, stage): length for kind, length in took.items()}
        if stage < stages - 1:
            hop_ns["F", stage] = hop_ns["B", stage + 1] = chance.choice((0, 20, 100))
    return Pipeline(
        placement=place_stages(Shape.LOOP if chunks == 1 else Shape.V, ranks, chunks),
        microbatches=microbatches,
        pass_ns=pass_ns,
        hop_ns=hop_ns,
        room=(room or chunks * chance.randint(ranks, 2 * ranks),) * ranks,
    )
