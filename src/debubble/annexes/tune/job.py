"""A command that runs to its end in → its runs, judged, and what may be tried next."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path

from debubble.analysis import Analysis, analyse_found
from debubble.annexes.tune.journal import LOG, MARKER, Expectation, Kind, Outcome, Run
from debubble.annexes.tune.process import run_guarded, say_failure
from debubble.annexes.tune.setting import Setting
from debubble.annexes.tune.standing import Candidate, Candidates, Standing, measurement_of
from debubble.annexes.tune.task import Limits, Task
from debubble.capture.files import list_captures, prepare_out
from debubble.capture.settings import Settings, environment_for
from debubble.errors import DebubbleError, TuneError, UsageError
from debubble.measure.compare import compare
from debubble.measure.measurement import Measurement
from debubble.measure.prediction import NEARLY, Prediction, check_prediction, growth_of
from debubble.plan.baseline import stages_of
from debubble.plan.option import Option
from debubble.plan.plan import Plan
from debubble.plan.request import Stated
from debubble.trace.run import find_run
from debubble.units import NS_PER_S, show_bytes, show_times


def read_capture(folder: Path | str) -> Analysis:
    """Read the newest capture of a folder; of several pipelines, the one that waits most."""
    return analyse_found(find_run([str(folder)]))


def run_job(task: Task, run: Run, out: Path, limits: Limits) -> tuple[Outcome, Analysis | None]:
    """Run the command once and read the traces that it leaves in a folder."""
    is_new = not out.exists() or not any(out.iterdir())
    prepare_out(out)
    if is_new:
        (out / MARKER).touch()
    settings = Settings(steps=task.steps, wait=task.wait, out=out)
    earlier = set(list_captures(out))
    ended = run_guarded(
        task.template.fill(run.setting),
        environment_for(settings, os.environ),
        token=run.token,
        log=out / LOG,
        timeout_s=limits.timeout_s,
    )

    def came_of(kind: Kind, message: str) -> tuple[Outcome, None]:
        return Outcome(kind=kind, seconds=ended.seconds, message=message), None

    if ended.code is None:
        cut = limits.budget_s is not None and ended.seconds >= limits.budget_s
        why = "the budget was spent, and it was not through" if cut else "stopped: not through"
        return came_of(Kind.CUT if cut else Kind.HUNG, f"{why} after {ended.seconds:.0f} s")
    if ended.code:
        return came_of(*say_failure(ended.code, out / LOG))
    if not [capture for capture in list_captures(out) if capture not in earlier]:
        return came_of(
            Kind.UNREADABLE,
            "it ran to its end and nothing was captured: that takes "
            f"{settings.wait + settings.length + 1} steps of a pipeline schedule or an optimizer",
        )
    try:
        reading = read_capture(out)
        if not reading.measurement.samples or reading.measurement.partial:
            gaps = "; ".join(map(str, reading.measured_warnings))
            raise TuneError(gaps or "no step was captured whole")
    except DebubbleError as error:
        return came_of(Kind.UNREADABLE, str(error))
    measurement = reading.measurement
    return Outcome(kind=Kind.MEASURED, seconds=ended.seconds, measurement=measurement), reading


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Trials of a command that trains, or runs forward passes."""

    task: Task
    readings: dict[int, Analysis] = field(default_factory=dict)
    """What was read of each run."""

    def read(self, run: Run) -> Analysis:
        """Return what a run's traces say."""
        if run.number not in self.readings:
            self.readings[run.number] = read_capture(self.task.folder_of(run.number))
        return self.readings[run.number]

    def candidates(self, standing: Standing) -> Candidates:
        """Plan from the best run so far, else from the first."""
        first, source = standing.first, standing.source
        if first is None or source is None:
            return Candidates()
        problem: UsageError | None = None
        for run in (source, first):
            try:
                return self._plan(standing, run)
            except UsageError as error:
                problem = error
        raise TuneError(
            f"nothing can be planned from the first run: {problem}",
            hint="say what it runs: --now schedule=1f1b, --now split=4,4,4,4",
        ) from problem

    def _plan(self, standing: Standing, source: Run) -> Candidates:
        reading, setting = self.read(source), source.setting
        scope, template = self.task.scope, self.task.template
        barred = template.barred_levers
        if standing.held == "batch" and standing.keeps == "microbatch":
            barred |= {"microbatches"}  # a larger batch than was asked for is nothing to try
        # Unasked, a larger batch is weighed apart, as `plan` does.
        weighed_apart = standing.held == "batch" and scope.hold is None
        plan = reading.plan(
            Stated(
                layers=setting.split if reading.measurement.split is None else None,
                limit_bytes=scope.limit_bytes,
                schedule=setting.schedule,
            ),
            most_microbatches=scope.most_microbatches,
            hold=standing.keeps or (None if weighed_apart else standing.held),
            barred=barred,
        )
        ahead = 1 + standing.gain_of(setting)
        tries = []
        for option in (*plan.recommended, *plan.to_try):
            stages = stages_of(plan.baseline.what_if(option.change).order)
            candidate = template.after(setting, option.change, stages)
            if candidate is None or plan.changes_training(option):
                continue
            if standing.is_open(candidate):
                expected = Expectation(
                    gain=ahead * (1 + option.throughput_gain) - 1,
                    low=ahead * (1 + option.throughput_low) - 1,
                    high=ahead * (1 + option.throughput_high) - 1,
                    batch_latency_s=option.window_ns / NS_PER_S,
                    prediction=predict_option(plan, option, str(candidate)),
                )
                tries.append(Candidate(setting=candidate, expected=expected))
        larger = next(filter(plan.changes_training, plan.recommended), None)
        return Candidates(tries=tuple(tries), refused=plan.refused, larger=larger)

    def run(self, run: Run, standing: Standing, limits: Limits) -> Outcome:
        """Run the command once, and turn away a run that is not what was asked for.

        It ignored its setting, took more memory than there is, or trained with a larger batch
        where that was to be held. Of others it is said if they came as predicted.
        """
        outcome, reading = run_job(self.task, run, self.task.folder_of(run.number), limits)
        measured = outcome.measurement
        if reading is None or measured is None:
            return outcome
        self.readings[run.number] = reading
        before = measurement_of(standing.first)
        if before is not None:
            ignored = {
                knob: f"{knob} {run.setting.written(knob)} was asked for, and {came}"
                for knob in run.setting.differing(standing.now)
                if (came := ran_instead(run.setting, knob, before, measured))
            }
            if ignored:
                message = "; ".join(ignored.values())
                return replace(outcome, kind=Kind.IGNORED, message=message, ignored=tuple(ignored))
        over = over_memory(measured, before, self.task.scope.limit_bytes)
        if over:
            return replace(outcome, kind=Kind.OVER_MEMORY, message=over)
        growth = None if before is None else growth_of(before, measured)
        if standing.held == "batch" and growth is not None and growth > 1 + NEARLY:
            message = f"its batch is {show_times(growth)} as large, which changes training"
            return replace(outcome, kind=Kind.OTHER_BATCH, message=message)
        if run.expected is None or run.expected.prediction is None:
            return outcome
        check = check_prediction(run.expected.prediction, before, measured)
        return replace(outcome, message=check.sentence)

    def refuse(self, first: Run) -> None:
        """Refuse to go on from a first run that tells nothing."""
        outcome, measured = first.outcome, first.outcome.measurement
        if outcome.kind is Kind.CUT:
            raise TuneError(
                f"the budget is too small for one run: {outcome.message}",
                hint="give --minutes more, or make the command run fewer steps",
            )
        if measured is None:
            log = self.task.folder_of(first.number) / LOG
            raise TuneError(
                f"the unchanged command cannot be measured: {outcome.message}",
                hint=f"its output is in {log}; mend it and type the same again",
            )
        for knob in ("microbatches", "split"):
            if came := ran_instead(first.setting, knob, None, measured):
                raise TuneError(
                    f"the command was told {knob} {first.setting.written(knob)}, and {came}: "
                    f"it ignores {{{knob}}}",
                    hint=f"let it use {{{knob}}}, or say --now {knob}=… as it is",
                )
        if self.task.scope.limit_bytes is not None and any(
            rank.peak_bytes is None for rank in measured.memory
        ):
            raise TuneError(
                "memory was not recorded, so no limit can be held",
                hint="leave --memory-limit out, or let the capture record memory",
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


def ran_instead(
    setting: Setting, knob: str, before: Measurement | None, measured: Measurement
) -> str:
    """Say what ran in place of a knob's value, as far as traces tell; empty where that ran.

    A split with another sum is no other split: there layers were counted otherwise.
    """
    asked, came = getattr(setting, knob), getattr(measured, knob, None)
    if asked is None or came is None:
        return ""
    recounted = isinstance(asked, tuple) and isinstance(came, tuple) and sum(asked) != sum(came)
    if knob in {"microbatches", "split"} and came != asked and not recounted:
        return f"{Setting(**{knob: came}).written(knob)} ran"
    return f"the measured {knob} did not change" if came == getattr(before, knob, None) else ""


def over_memory(measured: Measurement, first: Measurement | None, limit_bytes: int | None) -> str:
    """Say which rank took more than is safe, by the rule of `compare`; nothing where all fit."""
    compared = compare(first or measured, measured, limit_bytes=limit_bytes)
    for rank in compared.memory:
        left = rank.headroom_bytes
        if rank.unsafe and left is not None and rank.after_bytes is not None:
            how = f"{show_bytes(-left)} more than its limit"
            if left >= 0:
                how = f"which leaves {show_bytes(left)}: too little to be safe"
            return f"rank {rank.rank} took {show_bytes(rank.after_bytes)}, {how}"
    return ""
