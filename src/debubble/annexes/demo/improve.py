"""The demo's job in → one change of it, made and judged on a quiet machine.

A capture that something else on this machine disturbed is made anew, as long as there is time.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from debubble.analysis import Analysis
from debubble.annexes.tune.job import predict_option, run_job
from debubble.annexes.tune.journal import LOG, Run, clear_run
from debubble.annexes.tune.setting import Setting
from debubble.annexes.tune.task import Limits, Task
from debubble.errors import Code, Gap, MachineBusy, TuneError
from debubble.measure.compare import Comparison, Verdict, compare
from debubble.plan.option import Option
from debubble.plan.request import Stated
from debubble.units import NS_PER_S, show_duration, show_percent, show_range

# Passes of a quiet machine take up to 1.4 % more than usual on the mean, by 34 captures of 2 cores;
# those of a disturbed one 2.5 % and more, by 6.
STEADY = 0.02
# Nobody looks on for longer.
_WITHIN_S = 55.0
# Far more than any run of it takes: then it hangs.
_TIMEOUT_S = 180.0
# What follows the first capture, against it: planning, and a batch that is longer.
_REST_OVER_FIRST = 1.6
_QUIETER = "close what else runs here, and try again"


@dataclass(frozen=True, slots=True, kw_only=True)
class Improvement:
    """One change, and what came of it."""

    before: Analysis
    option: Option
    trains: bool
    setting: Setting
    after: Analysis
    compared: Comparison

    @property
    def gaps(self) -> tuple[Gap, ...]:
        """What is to be said of the captures themselves."""
        return tuple(
            Gap(
                code=Code.BUSY_MACHINE,
                message=f"this machine was busy during the capture of {name}: passes took "
                f"{show_percent(excess(reading))} longer than usual",
                hint=_QUIETER,
            )
            for name, reading in (("before", self.before), ("after", self.after))
            if excess(reading) > STEADY
        )


def improve_once(
    task: Task, on_step: Callable[[str], None], seconds: float = _WITHIN_S
) -> Improvement:
    """Capture the job as it is, apply the best split and count, capture that, compare.

    Disturbed captures are made anew where all of it still ends within so many seconds. What is
    left may be too disturbed to show anything: then that is said, and nothing else.
    """
    now, until_s = task.template.now, time.monotonic() + seconds

    def capture(setting: Setting, name: str, rest: float) -> Analysis:
        """Run the job until the machine was left alone, or the time is up; keep the last run.

        `rest` is how long what must follow takes, against the capture itself.
        """
        out = task.folder / name
        run = Run(number=0, token=secrets.token_hex(8), setting=setting, why=name)
        while True:
            on_step(f"capturing {name}: {setting}")
            began_s = time.monotonic()
            outcome, reading = run_job(task, run, out, Limits(hangs_s=_TIMEOUT_S))
            if reading is None:
                raise TuneError(
                    f"the run could not be measured: {outcome.message}",
                    hint=f"its output is in {out / LOG}",
                )
            took_s = time.monotonic() - began_s
            if excess(reading) <= STEADY or began_s + took_s * (2 + rest) > until_s:
                return reading
            on_step("this machine was busy with something else meanwhile: once more")
            clear_run(out)

    before = capture(now, "before", _REST_OVER_FIRST)
    on_step("planning")
    plan = before.plan(
        Stated(layers=now.split),
        most_microbatches=task.scope.most_microbatches,
        hold="microbatch",
        barred=task.template.barred_levers,
    )
    # Noise makes intervals wide; whether the option gains is seen when it is run.
    option = next(iter((*plan.recommended, *plan.to_try)), None)
    setting = None
    if option is not None:
        setting = task.template.after(now, option.change, len(now.split or ()))
    if option is None or setting is None:
        if excess(before) > STEADY:
            raise _busy("nothing is predicted to gain", before)
        raise TuneError("nothing is predicted to gain", hint="try again")
    after = capture(setting, "after", 0.0)
    prediction = predict_option(plan, option, str(setting))
    compared = compare(
        replace(before.measurement, predicted=(prediction,)),
        after.measurement,
        change=prediction.words,
    )
    busy = max(excess(before), excess(after)) > STEADY
    if compared.verdict is not Verdict.BETTER and busy:
        raise _busy("the effect of the change cannot be measured", before, after)
    return Improvement(
        before=before,
        option=option,
        trains=plan.baseline.trains,
        setting=setting,
        after=after,
        compared=compared,
    )


def excess(reading: Analysis) -> float:
    """Return how much longer passes took, on the mean, than those of their stage usually do."""
    passes = reading.timeline.passes
    kept = [window.step for window in reading.pipeline.windows]
    passes = passes.where(np.isin(passes.step, kept))
    took = (passes.end_ns - passes.start_ns).astype(np.float64)
    usual = np.zeros(len(took))
    for stage, kind in np.unique(np.stack((passes.stage, passes.kind)), axis=1).T:
        alike = (passes.stage == stage) & (passes.kind == kind)
        usual[alike] = np.median(took[alike])
    return float(took.sum() / usual.sum() - 1) if usual.sum() > 0 else 0.0


def _busy(what: str, *readings: Analysis) -> MachineBusy:
    """Say that this machine was busy, with what was seen of it."""
    times = [
        length
        for reading in readings
        for length in reading.measurement.batch_latencies_s(reading.measurement.basis)
    ]
    most = max(map(excess, readings))
    took = show_range([length * NS_PER_S for length in times], show_duration)
    return MachineBusy(
        f"this machine was busy: {what}, passes took {show_percent(most)} longer than usual, "
        f"batches {took}",
        hint=_QUIETER,
    )
