"""The demo's one change, made and judged on a quiet machine.

A capture that something else on this machine disturbed is made anew, as long as there is time.
"""

from __future__ import annotations

import secrets
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from debubble.errors import Code, Gap, TuneError
from debubble.measure.compare import compare
from debubble.measure.comparison import Comparison
from debubble.plan.baseline import measure_baseline
from debubble.plan.option import Option
from debubble.plan.plan import Plan, make_plan
from debubble.plan.schedule import Allowed
from debubble.tune.setting import Setting
from debubble.tune.trial import LOG, Bench, Reading, run_trial
from debubble.units import show_share

# Passes of a quiet machine take up to 1.4 % more than usual on the mean, by 34 captures of 2 cores;
# those of a disturbed one 2.5 % and more, by 6.
_STEADY = 0.02


def excess(reading: Reading) -> float:
    """Return how much longer passes took, on the mean, than those of their stage usually do."""
    passes = reading.timeline.passes
    passes = passes.where(np.isin(passes.step, [window.step for window in reading.figures.windows]))
    took = (passes.end_ns - passes.start_ns).astype(np.float64)
    usual = np.zeros(len(took))
    for alike in np.unique(np.stack((passes.stage, passes.kind)), axis=1).T:
        mine = (passes.stage == alike[0]) & (passes.kind == alike[1])
        usual[mine] = np.median(took[mine])
    return float(took.sum() / usual.sum() - 1) if usual.sum() > 0 else 0.0


def is_steady(reading: Reading) -> bool:
    """Tell whether the machine was left alone."""
    return excess(reading) <= _STEADY


def busy_machine(reading: Reading, name: str) -> Gap:
    """Say that a capture was disturbed."""
    return Gap(
        code=Code.BUSY_MACHINE,
        message=f"this machine was busy during the capture of {name}: passes took "
        f"{show_share(excess(reading))} longer than usual",
        hint="close what else runs here, and try again",
    )


# Far more than any run of it takes: then it hangs.
_TIMEOUT_S = 180.0
# What follows the first capture, against it: planning, and a batch that is longer.
_REST_OVER_FIRST = 1.6


@dataclass(frozen=True, slots=True, kw_only=True)
class Improved:
    """One change, and what came of it."""

    before: Reading
    plan: Plan
    option: Option
    setting: Setting
    after: Reading
    compared: Comparison

    @property
    def gaps(self) -> tuple[Gap, ...]:
        """What is to be said of the captures themselves."""
        sides = (("before", self.before), ("after", self.after))
        return tuple(busy_machine(one, name) for name, one in sides if not is_steady(one))


def improve_once(
    bench: Bench, *, most_microbatches: int, seconds: float, on_step: Callable[[str], None]
) -> Improved:
    """Capture the command as it is, apply the best split and count, capture that, compare.

    Disturbed captures are made anew where all of it still ends within so many seconds.
    """
    now, until_s = bench.template.now, time.monotonic() + seconds
    first = _Steadily(bench=bench, until_s=until_s, rest=_REST_OVER_FIRST, on_step=on_step)
    before = first.capture(now, bench.folder / "before")
    on_step("planning")
    baseline = measure_baseline(before.timeline, before.figures, layers=now.split)
    plan = make_plan(
        baseline,
        before.timeline,
        most_microbatches=most_microbatches,
        allowed=Allowed(schedules=frozenset(), overlap=False, link=False, hold="microbatch"),
    )
    if not plan.recommended:
        raise TuneError(
            "nothing is foretold to gain", hint="give it fewer microbatches to begin with"
        )
    option = plan.recommended[0]
    setting = now.after(option.change, len(now.split or ()))
    if setting is None:
        raise TuneError("the command cannot be told the change", hint="give it {split}")
    after = replace(first, rest=0.0).capture(setting, bench.folder / "after")
    return Improved(
        before=before,
        plan=plan,
        option=option,
        setting=setting,
        after=after,
        compared=compare(before.measurement, after.measurement),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Steadily:
    """Captures until the machine was left alone, or the time is up."""

    bench: Bench
    until_s: float
    rest: float
    """What must follow, against the capture itself."""
    on_step: Callable[[str], None]

    def capture(self, setting: Setting, out: Path) -> Reading:
        """Run the command and read its traces; the last run is kept."""
        while True:
            self.on_step(f"capturing {out.name}: {setting}")
            began_s = time.monotonic()
            reading = _capture(self.bench, setting, out)
            took_s = time.monotonic() - began_s
            if is_steady(reading) or began_s + took_s * (2 + self.rest) > self.until_s:
                return reading
            self.on_step("this machine was busy with something else meanwhile: once more")
            shutil.rmtree(out)


def _capture(bench: Bench, setting: Setting, out: Path) -> Reading:
    """Run the command once and read its traces; what goes wrong is an error here."""
    outcome, reading = run_trial(
        bench, setting, out=out, token=secrets.token_hex(8), timeout_s=_TIMEOUT_S, cut_s=None
    )
    if reading is None:
        raise TuneError(
            f"the run could not be measured: {outcome.message}",
            hint=f"its output is in {out / LOG}",
        )
    return reading
