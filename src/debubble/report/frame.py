"""A `Timeline` in → one step of it framed: what text and SVG draw."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from debubble.analysis import Analysis
from debubble.errors import UsageError
from debubble.ledger.account import Wait
from debubble.timeline.model import Passes, RankTimeline, Timeline, Transfers

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
    transfers: Transfers
    """Of all steps: one that is under way may be another's."""
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
    whole = [
        number for number in known if len(set(passes.rank[passes.step == number])) == len(ranks)
    ]
    chosen = step if step is not None else (whole or known or [None])[0]
    if chosen not in known:
        where = "" if chosen is None else f" in step {chosen}"
        raise UsageError(
            f"there is nothing to draw: no pass{where}",
            hint=f"--step takes one of: {', '.join(map(str, known))}" if known else "",
        )
    here = passes.where(passes.step == chosen)
    begin = int(here.start_ns.min())
    end = max(int(here.end_ns.max()), begin + 1)
    of = f"pipeline {pipeline}, " if len(timeline.pipelines) > 1 else ""
    return Frame(
        step=chosen,
        begin_ns=begin,
        end_ns=end,
        ranks=ranks,
        passes=passes.where((passes.end_ns > begin) & (passes.start_ns < end)),
        waits=tuple(wait for wait in waits if wait.step == chosen),
        transfers=timeline.transfers,
        name=f"{of}step {chosen}",
    )


def frame_of(analysis: Analysis, step: int | None = None) -> Frame:
    """Frame a step of a run: the one that is named, or was asked for, or the first measured."""
    pipeline = analysis.pipeline
    if not pipeline.one_run:
        raise UsageError("there is nothing to draw: these ranks are not of one run")
    first = pipeline.windows[0].step if pipeline.windows else None
    chosen = next((number for number in (step, analysis.step) if number is not None), first)
    return frame_step(analysis.timeline, pipeline.pipeline, chosen, analysis.waits)


def round_distance(least: float) -> float:
    """Return the smallest of 1, 2, 5, 10, 20, … that is no less."""
    power: float = 10.0 ** math.floor(math.log10(least))
    return next(number * power for number in _ROUND if number * power >= least)


def decimals_of(distance: float) -> int:
    """Return how many decimals multiples of a round distance are written with."""
    return max(0, -math.floor(math.log10(distance)))
