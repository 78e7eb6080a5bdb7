"""What a probe measures: written on the device, read where pipelines are simulated.

The standard library is enough here: the device needs nothing else but torch.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from math import log
from statistics import fmean, median
from typing import Literal

PARTS = ("embedding", "layer", "head")


@dataclass(frozen=True, slots=True, kw_only=True)
class KindTimes:
    """What modules that are alike take with so many tokens, in seconds: the median of each pass."""

    kind: str
    part: str
    """One of `PARTS`."""
    count: int
    tokens: int
    forward_s: float
    backward_s: float
    input_grad_s: float
    """Of the backward pass: what the stage before waits for. The rest is the weight gradient."""
    saved_bytes: int
    """Kept from forward to backward, without weights."""
    output_bytes: int
    """What goes to the next stage."""
    weight_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageTimes:
    """What messages between two copies took while the others worked."""

    bytes: int
    one_way_s: tuple[float, ...]
    both_ways_s: tuple[float, ...]
    """Of two messages that cross each other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A probe, as its file has it."""

    schema: Literal["debubble.probe.measured/1"] = "debubble.probe.measured/1"
    model: str
    torch: str
    device: str
    device_bytes: int | None
    copies: int
    """Processes that shared the device."""
    trains: bool
    layers: int
    alone: tuple[KindTimes, ...]
    beside: tuple[KindTimes, ...] = ()
    """The same while the other copies worked."""
    messages: tuple[MessageTimes, ...] = ()

    @property
    def sizes(self) -> tuple[int, ...]:
        """Tokens of a microbatch that were timed."""
        return tuple(sorted({row.tokens for row in self.alone}))

    @property
    def slope(self) -> float:
        """What each further copy at work adds to a layer, of the logarithm."""
        pairs = [
            (beside, alone)
            for row, busy in zip(self.alone, self.beside, strict=False)
            for alone, beside in (
                (row.forward_s, busy.forward_s),
                (row.backward_s, busy.backward_s),
            )
            if row.part == "layer" and alone > 0 and beside > 0
        ]
        if self.copies < 2 or not pairs:
            return 0.0
        middle = median(log(beside / alone) for beside, alone in pairs)
        return max(middle / (self.copies - 1), 0.0)

    def message_s(self, size: float) -> tuple[float, float]:
        """Return what a message takes on average, one way and while another crosses it."""
        rows = sorted(self.messages, key=lambda row: row.bytes)
        sizes = [row.bytes for row in rows]
        one_way = on_line(sizes, [fmean(row.one_way_s) for row in rows], size)
        return one_way, max(one_way, on_line(sizes, [fmean(row.both_ways_s) for row in rows], size))


def on_line(sizes: Sequence[float], values: Sequence[float], size: float) -> float:
    """Return a value between two sizes; beyond the last, on along the line through the last two."""
    if len(sizes) < 2:
        return values[0]
    after = min(max(bisect_left(sizes, size), 1), len(sizes) - 1)
    low, high = sizes[after - 1], sizes[after]
    share = (size - low) / (high - low)
    return max(values[after - 1] * (1 - share) + values[after] * share, 0.0)
