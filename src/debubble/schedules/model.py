"""What a schedule is: for each rank, its passes in order."""

from __future__ import annotations

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
