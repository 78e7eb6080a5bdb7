"""One figure after the other in → whether its level moved: a CUSUM on robustly standardised values.

The first captures are the reference. Of each later one, how far it lies from the reference is added
up, less an allowance; a sum beyond its threshold is an alarm. Thresholds are simulated, with a
reference of that size estimated anew each time: its error is what raises most false alarms.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from statistics import fmean, median, stdev
from typing import Literal

from debubble.errors import UsageError

Direction = Literal["up", "down"]
Sides = Literal["up", "down", "both"]

# Half of the shift that is to be found soonest, two standard deviations, and a little less: the
# reference is not exact.
ALLOWANCE = 0.9
# One wild capture moves a sum by so much at most.
_FURTHEST = 4.0
# Where values of the reference are drawn in, in robust standard deviations: the mean and the spread
# of what is left are nearly as sure as those of clean data, and no outlier moves them far.
_DRAWN_IN = 2.5
_MAD_TO_SIGMA = 1.4826
# A level that moves by less is nobody's business, however steady the captures are.
_LEAST_SPREAD = 0.005

REFERENCE = 40
QUIET_CAPTURES = 300
RATE = 0.05

# The sum that so many of 300 quiet captures' series exceed, by the size of the reference, the share
# of series, and the sides watched: the higher one of normal and of heavy-tailed noise (Student's t
# with 5 degrees of freedom). Printed by benchmarks/drift_thresholds.py.
THRESHOLDS: dict[tuple[int, float, bool], float] = {
    (10, 0.01, False): 31.6,
    (10, 0.05, False): 11.9,
    (10, 0.1, False): 8.9,
    (10, 0.01, True): 64.3,
    (10, 0.05, True): 18.4,
    (10, 0.1, True): 12.4,
    (20, 0.01, False): 12.0,
    (20, 0.05, False): 8.2,
    (20, 0.1, False): 6.8,
    (20, 0.01, True): 15.5,
    (20, 0.05, True): 9.7,
    (20, 0.1, True): 8.1,
    (40, 0.01, False): 8.4,
    (40, 0.05, False): 6.5,
    (40, 0.1, False): 5.7,
    (40, 0.01, True): 9.6,
    (40, 0.05, True): 7.5,
    (40, 0.1, True): 6.5,
    (80, 0.01, False): 7.4,
    (80, 0.05, False): 6.0,
    (80, 0.1, False): 5.3,
    (80, 0.01, True): 7.9,
    (80, 0.05, True): 6.6,
    (80, 0.1, True): 5.9,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """How a figure is watched."""

    sides: Sides
    reference: int = REFERENCE
    rate: float = RATE
    """The share of quiet series that raise an alarm within 300 captures."""
    by_factors: bool = False
    """Times and rates vary by factors, shares by differences."""

    def __post_init__(self) -> None:
        if (self.reference, self.rate, False) not in THRESHOLDS:
            sizes = sorted({size for size, _, _ in THRESHOLDS})
            rates = sorted({rate for _, rate, _ in THRESHOLDS})
            raise UsageError(
                f"no threshold is known for a reference of {self.reference} at {self.rate:g}",
                hint=f"reference is one of {sizes}, false_alarms one of {rates}",
            )

    @property
    def threshold(self) -> float:
        """The sum that is an alarm."""
        return THRESHOLDS[self.reference, self.rate, self.sides == "both"]

    def level(self, remembered: float) -> float:
        """Return what a track remembers in the figure's own unit."""
        return math.exp(remembered) if self.by_factors else remembered


@dataclass(frozen=True, slots=True, kw_only=True)
class Track:
    """What is remembered of one figure: enough to go on after a restart."""

    reference: tuple[float, ...] = ()
    centre: float | None = None
    """None while the reference is gathered."""
    spread: float = 1.0
    above: float = 0.0
    below: float = 0.0
    risen: tuple[int, float] = (0, 0.0)
    """How many captures the upper sum has been above zero, and the total of their values."""
    fallen: tuple[int, float] = (0, 0.0)

    @property
    def recent(self) -> float | None:
        """The level since it last was as in the reference; None while that is gathered."""
        count, total = self.risen if self.above >= self.below else self.fallen
        return total / count if count else self.centre


def advance(track: Track, value: float, chart: Chart) -> Track:
    """Take one more capture in."""
    value = math.log(value) if chart.by_factors else value
    if track.centre is None:
        gathered = (*track.reference, value)
        if len(gathered) < chart.reference:
            return replace(track, reference=gathered)
        centre, spread = settle(gathered, chart)
        return Track(reference=gathered, centre=centre, spread=spread)
    far = max(-_FURTHEST, min(_FURTHEST, (value - track.centre) / track.spread))
    above = max(0.0, track.above + far - ALLOWANCE)
    below = max(0.0, track.below - far - ALLOWANCE)
    return replace(
        track,
        above=above,
        below=below,
        risen=_more(track.risen, value) if above else (0, 0.0),
        fallen=_more(track.fallen, value) if below else (0, 0.0),
    )


def _more(run: tuple[int, float], value: float) -> tuple[int, float]:
    return run[0] + 1, run[1] + value


def alarm(track: Track, chart: Chart) -> Direction | None:
    """Return where the level went, where it is beyond doubt."""
    if chart.sides != "down" and track.above > chart.threshold:
        return "up"
    if chart.sides != "up" and track.below > chart.threshold:
        return "down"
    return None


def score(track: Track, chart: Chart) -> float:
    """Return how near an alarm is: 1 is one."""
    sums = {"up": track.above, "down": track.below, "both": max(track.above, track.below)}
    return sums[chart.sides] / chart.threshold


def settle(values: tuple[float, ...], chart: Chart) -> tuple[float, float]:
    """Return level and spread of a reference; median and MAD say what is wild in it."""
    middle = median(values)
    mad = _MAD_TO_SIGMA * median(abs(value - middle) for value in values)
    low, high = middle - _DRAWN_IN * mad, middle + _DRAWN_IN * mad
    drawn_in = [min(high, max(low, value)) for value in values]
    centre = fmean(drawn_in)
    least = _LEAST_SPREAD * (1.0 if chart.by_factors else abs(centre))
    return centre, max(stdev(drawn_in), least) or 1.0
