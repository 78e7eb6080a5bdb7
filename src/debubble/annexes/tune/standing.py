"""The runs so far in → how each setting stands, and which settings may still be tried."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from debubble.annexes.tune.journal import Expectation, Kind, Run
from debubble.annexes.tune.setting import Setting
from debubble.annexes.tune.task import Task
from debubble.measure.compare import Comparison, compare
from debubble.measure.measurement import Measurement, join_measurements
from debubble.measure.prediction import NEARLY, growth_of
from debubble.plan.change import Hold
from debubble.plan.option import Idea, Option
from debubble.timeline.job import Basis
from debubble.timeline.model import FEWEST_STEPS


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A setting that should gain on the best so far, and what is predicted of it."""

    setting: Setting
    expected: Expectation | None
    """None where nothing is predicted, and only a run can tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """What could be tried from here on, the most promising first."""

    tries: tuple[Candidate, ...] = ()
    refused: tuple[Idea, ...] = ()
    larger: Option | None = None
    """The best with a larger batch, which changes training and is not tried unasked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """All runs that are over."""

    task: Task
    runs: tuple[Run, ...]

    @property
    def now(self) -> Setting:
        """The setting as it is."""
        return self.task.template.now

    @property
    def measured(self) -> tuple[Run, ...]:
        """The runs that were measured and are allowed to count."""
        return self._of_kinds(Kind.MEASURED)

    def _of_kinds(self, *kinds: Kind) -> tuple[Run, ...]:
        return tuple(run for run in self.runs if run.outcome.kind in kinds)

    def of(self, setting: Setting) -> tuple[Run, ...]:
        """Return the runs of a setting that were measured."""
        return tuple(run for run in self.measured if run.setting == setting)

    @property
    def first(self) -> Run | None:
        """The first run of the setting as it is; over its memory, it can still be planned from."""
        known = self._of_kinds(Kind.MEASURED, Kind.OVER_MEMORY)
        return next((run for run in known if run.setting == self.now), None)

    @property
    def best(self) -> Setting | None:
        """The setting that does the most work a second; None where none counts."""
        settings = list(dict.fromkeys(run.setting for run in self.measured))
        return max(settings, key=self.gain_of, default=None)

    @property
    def source(self) -> Run | None:
        """The run to plan from: the last one of the best setting, else the first."""
        return self.of(self.best)[-1] if self.best is not None else self.first

    def gain_of(self, setting: Setting) -> float:
        """Return what a setting gains in throughput over the one as it is."""
        return self._gain(self.of(setting))

    def gain_of_run(self, run: Run) -> float:
        """Return what one run gains over the setting as it is."""
        return self._gain((run,))

    def _gain(self, runs: tuple[Run, ...]) -> float:
        base = self.of(self.now) or (self.first,)
        rate, base_rate = (
            median([self._rate(run) for run in some if run is not None] or [0.0])
            for some in (runs, base)
        )
        return rate / base_rate - 1 if base_rate else 0.0

    def compared(self, setting: Setting) -> Comparison | None:
        """Hold a setting against the one as it is, all runs of each together."""
        before, after = (
            [measured for run in self.of(held) if (measured := measurement_of(run))]
            for held in (self.now, setting)
        )
        if not before or not after:
            return None
        return compare(
            join_measurements(before),
            join_measurements(after),
            limit_bytes=self.task.scope.limit_bytes,
        )

    @property
    def trains(self) -> bool:
        """Whether the command trains, as far as is known."""
        measured = measurement_of(self.first)
        return measured is None or measured.kind == "training"

    @property
    def held(self) -> Hold:
        """What is to be kept where microbatches change."""
        return self.task.scope.hold or ("batch" if self.trains else "microbatch")

    @property
    def keeps(self) -> Hold | None:
        """What the command keeps where microbatches change: it, or the batch; None as yet."""
        for run in self._of_kinds(Kind.MEASURED, Kind.OTHER_BATCH):
            growth = self.growth(run)
            if growth is not None and run.setting.microbatches != self.now.microbatches:
                return "batch" if abs(growth - 1) < NEARLY else "microbatch"
        return None

    def growth(self, run: Run) -> float | None:
        """Return how many times as large as the first one's its batch is; None if nothing tells."""
        before, after = measurement_of(self.first), measurement_of(run)
        return None if before is None or after is None else growth_of(before, after)

    def grew(self, run: Run) -> bool:
        """Tell whether a run trained with a larger batch than the first."""
        return self.trains and (self.growth(run) or 1.0) > 1 + NEARLY

    @property
    def basis(self) -> Basis:
        """On which basis all runs are held against each other."""
        known = {measured.basis for run in self.runs if (measured := measurement_of(run))}
        return Basis.UNPROFILED if known == {Basis.UNPROFILED} else Basis.PROFILED

    @property
    def ignored_knobs(self) -> frozenset[str]:
        """What the command was told and did not do."""
        return frozenset(knob for run in self.runs for knob in run.outcome.ignored)

    def is_open(self, setting: Setting) -> bool:
        """Tell whether a setting was not run yet, and does not repeat what failed or was ignored.

        Of what made a failed run differ, that is to blame which no good run had; what ran out of
        memory does so with more microbatches too.
        """
        ended = [run for run in self.runs if run.outcome.kind is not Kind.CUT]
        changed = setting.differing(self.now)
        if any(run.setting == setting for run in ended) or self.ignored_knobs & set(changed):
            return False
        good = [run.setting for run in self.measured]
        for run in ended:
            if run.outcome.kind in {Kind.MEASURED, Kind.IGNORED}:
                continue
            wrong = {
                knob: value
                for knob, value in run.setting.differing(self.now).items()
                if all(getattr(other, knob) != value for other in good)
            }
            if run.outcome.kind in {Kind.OUT_OF_MEMORY, Kind.OVER_MEMORY}:
                failed, asked = wrong.get("microbatches"), changed.get("microbatches")
                if isinstance(failed, int) and isinstance(asked, int) and asked >= failed:
                    wrong["microbatches"] = asked
            if wrong and all(changed.get(knob) == value for knob, value in wrong.items()):
                return False
        return True

    def _rate(self, run: Run) -> float:
        """Return its work a second, by steps where there are enough: microbatches as they were."""
        measured, base = measurement_of(run), measurement_of(self.first)
        if measured is None:
            return 0.0
        steps = measured.step_times_s(self.basis)
        enough = len(steps) >= FEWEST_STEPS
        rates = measured.rates_per_s(steps if enough else measured.batch_latencies_s(self.basis))
        size = 1.0
        if base is not None and base.message_bytes and measured.message_bytes:
            size = measured.message_bytes / base.message_bytes
        return median(rates) * size if rates else 0.0


def measurement_of(run: Run | None) -> Measurement | None:
    """Return what was measured of a run; None where nothing was."""
    return None if run is None else run.outcome.measurement
