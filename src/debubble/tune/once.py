"""A command in → one change made to it: captured, planned, captured again, compared."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from debubble.errors import TuneError
from debubble.measure.compare import compare
from debubble.measure.comparison import Comparison
from debubble.plan.allowed import Allowed
from debubble.plan.baseline import measure_baseline
from debubble.plan.option import Option
from debubble.plan.plan import Plan, make_plan
from debubble.tune.reading import Reading
from debubble.tune.setting import Setting
from debubble.tune.trial import LOG, Bench, run_trial

# Far more than any run of it takes: then it hangs.
_TIMEOUT_S = 180.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Improved:
    """One change, and what came of it."""

    before: Reading
    plan: Plan
    option: Option
    setting: Setting
    after: Reading
    compared: Comparison


def improve_once(
    bench: Bench, *, most_microbatches: int, on_step: Callable[[str], None]
) -> Improved:
    """Capture the command as it is, apply the best split and count, capture that, compare."""
    now = bench.template.now
    before = capture(bench, now, bench.folder / "before", on_step)
    on_step("planning")
    baseline = measure_baseline(before.timeline, before.figures)
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
    after = capture(bench, setting, bench.folder / "after", on_step)
    return Improved(
        before=before,
        plan=plan,
        option=option,
        setting=setting,
        after=after,
        compared=compare(before.measurement, after.measurement),
    )


def capture(bench: Bench, setting: Setting, out: Path, on_step: Callable[[str], None]) -> Reading:
    """Run the command once and read its traces; what goes wrong is an error here."""
    on_step(f"capturing {out.name}: {setting}")
    outcome, reading = run_trial(
        bench, setting, out=out, token=secrets.token_hex(8), timeout_s=_TIMEOUT_S, cut_s=None
    )
    if reading is None:
        raise TuneError(
            f"the run could not be measured: {outcome.message}",
            hint=f"its output is in {out / LOG}",
        )
    return reading
