"""What a schedule is: for each rank, its passes in order."""

from __future__ import annotations

from typing import Literal, NamedTuple


class Action(NamedTuple):
    """One pass of one microbatch on one stage."""

    stage: int
    kind: Literal["F", "B", "I", "W"]
    microbatch: int


Order = list[list[Action]]
