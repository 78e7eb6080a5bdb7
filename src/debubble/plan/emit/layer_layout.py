"""A split in → Megatron's layout: `Et*3|(t*4|)*2,t*3L`.

E is the embedding, t a layer, L the loss, `|` ends a stage; `x*n` and `(...)*n` repeat. Stages
stand in the order in which the model runs through them, with virtual stages as well: stage i is
virtual stage i // ranks of rank i % ranks.
"""

from __future__ import annotations

from itertools import groupby


def write_layout(split: tuple[int, ...]) -> str:
    """Write a split as a layout, equal neighbours folded."""
    if len(split) == 1:
        return f"E{_layers(split[0])}L"
    first, *middle, last = split
    parts = [f"E{_layers(first)}|"]
    for layers, group in groupby(middle):
        count = len(list(group))
        stage = f"{_layers(layers)}|"
        parts.append(stage if count == 1 else f"({stage})*{count},")
    return "".join([*parts, f"{_layers(last)}L"])


def _layers(count: int) -> str:
    return "t" if count == 1 else f"t*{count}"
