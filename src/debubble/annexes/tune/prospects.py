"""The runs so far in → how each setting stands, drift taken out of it, and what to run next."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from statistics import median

import numpy as np

from debubble.analysis import Analysis
from debubble.annexes.tune.journal import Expectation, Run
from debubble.annexes.tune.setting import Setting
from debubble.annexes.tune.trial import Kind
from debubble.errors import UsageError
from debubble.measure.compare import Comparison, Verdict, compare
from debubble.measure.measurement import join_measurements
from debubble.measure.prediction import NEARLY, Prediction, growth_of
from debubble.plan.baseline import AlsoRun, Baseline, stages_of
from debubble.plan.change import SEARCHED, Change, Hold
from debubble.plan.lever import OrderSearch, Permissions, Refusal
from debubble.plan.levers.microbatches import MOST_A_RANK
from debubble.plan.option import Option
from debubble.plan.plan import Plan, make_plan
from debubble.plan.request import Stated
from debubble.timeline.job import Basis
from debubble.timeline.model import FEWEST_STEPS
from debubble.timeline.schedules import format_order
from debubble.units import NS_PER_S, write_file


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

    @property
    def source(self) -> Run | None:
        """The run to plan from: the last one of the best setting."""
        return self.of(self.best)[-1] if self.best is not None else None

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
        known = (Kind.MEASURED, Kind.OTHER_BATCH)
        for run in (run for run in self.runs if run.outcome.kind in known):
            grown = self.growth(run)
            if grown is not None and run.setting.microbatches != self.now.microbatches:
                return "batch" if abs(grown - 1) < NEARLY else "microbatch"
        return None

    def growth(self, run: Run) -> float | None:
        """Return how many times as large as the first one's its batch is; None if nothing tells."""
        first, measured = self.first, run.outcome.measurement
        if first is None or first.outcome.measurement is None or measured is None:
            return None
        return growth_of(first.outcome.measurement, measured)

    def grew(self, run: Run) -> bool:
        """Tell whether a run trained with a larger batch than the first."""
        measured = run.outcome.measurement
        trains = measured is not None and measured.kind == "training"
        return trains and (self.growth(run) or 1.0) > 1 + NEARLY

    @property
    def basis(self) -> Basis:
        """On which basis all runs are held against each other."""
        measured = [run.outcome.measurement for run in self.runs]
        known = {one.basis for one in measured if one is not None}
        return Basis.UNPROFILED if known == {Basis.UNPROFILED} else Basis.PROFILED

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
        """Return its work a second, by steps where there are enough."""
        measured = run.outcome.measurement
        if measured is None:
            return 0.0
        steps = measured.step_times_s(self.basis)
        enough = len(steps) >= FEWEST_STEPS
        rates = measured.rates_per_s(steps if enough else measured.batch_latencies_s(self.basis))
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """What may be tried."""

    schedules: frozenset[str]
    """Those that the command can be told."""
    most_microbatches: int | None
    hold: Hold | None
    """What was said to be kept; None: the batch of a run that trains."""
    limit_bytes: int | None
    threshold: float
    """The smallest gain in throughput that is worth a run."""
    search_rounds: int | None = None
    """Rounds of a search for an order that has no name; None: none is looked for."""
    orders: Path = Path("orders")
    """Where such orders are written: the command is told the file as its schedule."""

    def hold_of(self, standing: Standing) -> Hold:
        """Return what is to be kept where microbatches change."""
        first = standing.first.outcome.measurement if standing.first else None
        trains = first is None or first.kind == "training"
        return self.hold or ("batch" if trains else "microbatch")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prospect:
    """A setting, and what is predicted of it."""

    setting: Setting
    lever: str
    expected: Expectation | None
    """None where nothing is predicted, and only a run can tell."""
    worth: bool
    """Whether it would gain on the best so far, beyond the noise; overlap is tried to know it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Untellable:
    """An option that would gain, and that the command cannot be told."""

    lever: str
    option: Option


@dataclass(frozen=True, slots=True, kw_only=True)
class Prospects:
    """What could be done from here on, the most promising first."""

    tries: tuple[Prospect, ...]
    untellable: tuple[Untellable, ...]
    refused: tuple[Refusal, ...]
    larger: Option | None = None
    """The best with a larger batch, which changes training and is not tried untold."""


def look_ahead(
    standing: Standing, source: Run, reading: Analysis, other: Analysis | None, scope: Scope
) -> Prospects:
    """Fit costs to a run, and to another beside it, and plan from there."""
    baseline = _fit(source.setting, reading, other, scope)
    # The plan's own bound, by the first setting: it must not move with what was tried.
    count = standing.now.microbatches or baseline.source.microbatches
    most = scope.most_microbatches or max(MOST_A_RANK * len(baseline.ranks), 2 * count)
    keeps = scope.hold_of(standing)
    # Untold, a larger batch is weighed apart, as `plan` does.
    hold = standing.hold or scope.hold or (None if keeps == "batch" else keeps)
    tellable = Permissions(
        link=False,
        split=source.setting.split is not None,
        # A larger batch than was asked for is nothing to try.
        microbatches=source.setting.microbatches is not None
        and not (keeps == "batch" and standing.hold == "microbatch"),
        overlap=source.setting.overlap is False,
        schedules=scope.schedules if source.setting.schedule is not None else frozenset(),
        hold=hold,
    )
    looks = None
    if scope.search_rounds is not None and source.setting.schedule and baseline.trains:
        looks = OrderSearch(rounds=scope.search_rounds)
    plan = make_plan(
        baseline, reading.timeline, most_microbatches=most, allowed=tellable, search=looks
    )
    tries = sorted(
        _tries(standing, source, plan, scope),
        key=lambda found: (-found.worth, -(found.expected.gain if found.expected else 0.0)),
    )
    return Prospects(
        tries=tuple(tries),
        untellable=_untellable(source, baseline, reading, scope, most, hold),
        refused=plan.refused,
        larger=next(filter(plan.changes_training, plan.recommended), None),
    )


def _fit(setting: Setting, reading: Analysis, other: Analysis | None, scope: Scope) -> Baseline:
    layers = setting.split if reading.measurement.split is None else None
    also = None
    if other is not None:
        also = AlsoRun(timeline=other.timeline, figures=other.pipeline)

    stated = Stated(layers=layers, limit_bytes=scope.limit_bytes, schedule=setting.schedule)
    try:
        return reading.baseline(stated, also)
    except UsageError:
        if also is None:
            raise
        return reading.baseline(stated)  # the other run cannot be laid beside this one


def _tries(standing: Standing, source: Run, plan: Plan, scope: Scope) -> Iterator[Prospect]:
    ahead = 1 + standing.gain_of(source.setting)
    for option in plan.options:
        if plan.changes_training(option):
            continue
        stages = stages_of(plan.baseline.what_if(option.change).order)
        change = _in_a_file(option.change, scope.orders)
        setting = source.setting.after(change, stages)
        if setting is None or option.fits_memory is False or not is_open(standing, setting):
            continue
        peaks = None
        if option.headroom is not None:
            peaks = tuple(round(rank.peak_bytes) for rank in option.headroom)
        expected = Expectation(
            gain=ahead * (1 + option.throughput_gain) - 1,
            low=ahead * (1 + option.throughput_low) - 1,
            high=ahead * (1 + option.throughput_high) - 1,
            batch_latency_s=option.window_ns / NS_PER_S,
            peak_memory_bytes=peaks,
            prediction=predict_option(plan, option, str(setting)),
            changes_training=plan.baseline.trains and option.change.grows_batch,
        )
        yield Prospect(
            setting=setting,
            lever=option.lever,
            expected=expected,
            worth=_is_worth(plan, option, scope.threshold),
        )


def predict_option(plan: Plan, option: Option, words: str) -> Prediction:
    """Return what is predicted of an option, to be held against its run."""
    return Prediction.of(
        option.change,
        words=words,
        basis=plan.baseline.basis,
        before_s=plan.baseline.window_ns / NS_PER_S,
        batch_latency_s=option.window_ns / NS_PER_S,
        low_s=option.low_ns / NS_PER_S,
        high_s=option.high_ns / NS_PER_S,
        bubble_fraction=option.bubble_fraction,
    )


def _in_a_file(change: Change, folder: Path) -> Change:
    """Write an order that has no name where a command can read it; the same one to the same file.

    Stages that keep less are nothing that a command can be told.
    """
    if change.schedule != SEARCHED or change.order is None:
        return change
    text = format_order(change.order).encode()
    file = folder / f"order-{sha256(text).hexdigest()[:12]}.csv"
    folder.mkdir(parents=True, exist_ok=True)
    if not file.exists():
        write_file(file, text)
    return replace(change, schedule=str(file.resolve()))


def _is_worth(plan: Plan, option: Option, threshold: float) -> bool:
    if option.lever == "overlap" and plan.overlap is not None:
        # Only a run tells what messages do to the compute beside them.
        return plan.overlap.break_even is None or plan.overlap.break_even > 1
    return option.throughput_gain > threshold and option.throughput_low > 0


def is_open(standing: Standing, setting: Setting) -> bool:
    """Tell whether a setting was not run yet, and does not repeat what went wrong or was ignored.

    Of what made a failed run differ, that is to blame which no good run had; what ran out of memory
    does so with more microbatches too.
    """
    if any(run.setting == setting and run.outcome.kind is not Kind.CUT for run in standing.runs):
        return False
    changed = setting.differing(standing.now)
    if not standing.ignored_knobs.isdisjoint(changed):
        return False
    good = [run.setting for run in standing.measured]
    for run in standing.runs:
        if run.outcome.kind in (Kind.MEASURED, Kind.CUT, Kind.IGNORED):
            continue
        wrong = [
            knob
            for knob, value in run.setting.differing(standing.now).items()
            if all(getattr(other, knob) != value for other in good)
        ]
        if wrong and all(_as_bad(run, knob, changed.get(knob)) for knob in wrong):
            return False
    return True


def _as_bad(run: Run, knob: str, value: object) -> bool:
    failed = getattr(run.setting, knob)
    full = run.outcome.kind in (Kind.OUT_OF_MEMORY, Kind.OVER_MEMORY)
    if full and knob == "microbatches" and isinstance(value, int):
        return bool(value >= failed)
    return bool(value == failed)


def _untellable(  # noqa: PLR0913, PLR0917 (what was planned from, and what may be tried)
    source: Run, baseline: Baseline, reading: Analysis, scope: Scope, most: int, hold: Hold | None
) -> tuple[Untellable, ...]:
    """Return the best option of each lever that the command has no placeholder for."""
    levers = ("split", "microbatches", "schedule")
    missing = {lever for lever in levers if getattr(source.setting, lever) is None}
    if not missing:
        return ()
    plan = make_plan(
        baseline, reading.timeline, most_microbatches=most, allowed=Permissions(hold=hold)
    )
    found: dict[str, Untellable] = {}
    for option in plan.options:
        untold = option.lever in missing and not plan.changes_training(option)
        if untold and _is_worth(plan, option, scope.threshold):
            found.setdefault(option.lever, Untellable(lever=option.lever, option=option))
    return tuple(found.values())
