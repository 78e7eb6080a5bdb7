"""Pipelines to be ordered, made by chance."""

from __future__ import annotations

import random

from debubble.plan.orders.pipeline import Pipeline, StageCosts
from debubble.timeline.schedules import Shape, place_stages


def random_pipeline(seed, ranks=None, microbatches=None, chunks=None, room=None):
    """Uneven stages, hops of different lengths, memory from what 1F1B needs upwards."""
    chance = random.Random(seed)  # noqa: S311 (no secret)
    ranks = ranks or chance.randint(2, 4)
    microbatches = microbatches or ranks * chance.randint(1, 3)
    chunks = chunks or 1
    stages = []
    for _ in range(ranks * chunks):
        inputs, weights = chance.randint(80, 200), chance.randint(50, 180)
        stages.append(
            StageCosts(
                forward=chance.randint(100, 200),
                input_gradient=inputs,
                weight_gradient=weights,
                backward=inputs + weights - chance.choice((0, 10, 20)),
                halfway=chance.choice((0.0, 0.5)),
            )
        )
    hops = [chance.choice((0, 20, 100)) for _ in stages]
    limits = tuple(
        room or chance.choice((ranks - r + 0.5, ranks + 0.5, 2.0 * ranks)) for r in range(ranks)
    )
    shape = Shape.LOOP if chunks == 1 else Shape.V
    return Pipeline(
        place_stages(shape, ranks, chunks),
        microbatches,
        tuple(stages),
        tuple(hops),
        (0, *hops[:-1]),
        limits,
    )
