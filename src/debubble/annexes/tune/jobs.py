"""A command that runs to its end in → its runs, judged, and what may be tried next."""

from __future__ import annotations

from dataclasses import dataclass, field

from debubble.analysis import Analysis
from debubble.annexes.tune.journal import Run
from debubble.annexes.tune.loop import Budget, Next
from debubble.annexes.tune.prospects import Prospects, Scope, Standing, look_ahead
from debubble.annexes.tune.setting import Setting
from debubble.annexes.tune.trial import (
    LOG,
    Bench,
    First,
    Kind,
    Outcome,
    contradicts,
    judge,
    read_capture,
    run_trial,
)
from debubble.errors import TuneError, UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class JobTrials:
    """Trials of a command that trains, or runs forward passes."""

    bench: Bench
    scope: Scope
    readings: dict[int, Analysis] = field(default_factory=dict)
    """What was read of each run."""

    def read(self, run: Run) -> Analysis:
        """Return what a run's traces say."""
        if run.number not in self.readings:
            self.readings[run.number] = read_capture(self.bench.folder_of(run.number))
        return self.readings[run.number]

    def look(self, standing: Standing) -> Prospects:
        """Plan from the best run so far."""
        first = standing.first
        if first is None:
            return Prospects(tries=(), untellable=(), refused=())
        source = standing.source or first
        try:
            return look_ahead(standing, source, self.read(source), self.scope)
        except UsageError as error:
            if source is first:
                raise TuneError(
                    f"nothing can be planned from the first run: {error}",
                    hint="say what it runs: --now schedule=1f1b, --now split=4,4,4,4",
                ) from error
            return look_ahead(standing, first, self.read(first), self.scope)

    def run(
        self, chosen: Next, standing: Standing, budget: Budget, *, number: int, token: str
    ) -> Outcome:
        """Run the command once, and judge what it left."""
        first = standing.first
        outcome, reading = run_trial(
            self.bench,
            chosen.setting,
            out=self.bench.folder_of(number),
            token=token,
            timeout_s=budget.timeout_for(standing.runs),
            cut_s=budget.seconds_left(standing.runs),
        )
        against = None
        if first is not None:
            against = First(setting=first.setting, reading=self.read(first))
        if reading is not None:
            self.readings[number] = reading
        return judge(
            outcome,
            chosen.setting,
            reading,
            first=against,
            limit_bytes=self.scope.limit_bytes,
            hold=self.scope.hold_of(standing),
            prediction=chosen.expected.prediction if chosen.expected else None,
        )

    def refuse(self, first: Run) -> None:
        """Refuse to go on from a first run that tells nothing."""
        outcome = first.outcome
        log = self.bench.folder_of(first.number) / LOG
        if outcome.kind is Kind.CUT:
            raise TuneError(
                f"the budget is too small for one run: {outcome.message}",
                hint="give --minutes more, or make the command run fewer steps",
            )
        if outcome.measurement is None:
            raise TuneError(
                f"the unchanged command cannot be measured: {outcome.message}",
                hint=f"its output is in {log}; mend it and type the same again",
            )
        for knob in ("microbatches", "split"):
            if contradicts(first.setting, knob, outcome.measurement):
                came = getattr(outcome.measurement, knob)
                raise TuneError(
                    f"the command was told {knob} {first.setting.written(knob)} and ran "
                    f"{Setting(**{knob: came}).written(knob)}: it ignores {{{knob}}}",
                    hint=f"let it use {{{knob}}}, or say --now {knob}=… as it is",
                )
        if self.scope.limit_bytes is not None and any(
            rank.peak_bytes is None for rank in outcome.measurement.memory
        ):
            raise TuneError(
                "memory was not recorded, so no limit can be held",
                hint="leave --memory-limit out, or let the capture record memory",
            )
