"""The types of a schedule: order and nothing else; and which rank holds which stages."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal, NamedTuple

Kind = Literal["F", "B", "I", "W"]


class Action(NamedTuple):
    """One pass of one microbatch on one stage."""

    stage: int
    kind: Kind
    microbatch: int
    overlap: bool = False
    """A forward pass that runs as one with the backward pass after it, as in DualPipe: neither's
    result leaves the rank before both are done. Order alone cannot say it, and whoever ignores it
    finds half of the bubble."""

    def __str__(self) -> str:
        """Write it as torch does in its CSV orders and its labels."""
        return f"{self.stage}{self.kind}{self.microbatch}"


Order = list[list[Action]]

Placement = tuple[tuple[int, ...], ...]
"""The stages of each rank, lowest first."""


class Shape(StrEnum):
    """How the stages of a model run along the ranks."""

    LOOP = "loop"
    """From the last rank back to the first. With one chunk a rank: stage and rank are one."""
    V = "v"
    """Every second time backwards, so that the first rank holds the first stage and the last."""


def place_stages(shape: Shape, ranks: int, chunks: int) -> Placement:
    """Return the stages of each rank."""

    def stage_of(rank: int, chunk: int) -> int:
        mirrored = shape is Shape.V and chunk % 2 == 1
        return chunk * ranks + (ranks - 1 - rank if mirrored else rank)

    return tuple(tuple(stage_of(rank, chunk) for chunk in range(chunks)) for rank in range(ranks))
