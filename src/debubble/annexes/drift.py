"""One figure after the other in → whether its level moved, and stayed: a CUSUM of clipped steps.

The first captures are the reference. Each later one moves a sum by at most one: up by a whole one
where it is twice what matters off the reference, down where it is not off at all.

```
values     100 101 99 100 100 │ 101 160 100  99 106 107 106 109 107 …
sum of up                     │  0   1   0    0   1   2   3   4   5   alarm
```

What matters is a change of 3 %, or the noise of the reference where that is more. Nothing else is
estimated, and nothing was fitted: `benchmarks/drift.py` counts alarms on step times of real jobs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import sqrt
from statistics import fmean, median
from typing import Literal

Direction = Literal["up", "down"]

REFERENCE = 40
# The least that is worth waking somebody for, of the level or, of shares, in shares.
MIN_CHANGE = 0.03
# A sum of so many is an alarm: as many captures one after the other that are clearly off.
STAYS = 5
_MAD_TO_SIGMA = 1.4826
# Where values of the reference are drawn in, in standard deviations: no outlier moves a mean far.
_DRAWN_IN = 2.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """How a figure is watched."""

    worse: Direction
    """Where it goes when things get worse."""
    reference: int = REFERENCE
    min_change: float = MIN_CHANGE
    is_share: bool = False
    """Shares change by differences, times and rates by factors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Captures since a sum last was zero."""

    sum: float = 0.0
    since: float | None = None
    """When it left zero, as the caller counts."""
    values: tuple[float, ...] = ()
    """The newest, as many as the reference has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Track:
    """What is remembered of one figure: enough to go on after a restart."""

    reference: tuple[float, ...] = ()
    level: float | None = None
    """Of the reference; None while that is gathered."""
    unit: float = 1.0
    """The difference that matters, in the figure's own unit."""
    up: Run = Run()
    down: Run = Run()

    @property
    def moving(self) -> Run:
        """The captures since the figure last was as in the reference."""
        return max(self.up, self.down, key=lambda run: run.sum)

    @property
    def recent(self) -> float | None:
        """The level of these, where they are as many as an alarm takes; None while learning."""
        values = self.moving.values
        return median(values) if len(values) >= STAYS else self.level


def advance(track: Track, value: float, chart: Chart, at: float = 0.0) -> Track:
    """Take one more capture in; `at` says when it was."""
    if track.level is None:
        gathered = (*track.reference, value)
        if len(gathered) < chart.reference:
            return replace(track, reference=gathered)
        level, unit = settle(gathered, chart)
        return Track(reference=gathered, level=level, unit=unit)
    off = (value - track.level) / track.unit
    up, down = (
        _extend(run, change, value, at, chart.reference)
        for run, change in ((track.up, off), (track.down, -off))
    )
    return replace(track, up=up, down=down)


def _extend(run: Run, off: float, value: float, at: float, most: int) -> Run:
    """Move a sum; one that fell to zero begins anew, one of twice an alarm grows no more."""
    total = min(run.sum + max(-1.0, min(1.0, off - 1.0)), 2.0 * STAYS)
    if total <= 0:
        return Run()
    since = at if run.since is None else run.since
    return Run(sum=total, since=since, values=(*run.values, value)[-most:])


def settle(values: tuple[float, ...], chart: Chart) -> tuple[float, float]:
    """Return level and unit of a reference.

    Neighbours are slow together, so that noise is asked of runs as long as an alarm as well: what
    runs of five do beyond a fifth of the variance of one is correlation.
    """
    level = median(values)
    spread = _MAD_TO_SIGMA * median(abs(value - level) for value in values)
    low, high = level - _DRAWN_IN * spread, level + _DRAWN_IN * spread
    drawn_in = [min(high, max(low, value)) for value in values]
    runs = [fmean(drawn_in[at : at + STAYS]) for at in range(len(values) - STAYS + 1)]
    middle = median(runs)
    of_runs = sqrt(STAYS) * _MAD_TO_SIGMA * median(abs(run - middle) for run in runs)
    matters = chart.min_change * (1.0 if chart.is_share else abs(level))
    return level, max(matters, spread, of_runs) or 1.0


def score(track: Track, chart: Chart) -> float:
    """Return how near an alarm is: 1 or more is one."""
    return (track.up if chart.worse == "up" else track.down).sum / STAYS


def is_alarm(track: Track, chart: Chart) -> bool:
    """Tell whether the level is worse, beyond doubt."""
    return score(track, chart) >= 1


def first_alarm(values: Iterable[float]) -> int | None:
    """Return the index of the first value that raises an alarm of more; None where none does."""
    chart, track = Chart(worse="up"), Track()
    for index, value in enumerate(values):
        track = advance(track, value, chart, index)
        if is_alarm(track, chart):
            return index
    return None
