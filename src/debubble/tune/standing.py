"""The runs so far in → how each setting stands, drift taken out of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import median

import numpy as np

from debubble.measure.compare import compare
from debubble.measure.comparison import Comparison, Verdict
from debubble.measure.measurement import join_measurements
from debubble.plan.change import Hold
from debubble.tune.journal import Run
from debubble.tune.setting import Setting
from debubble.tune.trial import Kind

# Two sizes of a batch that differ by less are one size, rounded.
_SAME_BATCH = 0.1
# One step may be any step.
_FEWEST_STEPS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """All runs that are over."""

    now: Setting
    runs: tuple[Run, ...]
    limit_bytes: int | None = None

    def of(self, setting: Setting) -> tuple[Run, ...]:
        """Return the runs of a setting that were measured."""
        return tuple(run for run in self.measured if run.setting == setting)

    @property
    def measured(self) -> tuple[Run, ...]:
        """The runs that were measured and are allowed to count."""
        return tuple(run for run in self.runs if run.outcome.kind is Kind.MEASURED)

    @property
    def first(self) -> Run | None:
        """The first run of the setting as it is; over its memory, it can still be planned from."""
        known = (Kind.MEASURED, Kind.OVER_MEMORY)
        mine = (run for run in self.runs if run.setting == self.now and run.outcome.kind in known)
        return next(mine, None)

    @property
    def best(self) -> Setting | None:
        """The setting that does the most work a second; None where none counts."""
        settings = list(dict.fromkeys(run.setting for run in self.measured))
        return max(settings, key=self.rate_of, default=None)

    def gain_of(self, setting: Setting) -> float:
        """Return what a setting gains in throughput over the one as it is."""
        return self._gain(self.rate_of(setting))

    def gain_of_run(self, run: Run) -> float:
        """Return what one run gains over the setting as it is, drift taken out."""
        return self._gain(self._rate(run) / self._drift(run.number))

    def _gain(self, rate: float) -> float:
        first = self.first
        base = self.rate_of(self.now) if self.of(self.now) else self._rate(first) if first else 0.0
        return rate / base - 1 if base else 0.0

    def rate_of(self, setting: Setting) -> float:
        """Return its work a second, as if all runs had been made at the moment of the first."""
        rates = [self._rate(run) / self._drift(run.number) for run in self.of(setting)]
        return median(rates) if rates else 0.0

    def compared(self, setting: Setting) -> Comparison | None:
        """Hold a setting against the one as it is, all runs of each together."""
        before, after = self.of(self.now), self.of(setting)
        if not before or not after:
            return None
        first, second = (
            join_measurements([run.outcome.measurement for run in runs if run.outcome.measurement])
            for runs in (before, after)
        )
        return compare(first, second, limit_bytes=self.limit_bytes)

    def is_clear(self, setting: Setting) -> bool:
        """Tell whether it is surely better or worse than the one as it is."""
        found = self.compared(setting)
        return found is not None and found.verdict in (Verdict.BETTER, Verdict.WORSE)

    @property
    def hold(self) -> Hold | None:
        """What the command keeps when microbatches change: their size or the batch; None as yet."""
        first = self.first
        for run in self.measured:
            told, was = run.setting.microbatches, self.now.microbatches
            size = self._size(run)
            if first is None or told == was or told is None or was is None or size is None:
                continue
            return "batch" if abs(size * told / was - 1) < _SAME_BATCH else "microbatch"
        return None

    @property
    def ignored_knobs(self) -> frozenset[str]:
        """What the command was told and did not do."""
        return frozenset(knob for run in self.runs for knob in run.outcome.ignored)

    def overlap_is_idle(self, threshold: float) -> bool:
        """Tell whether settings that differ in overlap alone do the same work, within a share.

        Then it gains nothing, or the command ignores it: traces do not tell which.
        """
        settings = {run.setting for run in self.measured}
        pairs = [
            (setting, replace(setting, overlap=False)) for setting in settings if setting.overlap
        ]
        ratios = [self.rate_of(on) / self.rate_of(off) for on, off in pairs if off in settings]
        return bool(ratios) and all(abs(ratio - 1) < threshold for ratio in ratios)

    def _rate(self, run: Run) -> float:
        """Return its work a second: by steps without the profiler where all runs timed some."""
        measured = run.outcome.measurement
        if measured is None:
            return 0.0
        enough = len(measured.step_times_s) >= _FEWEST_STEPS
        lengths = "step_times_s" if enough else "batch_latencies_s"
        if all(
            len(known.outcome.measurement.unprofiled_step_times_s) >= _FEWEST_STEPS
            for known in self.runs
            if known.outcome.measurement is not None
        ):
            lengths = "unprofiled_step_times_s"
        rates = measured.rates_per_s(lengths)
        return median(rates) * (self._size(run) or 1.0) if rates else 0.0

    def _size(self, run: Run) -> float | None:
        """Return the size of a microbatch against the first run's, by what stages send."""
        first = self.first
        measured, base = run.outcome.measurement, first.outcome.measurement if first else None
        if not measured or not base or not measured.message_bytes or not base.message_bytes:
            return None
        return measured.message_bytes / base.message_bytes

    def _drift(self, number: int) -> float:
        """Return the machine's pace at a run against the first, by the runs of one setting.

        Beyond the last of those it is taken to stay: whoever wants to know runs that one last.
        """
        mine = self.of(self.now)
        if len(mine) < 2:
            return 1.0
        paces = [self._rate(run) / self._rate(mine[0]) for run in mine]
        return float(np.interp(number, [run.number for run in mine], paces))
