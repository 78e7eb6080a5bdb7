"""A command in → one change of it, made and judged on a quiet machine: what the demo shows.

A capture that something else on this machine disturbed is made anew, as long as there is time.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from debubble.analysis import Analysis
from debubble.annexes.tune.prospects import predict_option
from debubble.annexes.tune.setting import Setting
from debubble.annexes.tune.trial import (
    LOG,
    STEADY,
    Bench,
    clear_trial,
    excess,
    run_trial,
)
from debubble.errors import Code, Gap, MachineBusy, TuneError
from debubble.measure.compare import Comparison, Verdict, compare
from debubble.measure.prediction import PredictionCheck, check_prediction
from debubble.plan.lever import Permissions
from debubble.plan.option import Option
from debubble.plan.plan import Plan, make_plan
from debubble.plan.request import Stated
from debubble.units import NS_PER_S, show_duration, show_percent, show_range

# Far more than any run of it takes: then it hangs.
_TIMEOUT_S = 180.0
# What follows the first capture, against it: planning, and a batch that is longer.
_REST_OVER_FIRST = 1.6
_QUIETER = "close what else runs here, and try again"


@dataclass(frozen=True, slots=True, kw_only=True)
class Improvement:
    """One change, and what came of it."""

    before: Analysis
    plan: Plan
    option: Option
    setting: Setting
    after: Analysis
    compared: Comparison
    check: PredictionCheck
    """What was predicted of it, and what came."""

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
    bench: Bench, *, most_microbatches: int, seconds: float, on_step: Callable[[str], None]
) -> Improvement:
    """Capture the command as it is, apply the best split and count, capture that, compare.

    Disturbed captures are made anew where all of it still ends within so many seconds. What is
    left may be too disturbed to show anything: then that is said, and nothing else.
    """
    now, until_s = bench.template.now, time.monotonic() + seconds

    def capture(setting: Setting, name: str, rest: float) -> Analysis:
        """Run the command until the machine was left alone, or the time is up; keep the last run.

        `rest` is how long what must follow takes, against the capture itself.
        """
        out = bench.folder / name
        while True:
            on_step(f"capturing {name}: {setting}")
            began_s = time.monotonic()
            token = secrets.token_hex(8)
            outcome, reading = run_trial(
                bench, setting, out=out, token=token, timeout_s=_TIMEOUT_S, cut_s=None
            )
            if reading is None:
                raise TuneError(
                    f"the run could not be measured: {outcome.message}",
                    hint=f"its output is in {out / LOG}",
                )
            took_s = time.monotonic() - began_s
            if excess(reading) <= STEADY or began_s + took_s * (2 + rest) > until_s:
                return reading
            on_step("this machine was busy with something else meanwhile: once more")
            clear_trial(out)

    before = capture(now, "before", _REST_OVER_FIRST)
    on_step("planning")
    baseline = before.baseline(Stated(layers=now.split))
    plan = make_plan(
        baseline,
        before.timeline,
        most_microbatches=most_microbatches,
        allowed=Permissions(schedules=frozenset(), overlap=False, link=False, hold="microbatch"),
    )
    # Noise makes intervals wide; whether the option gains is seen when it is run.
    option = next(iter((*plan.recommended, *plan.to_try)), None)
    if option is None:
        if excess(before) > STEADY:
            raise _busy("nothing is predicted to gain", before)
        raise TuneError(
            "nothing is predicted to gain", hint="give it fewer microbatches to begin with"
        )
    setting = now.after(option.change, len(now.split or ()))
    if setting is None:
        raise TuneError("the command has no setting for the change", hint="give it {split}")
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
        plan=plan,
        option=option,
        setting=setting,
        after=after,
        compared=compared,
        check=check_prediction(prediction, before.measurement, after.measurement),
    )


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
