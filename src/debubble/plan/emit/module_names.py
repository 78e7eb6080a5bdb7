"""A split in → the modules of each stage, under the names that a kind of model gives them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """What a kind of model calls its parts."""

    before: tuple[str, ...]
    """On the first stage, ahead of the layers."""
    layer: str
    """Each layer's name up to its number."""
    after: tuple[str, ...]
    """On the last stage, behind the layers."""
    everywhere: tuple[str, ...] = ()


def modules_of_stages(split: tuple[int, ...], names: Names) -> list[list[str]]:
    """Return the modules of each stage, in order."""
    stages = [
        [f"{names.layer}{number}" for number in range(first, end)]
        for first, end in pairwise(accumulate(split, initial=0))
    ]
    stages[0] = [*names.before, *stages[0]]
    stages[-1] = [*stages[-1], *names.after]
    return [[*stage, *names.everywhere] for stage in stages]


def describe(names: Names, layers: int) -> str:
    """Return what is assumed of the model, for a comment."""
    numbered = f"{names.layer}0 to {names.layer}{layers - 1}" if layers > 1 else f"{names.layer}0"
    parts = [*names.before, numbered, *names.after, *names.everywhere]
    return f"Assumes modules called {', '.join(parts)}: put in the names of your model."
