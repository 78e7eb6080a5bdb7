"""The lever of overlap: transfers beside compute, which may slow compute down.

What it does to compute is in the trace only where something overlapped. Else nobody knows: then it
is said so, with the slowdown at which it would no longer pay.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import log

import numpy as np

from debubble.plan.baseline import Baseline
from debubble.plan.change import Change
from debubble.plan.lever import Lever, Start
from debubble.plan.option import Idea, Option, quick_latency_s, weigh
from debubble.simulate.communication import WAITED
from debubble.simulate.predict import mean_lengths
from debubble.units import NS_PER_S

# Nobody would try more.
_MOST = 4.0
_TRIED = np.linspace(1.0, _MOST, 13)


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """What overlap would buy."""

    option: Option
    slowdown: float | None
    """Of compute under transfers, as the trace shows; None where nothing overlapped."""
    break_even: float | None
    """The slowdown at which nothing is gained; None where it gains at any up to 4."""


def consider(baseline: Baseline) -> Overlap | None:
    """Weigh overlap; None where transfers already run beside compute."""
    if baseline.communication not in WAITED:
        return None
    slowdown = slowdown_beside(baseline)
    idea = Idea(lever="overlap", change=Change(overlap=True), assumptions=(say_slowdown(baseline),))
    even = _break_even(baseline)
    return Overlap(option=weigh(baseline, idea), slowdown=slowdown, break_even=even)


def say_slowdown(baseline: Baseline) -> str:
    """Say what is known of compute under transfers."""
    seen, passes = slowdown_beside(baseline), baseline.source.passes
    if seen is not None:
        return f"overlap makes compute take {seen:.2f} times as long (measured in this run)"
    if not passes.beside:
        return "this run has no overlap: its cost to compute is unknown, try it"
    return (
        "this run has no overlap: it is assumed to make compute take "
        f"{np.exp(passes.beside):.2f} times as long"
    )


def slowdown_beside(baseline: Baseline) -> float | None:
    """Return how many times as long compute takes beside messages; None where that is not seen."""
    passes = baseline.source.passes
    return float(np.exp(passes.beside)) if passes.tells_beside else None


def _break_even(baseline: Baseline) -> float | None:
    """Return the slowdown beside messages at which overlap gains nothing, by means alone."""
    change = Change(overlap=True)
    engine, what_if = baseline.engine(change), baseline.what_if(change)
    now, before, gained_before = quick_latency_s(baseline, Change()), 1.0, 0.0
    for slowdown in _TRIED.tolist():
        lengths = mean_lengths(engine, baseline.source, replace(what_if, beside=log(slowdown)))
        latency = float(engine.windows(lengths)[0]) * baseline.correction / NS_PER_S
        gained = now - latency
        if gained <= 0:
            step: float = (slowdown - before) * gained_before / max(gained_before - gained, 1e-12)
            return before + step
        before, gained_before = slowdown, gained
    return None


def ideas(start: Start) -> Iterator[Overlap]:
    """Yield overlap, weighed, where there is none yet."""
    overlap = consider(start.baseline)
    if overlap is not None:
        yield overlap


def words(change: Change) -> str:
    """Say whether transfers run beside compute."""
    if change.overlap is None:
        return ""
    return "transfers overlapped with compute" if change.overlap else "no overlap"


LEVER = Lever(key="overlap", position=50, ideas=ideas, words=words, probe=Change(overlap=True))
