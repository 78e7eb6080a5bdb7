"""The batches of a stream in → what those of each phase take."""

from __future__ import annotations

import msgspec
import numpy as np

from debubble.serving.batches import Batches, phase_word
from debubble.timeline.turns import Phase
from debubble.units import NS_PER_S


class PhaseFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The batches of one phase: medians."""

    phase: str
    batches: int
    tokens: int | None
    """Of a batch."""
    padded_tokens: int | None
    """That it was computed with: CUDA graphs have few sizes."""
    pass_s: tuple[float, ...]
    """What a pass takes on each stage."""
    device_s: tuple[float, ...]
    """The device's part of it."""


def measure_phases(batches: Batches) -> list[PhaseFigures]:
    """Return what batches of each phase take."""
    length, found = batches.length(), []
    for phase in (Phase.PREFILL, Phase.MIXED, Phase.DECODE, Phase.UNKNOWN):
        rows = (batches.phase == phase) & batches.seen
        if rows.any():
            tokens = batches.tokens[rows & (batches.tokens >= 0)]
            padded = batches.padded[rows & (batches.padded >= 0)]
            found.append(
                PhaseFigures(
                    phase=phase_word(phase),
                    batches=int(rows.sum()),
                    tokens=int(np.median(tokens)) if len(tokens) else None,
                    padded_tokens=int(np.median(padded)) if len(padded) else None,
                    pass_s=tuple((np.median(length[rows], axis=0) / NS_PER_S).tolist()),
                    device_s=tuple((np.median(batches.busy[rows], axis=0) / NS_PER_S).tolist()),
                )
            )
    return found
