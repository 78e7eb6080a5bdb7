"""The lever of context length: a plan in → what it is worth with other tokens a microbatch.

Each option is predicted at that length and held against the unchanged run there. How passes grow is
unsure, but both grow alike: so it counts in the latency of the unchanged run, and in what an option
gains over it only as far as that cuts microbatches smaller.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import exp, hypot, log

from debubble.plan.advice import WORTH
from debubble.plan.change import Change
from debubble.plan.option import Idea, Option, weigh
from debubble.plan.plan import Plan
from debubble.simulate.predict import FOUR_OF_FIVE

_MEMORY = "the memory of a microbatch in flight scales with tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class Survivor:
    """An option at the other length, against the unchanged run there."""

    option: Option
    """As it is at the measured length."""
    there: Option
    gain: float
    """Of throughput."""
    low: float
    high: float
    rank: int | None
    """By that gain; None where it does not fit memory."""
    guess: bool
    """The run cannot show what it does."""
    changes_training: bool
    """It trains with a larger global batch."""
    sure: bool
    """It fits, gains beyond the noise, and nothing in it is a guess."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherLength:
    """What another number of tokens does to a run, and to what was planned for it."""

    token_scale: float
    unchanged: Option
    survivors: tuple[Survivor, ...]
    """The most throughput there first, then larger batches; what does not fit last."""
    best_here: Option | None
    """What is recommended first, as measured."""

    @property
    def best(self) -> Survivor | None:
        """What is to be recommended there."""
        return next(
            (
                survivor
                for survivor in self.survivors
                if survivor.sure and not survivor.changes_training
            ),
            None,
        )


def at_length(plan: Plan, token_scale: float) -> OtherLength:
    """Predict the unchanged run and all options with so many times as many tokens."""
    change = Change(token_scale=token_scale)
    assumed = () if plan.baseline.memory is None else (_MEMORY,)
    idea = Idea(lever="context length", change=change, assumptions=assumed)
    unchanged = weigh(plan.baseline, idea)
    survivors = [_survive(plan, option, unchanged, token_scale) for option in plan.options]
    survivors.sort(
        key=lambda survivor: (
            survivor.there.fits_memory is False,
            survivor.changes_training,
            -survivor.gain,
        )
    )
    ranked = [
        replace(survivor, rank=None if survivor.there.fits_memory is False else number)
        for number, survivor in enumerate(survivors, start=1)
    ]
    return OtherLength(
        token_scale=token_scale,
        unchanged=unchanged,
        survivors=tuple(ranked),
        best_here=plan.best,
    )


def _survive(plan: Plan, option: Option, unchanged: Option, token_scale: float) -> Survivor:
    idea = replace(option.idea, change=replace(option.change, token_scale=token_scale))
    weighed_on = plan.baseline_for(option)
    surely = replace(weighed_on.source.passes, growth_spread=0.0)
    there = weigh(replace(weighed_on, source=replace(weighed_on.source, passes=surely)), idea)
    cut = plan.baseline.microbatch_scale(option.change)
    unsure = FOUR_OF_FIVE * plan.baseline.source.passes.growth_spread * abs(log(cut))
    now, middle = 1 + unchanged.throughput_gain, 1 + there.throughput_gain
    low = middle * exp(-hypot(log(middle / (1 + there.throughput_low)), unsure)) / now - 1
    return Survivor(
        option=option,
        there=there,
        gain=middle / now - 1,
        low=low,
        high=middle * exp(hypot(log((1 + there.throughput_high) / middle), unsure)) / now - 1,
        rank=None,
        guess=bool(plan.unseen(option)),
        changes_training=plan.changes_training(option),
        sure=low > WORTH and there.fits_memory is not False and not plan.unseen(option),
    )
