"""The kernels of a pass in → how many equal blocks a stage holds, and what one costs.

A stage of equal layers launches the same names over and over. What does not repeat, before or
after, is the stage's own: an embedding, a head, a loss.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from debubble.timeline.model import I32, I64, StageLayers

# A block is at least this many kernels: single elementwise kernels in a row are no layers.
_SHORTEST_BLOCK = 2
# Blocks are looked for up to this many kernels; a transformer layer has some 10 to 60.
_LONGEST_BLOCK = 600


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """The repeating part of a pass: rows `first` to `first + period * count`."""

    first: int
    period: int
    count: int


def find_blocks(names: I32) -> Blocks | None:
    """Return the repetition that covers most of a sequence, with the shortest period."""
    best: Blocks | None = None
    longest = min(len(names) // 2, _LONGEST_BLOCK)
    for period in range(_SHORTEST_BLOCK, longest + 1):
        same = names[period:] == names[:-period]
        first, run = _longest_run(same)
        count = run // period + 1
        if count > 1 and (best is None or count * period > best.count * best.period):
            best = Blocks(first=first, period=period, count=count)
    return best


def _longest_run(flags: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> tuple[int, int]:
    """Return where the longest stretch of true values begins, and its length."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], flags, [False])).astype(np.int8)))
    if not len(edges):
        return 0, 0
    lengths = edges[1::2] - edges[::2]
    longest = int(lengths.argmax())
    return int(edges[2 * longest]), int(lengths[longest])


def measure_layers(stage: int, names: I32, start: I64, end: I64) -> StageLayers | None:
    """Measure the blocks of one pass, given its kernels in order."""
    blocks = find_blocks(names)
    if blocks is None:
        return None
    last = blocks.first + blocks.period * blocks.count - 1
    begin, finish = int(start[blocks.first]), int(end[blocks.first : last + 1].max())
    return StageLayers(
        stage=stage,
        layers=blocks.count,
        layer_ns=(finish - begin) // blocks.count,
        before_ns=begin - int(start[0]),
        after_ns=max(0, int(end.max()) - finish),
    )
