"""What `plan` says of twice the microbatches in → what `find` says of the schedule.

A schedule makes ranks wait in every pipeline, and more microbatches are the first lever that comes
to mind. So `find` shows the two rows that `plan` has of it, from the same simulator.
"""

from __future__ import annotations

from typing import Annotated

from debubble.plan.change import Hold
from debubble.plan.plan import PricedLever
from debubble.report.answers.base import Part
from debubble.report.answers.change import IntervalPart, describe_refused


class MicrobatchesPart(Part, frozen=True, kw_only=True):
    """Another number of microbatches, as `plan` predicts it."""

    microbatches: Annotated[int, "change.microbatches"]
    hold: Annotated[Hold, "change.hold"]
    """What stays: the global batch, which is cut finer, or the microbatch: the batch grows."""
    batch_latency_s: Annotated[float, "window_ns"]
    interval: Annotated[IntervalPart, "."]
    bubble_fraction: float
    throughput_gain_fraction: Annotated[float, "throughput_gain"]
    changes_training: bool


class MoreMicrobatchesPart(Part, frozen=True, kw_only=True):
    """Twice the microbatches: the rows of `plan`, or why there are none."""

    options: list[MicrobatchesPart]
    refused: list[str]
    unpriced: str | None
    """Why nothing is predicted from this run; null where it is."""


def answer_more_microbatches(priced: PricedLever) -> MoreMicrobatchesPart:
    """Return what twice the microbatches would do."""
    return MoreMicrobatchesPart(
        options=[
            MicrobatchesPart.of(
                option, changes_training=option.change.grows_batch and priced.trains
            )
            for option in priced.options
        ],
        refused=[f"{describe_refused(refused)}: {refused.reason}" for refused in priced.refused],
        unpriced=priced.unpriced or None,
    )


def say_microbatches(part: MicrobatchesPart) -> str:
    """Name a number of microbatches by what stays."""
    if part.hold == "batch":
        return f"same global batch in {part.microbatches} smaller microbatches"
    training = " (changes training)" if part.changes_training else ""
    return f"larger global batch of {part.microbatches} microbatches{training}"
