"""A `Timeline` in → the step of it that a picture shows, and round distances for its axis."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from debubble.errors import UsageError
from debubble.ledger.waits import Wait
from debubble.timeline.model import Passes, RankTimeline, Timeline

_ROUND = (1, 2, 5, 10)


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One step of a pipeline, from its first pass's start to its last pass's end."""

    step: int
    begin_ns: int
    end_ns: int
    ranks: tuple[RankTimeline, ...]
    passes: Passes
    """All that reach into the frame, those of other steps too."""
    waits: tuple[Wait, ...]
    name: str
    """`step 3`, or `pipeline 1, step 3` where there are several."""

    @property
    def length_ns(self) -> int:
        """How long the step is."""
        return self.end_ns - self.begin_ns


def frame_step(
    timeline: Timeline, pipeline: int, step: int | None, waits: Sequence[Wait] = ()
) -> Frame:
    """Frame a step; by default the first one that all ranks have."""
    ranks = timeline.ranks_of(pipeline)
    passes = timeline.passes.where(np.isin(timeline.passes.rank, [r.rank for r in ranks]))
    known = sorted(set(passes.step.tolist()))
    whole = [one for one in known if len(set(passes.rank[passes.step == one])) == len(ranks)]
    chosen = step if step is not None else (whole or known or [None])[0]
    if chosen not in known:
        raise UsageError(
            f"there is nothing to draw: no pass in step {chosen}",
            hint=f"--step takes one of: {', '.join(map(str, known))}" if known else "",
        )
    here = passes.where(passes.step == chosen)
    begin, end = int(here.start_ns.min()), int(here.end_ns.max())
    of = f"pipeline {pipeline}, " if len(timeline.pipelines) > 1 else ""
    return Frame(
        step=chosen,
        begin_ns=begin,
        end_ns=end,
        ranks=ranks,
        passes=passes.where((passes.end_ns > begin) & (passes.start_ns < end)),
        waits=tuple(wait for wait in waits if wait.step == chosen),
        name=f"{of}step {chosen}",
    )


def round_distance(least: float) -> float:
    """Return the smallest of 1, 2, 5, 10, 20, … that is no less."""
    power: float = 10.0 ** math.floor(math.log10(least))
    return next(number * power for number in _ROUND if number * power >= least)


def decimals_of(distance: float) -> int:
    """Return how many decimals multiples of a round distance are written with."""
    return max(0, -math.floor(math.log10(distance)))
