"""A baseline and one change in → the changed run: its numbers, its interval, a draw of it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from debubble.plan.baseline import Baseline, stages_of
from debubble.plan.change import Change
from debubble.plan.option import Idea, Option, predict_idea, weigh
from debubble.simulate.as_timeline import as_timeline
from debubble.simulate.communication import Communication
from debubble.simulate.events import NEVER_NS
from debubble.simulate.predict import Prediction
from debubble.simulate.program import Times
from debubble.simulate.theory import bubble_fraction, ideal_bubble
from debubble.timeline.model import F64, I64, Flags, PassKind, Timeline
from debubble.timeline.schedules import Order

# The lever of a what-if that changes nothing.
_NOTHING = "nothing"


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIfAnswer:
    """One what-if, answered."""

    baseline: Baseline
    option: Option
    predicted: Prediction
    order: Order
    communication: Communication
    correction: float
    """What the simulated times were multiplied by."""

    @property
    def change(self) -> Change:
        """What was asked; without anything, the run itself."""
        return self.option.change

    @property
    def changes_nothing(self) -> bool:
        """Whether the run was simulated as it is."""
        return self.option.lever == _NOTHING

    @property
    def microbatches(self) -> int:
        """How many a step has."""
        return 1 + max(action.microbatch for actions in self.order for action in actions)

    @property
    def stages(self) -> int:
        """How many the model is cut into."""
        return stages_of(self.order)

    @property
    def split(self) -> tuple[int, ...] | None:
        """Layers of each stage; None where they are not known."""
        return self.baseline.split_of(self.change, self.stages)

    def theory(self) -> float | None:
        """Return the formula's bubble; it is for one stage a rank."""
        single = self.stages == len(self.order)
        return bubble_fraction(len(self.order), self.microbatches) if single else None

    def theory_of_schedule(self) -> float:
        """Return the bubble of this order with equal stages and free transfers."""
        lengths = self.pass_lengths_ns()
        return ideal_bubble(self.order, {kind: float(ns.mean()) for kind, ns in lengths.items()})

    def pass_lengths_ns(self) -> dict[str, F64]:
        """Return what each kind of pass takes on each stage, on the mean."""
        table = self.predicted.program.passes
        took = _took(self.predicted.times).mean(axis=1) * self.correction

        def mean_ns(kind: PassKind, stage: int) -> float:
            own_passes = took[(table.kind == kind) & (table.stage == stage)]
            return float(own_passes.mean()) if len(own_passes) else 0.0

        return {
            kind.name: np.array([mean_ns(kind, stage) for stage in range(self.stages)])
            for kind in PassKind
            if (table.kind == kind).any()
        }

    def rank_bubbles(self) -> tuple[float, ...]:
        """Return the share of the window that each rank waits, in the middle of all draws."""
        windows = self.predicted.times.window_ns
        return tuple(float(np.median(1 - worked / windows)) for worked in self._worked())

    def longest_stage_bubble(self) -> float:
        """Return the bubble against the longest single rank's span."""
        times = self.predicted.times
        spans = np.stack(
            [
                times.pass_end[own_passes].max(axis=0) - times.pass_start[own_passes].min(axis=0)
                for own_passes in self._passes_by_rank()
            ]
        )
        longest, draws = spans.argmax(axis=0), np.arange(spans.shape[1])
        return float(np.median(1 - self._worked()[longest, draws] / spans[longest, draws]))

    def bubble_over_ideal(self) -> float:
        """Return bubble time over ideal time."""
        bubble = self.option.bubble_fraction
        return bubble / (1 - bubble)

    def draw(self) -> Timeline:
        """Lay out the draw that is nearest to the middle of all."""
        times = self.predicted.times
        windows = times.window_ns
        middle = int(np.abs(windows - np.median(windows)).argmin())
        drawn = Times(
            pass_start=self._corrected(times.pass_start[:, middle]),
            pass_end=self._corrected(times.pass_end[:, middle]),
            batch_start=self._corrected(times.batch_start[:, middle]),
            batch_end=self._corrected(times.batch_end[:, middle]),
        )
        ranks = tuple(rank.rank for rank in self.baseline.ranks)
        return as_timeline(replace(self.predicted.program, ranks=ranks), drawn)

    def _passes_by_rank(self) -> list[Flags]:
        home = self.predicted.program.passes.place
        return [home == position for position in range(len(self.order))]

    def _worked(self) -> F64:
        """Return what each rank worked in each draw."""
        took = _took(self.predicted.times)
        worked: F64 = np.stack(
            [took[own_passes].sum(axis=0) for own_passes in self._passes_by_rank()]
        )
        return worked * self.baseline.source.busy_share

    def _corrected(self, moments: I64) -> I64:
        """Stretch times as the answer is; what never happened stays so."""
        stretched = np.rint(moments * self.correction).astype(np.int64)
        return np.where(moments <= NEVER_NS // 2, moments, stretched)


def ask(baseline: Baseline, idea: Idea) -> WhatIfAnswer:
    """Predict one change; where nothing changes, show the simulation as it is, uncorrected."""
    nothing = idea.change == Change()
    if not nothing and baseline.no_fit is not None:
        raise baseline.no_fit
    if nothing:
        baseline = replace(baseline, correction=1.0)
        idea = replace(idea, lever=_NOTHING)
    predicted = predict_idea(baseline, idea)
    what_if = baseline.what_if(idea.change)
    return WhatIfAnswer(
        baseline=baseline,
        option=weigh(baseline, idea, predicted),
        predicted=predicted,
        order=what_if.order,
        communication=what_if.communication,
        correction=baseline.correction,
    )


def _took(times: Times) -> I64:
    return times.pass_end - times.pass_start
