"""What a plan would change, and what is known of the run that it changes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from debubble.simulate.costs.wire_pools import Hop
from debubble.timeline.schedules import Order

Hold = Literal["microbatch", "batch"]
"""What stays as it is when the number of microbatches changes: the size of each, or of all."""
SEARCHED = "searched"
"""What a change calls an order that has no name and is in no file yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What to do differently; None leaves it as it is."""

    split: tuple[int, ...] | None = None
    """Layers of each stage, in the order of stages."""
    microbatches: int | None = None
    hold: Hold = "microbatch"
    schedule: str | None = None
    """A name of `schedules.SCHEDULES`, the path of an order as CSV, or `SEARCHED`."""
    order: Order | None = field(default=None, hash=False)
    """What that path holds, or what was found."""
    chunks: int | None = None
    """Stages a rank."""
    overlap: bool | None = None
    """Transfers beside compute, where the framework waits for them now."""
    recompute: bool | None = None
    """Backward passes run their layers forward once more, and only their inputs are kept."""
    repaired: tuple[tuple[int, int], ...] | None = None
    """Hops to be as others are, each by the ranks that send and receive."""
    hops_ns: tuple[tuple[Hop, int], ...] = ()
    """What messages of some hops, by places in the pipeline, would take one way."""
    token_scale: float | None = None
    """How many times as many tokens a microbatch has."""
    by_hand: str | None = None
    """What else is done, in words: no framework can be told it."""

    @property
    def grows_batch(self) -> bool:
        """Whether the batch has another number of microbatches of the size of now."""
        return self.microbatches is not None and self.hold == "microbatch"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What is known of the run as it is; None is not known."""

    ranks: int
    """Ranks of one pipeline: p."""
    layers: int | None = None
    """Layers of the whole model, embedding and head not counted."""
    microbatches: int | None = None
    schedule: str | None = None
    chunks: int = 1
    microbatch_size: int | None = None
    """Samples of one microbatch."""
    data_parallel: int | None = None
    """Replicas of the model, each with a share of the batch."""
    order_file: str = "order.csv"
    """What a text calls the file that has its order of passes, where it needs one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingSetting:
    """What an engine that serves is to be told; None is what is left as it is."""

    stages: int
    layers: tuple[int, ...] | None = None
    """Of each stage."""
    in_flight: int | None = None
    """Batches that are under way at once."""
    requests_a_batch: int | None = None
    """Most requests in a batch."""
    chunk: int | None = None
    """Most tokens of prompts in a batch."""
    answers_a_batch: int | None = None
    """Requests that a chunk shares its batch with, a token each; for engines that count both."""
