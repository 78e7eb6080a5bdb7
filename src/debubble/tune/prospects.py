"""Runs so far in → what is worth running next, from costs fitted to the best of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

from debubble.analysis import Analysis
from debubble.errors import UsageError
from debubble.plan.baseline import AlsoRun, Baseline, measure_baseline, stages_of
from debubble.plan.change import SEARCHED, Change, Hold
from debubble.plan.lever import Permissions, Refused
from debubble.plan.levers.microbatches import MOST_A_RANK
from debubble.plan.option import Option
from debubble.plan.order_search import OrderSearch
from debubble.plan.plan import Plan, make_plan
from debubble.schedules import format_order
from debubble.tune.journal import Expected, Run
from debubble.tune.setting import Setting
from debubble.tune.standing import Standing
from debubble.tune.trial import Kind
from debubble.units import NS_PER_S
from debubble.whole_file import write_file


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """What may be tried."""

    schedules: frozenset[str]
    """Those that the command can be told."""
    most_microbatches: int | None
    hold: Hold | None
    limit_bytes: int | None
    threshold: float
    """The smallest gain in throughput that is worth a run."""
    search_rounds: int | None = None
    """Rounds of a search for an order that has no name; None: none is looked for."""
    orders: Path = Path("orders")
    """Where such orders are written: the command is told the file as its schedule."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prospect:
    """A setting, and what is predicted of it."""

    setting: Setting
    lever: str
    expected: Expected | None
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
    refused: tuple[Refused, ...]


def look_ahead(
    standing: Standing, source: Run, reading: Analysis, other: Analysis | None, scope: Scope
) -> Prospects:
    """Fit costs to a run, and to another beside it, and plan from there."""
    baseline = _fit(source.setting, reading, other, scope)
    # The plan's own bound, by the first setting: it must not move with what was tried.
    count = standing.now.microbatches or baseline.source.microbatches
    most = scope.most_microbatches or max(MOST_A_RANK * len(baseline.ranks), 2 * count)
    tellable = Permissions(
        link=False,
        split=source.setting.split is not None,
        microbatches=source.setting.microbatches is not None,
        overlap=source.setting.overlap is False,
        schedules=scope.schedules if source.setting.schedule is not None else frozenset(),
        hold=standing.hold or scope.hold,
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
        untellable=_untellable(source, baseline, reading, scope, most),
        refused=plan.refused,
    )


def _fit(setting: Setting, reading: Analysis, other: Analysis | None, scope: Scope) -> Baseline:
    layers = setting.split if reading.measurement.split is None else None
    also = None
    if other is not None:
        also = AlsoRun(timeline=other.timeline, figures=other.pipeline)

    def fit(also: AlsoRun | None) -> Baseline:
        return measure_baseline(
            reading.timeline,
            reading.pipeline,
            layers=layers,
            limit_bytes=scope.limit_bytes,
            schedule=setting.schedule,
            also=also,
        )

    try:
        return fit(also)
    except UsageError:
        if also is None:
            raise
        return fit(None)  # the other run cannot be laid beside this one: it tells nothing more


def _tries(standing: Standing, source: Run, plan: Plan, scope: Scope) -> Iterator[Prospect]:
    done = {run.setting for run in standing.runs if run.outcome.kind is not Kind.CUT}
    ahead = 1 + standing.gain_of(source.setting)
    for option in plan.options:
        stages = stages_of(plan.baseline.what_if(option.change).order)
        change = _in_a_file(option.change, scope.orders)
        setting = source.setting.after(change, stages)
        if setting is None or setting in done or option.fits_memory is False:
            continue
        if is_hopeless(standing, setting):
            continue
        peaks = None
        if option.headroom is not None:
            peaks = tuple(round(rank.peak_bytes) for rank in option.headroom)
        expected = Expected(
            gain=ahead * (1 + option.throughput_gain) - 1,
            low=ahead * (1 + option.throughput_low) - 1,
            high=ahead * (1 + option.throughput_high) - 1,
            batch_latency_s=option.window_ns / NS_PER_S,
            peak_memory_bytes=peaks,
        )
        yield Prospect(
            setting=setting,
            lever=option.lever,
            expected=expected,
            worth=_is_worth(plan, option, scope.threshold),
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


def is_hopeless(standing: Standing, setting: Setting) -> bool:
    """Tell whether a setting repeats what already went wrong, or turns a knob that is ignored.

    Of what made a failed run differ, that is to blame which no good run had; what ran out of memory
    does so with more microbatches too.
    """
    mine = setting.differing(standing.now)
    if not standing.ignored_knobs.isdisjoint(mine):
        return True
    good = [run.setting for run in standing.measured]
    for run in standing.runs:
        if run.outcome.kind in (Kind.MEASURED, Kind.CUT, Kind.IGNORED):
            continue
        wrong = [
            knob
            for knob, value in run.setting.differing(standing.now).items()
            if all(getattr(other, knob) != value for other in good)
        ]
        if wrong and all(_as_bad(run, knob, mine.get(knob)) for knob in wrong):
            return True
    return False


def _as_bad(run: Run, knob: str, value: object) -> bool:
    failed = getattr(run.setting, knob)
    full = run.outcome.kind in (Kind.OUT_OF_MEMORY, Kind.OVER_MEMORY)
    if full and knob == "microbatches" and isinstance(value, int):
        return bool(value >= failed)
    return bool(value == failed)


def _untellable(
    source: Run, baseline: Baseline, reading: Analysis, scope: Scope, most: int
) -> tuple[Untellable, ...]:
    """Return the best option of each lever that the command has no placeholder for."""
    levers = ("split", "microbatches", "schedule")
    missing = {lever for lever in levers if getattr(source.setting, lever) is None}
    if not missing:
        return ()
    plan = make_plan(baseline, reading.timeline, most_microbatches=most)
    found: dict[str, Untellable] = {}
    for option in plan.options:
        if option.lever in missing and _is_worth(plan, option, scope.threshold):
            found.setdefault(option.lever, Untellable(lever=option.lever, option=option))
    return tuple(found.values())
