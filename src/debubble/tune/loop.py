"""A bench and a budget in → all runs made, each in the journal and the history."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from debubble.analysis import Analysis
from debubble.errors import TuneError, UsageError
from debubble.measure.comparison import Verdict
from debubble.tune.decide import Budget, Next, Stop, decide
from debubble.tune.journal import Journal, Run, RunStart
from debubble.tune.prospects import Prospects, Scope, look_ahead
from debubble.tune.setting import Setting
from debubble.tune.standing import Standing
from debubble.tune.trial import (
    LOG,
    Bench,
    First,
    Kind,
    Outcome,
    contradicts,
    end_marked,
    judge,
    read_capture,
    run_trial,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """What came of it all."""

    bench: Bench
    standing: Standing
    prospects: Prospects
    """What the last plan held."""
    stop: Stop
    scope: Scope

    @property
    def winner(self) -> Setting | None:
        """The best setting, where it is surely better, or where the first does not fit memory."""
        best, now = self.standing.best, self.standing.now
        if best is None or best == now:
            return None
        found = self.standing.compared(best)
        return best if found is None or found.verdict is Verdict.BETTER else None

    @property
    def command(self) -> tuple[str, ...]:
        """The command to run from now on."""
        return self.bench.template.fill(self.winner or self.standing.now)


@dataclass(slots=True, kw_only=True)
class Loop:
    """One tuning under way."""

    bench: Bench
    journal: Journal
    budget: Budget
    scope: Scope
    on_start: Callable[[Next, int], None]
    """Told of each run before it starts, with how many are over."""
    on_end: Callable[[Run], None]
    clock: Callable[[], float] = time.time
    _readings: dict[int, Analysis] = field(default_factory=dict)
    _looks: dict[int, Prospects] = field(default_factory=dict)

    def run(self) -> Tuning:
        """Run until nothing more can be gained, or the budget is spent."""
        for start in self.journal.unfinished:  # of a tuning that was killed: it may still run
            end_marked(start.token)
            self.journal.drop(start.number)
        while True:
            chosen = decide(self.standing, self.budget, self.look)
            if isinstance(chosen, Next):
                self._run(chosen)
                continue
            return Tuning(
                bench=self.bench,
                standing=self.standing,
                prospects=self.look(),
                stop=chosen,
                scope=self.scope,
            )

    @property
    def standing(self) -> Standing:
        """How all settings stand."""
        return Standing(
            now=self.bench.template.now,
            runs=self.journal.runs,
            limit_bytes=self.scope.limit_bytes,
        )

    def look(self) -> Prospects:
        """Plan from the best run so far; once for each number of runs."""
        done = len(self.journal.runs)
        if done not in self._looks:
            self._looks[done] = self._look()
        return self._looks[done]

    def _look(self) -> Prospects:
        standing = self.standing
        first = standing.first
        if first is None:
            return Prospects(tries=(), untellable=(), refused=())
        best = standing.best
        source = standing.of(best)[-1] if best is not None else first
        # A run of another setting beside it tells more: the first, else the last one.
        others = [run for run in (*standing.measured, first) if run.setting != source.setting]
        try:
            beside = self._read(others[-1]) if others else None
            return look_ahead(standing, source, self._read(source), beside, self.scope)
        except UsageError as error:
            if source is first:
                raise TuneError(
                    f"nothing can be planned from the first run: {error}",
                    hint="say what it runs: --now schedule=1f1b, --now split=4,4,4,4",
                ) from error
            return look_ahead(standing, first, self._read(first), None, self.scope)

    def _read(self, run: Run) -> Analysis:
        if run.number not in self._readings:
            self._readings[run.number] = read_capture(self.bench.folder_of(run.number))
        return self._readings[run.number]

    def _run(self, chosen: Next) -> None:
        number, first = self.journal.next_number, self.standing.first
        token = secrets.token_hex(8)
        self.on_start(chosen, len(self.journal.runs))
        self.journal.begin(
            RunStart(
                number=number,
                token=token,
                setting=chosen.setting,
                why=chosen.why,
                began_s=self.clock(),
                expected=chosen.expected,
            )
        )
        outcome, reading = self._try(chosen, number, token)
        if reading is not None:
            self._readings[number] = reading
        run = self.journal.end(number, outcome)
        self.on_end(run)
        if first is None:
            self._check_first(run)

    def _try(self, chosen: Next, number: int, token: str) -> tuple[Outcome, Analysis | None]:
        """Run the command once, and judge what it left."""
        standing = self.standing
        first = standing.first
        outcome, reading = run_trial(
            self.bench,
            chosen.setting,
            out=self.bench.folder_of(number),
            token=token,
            timeout_s=self.budget.timeout_for(standing.runs),
            cut_s=self.budget.seconds_left(standing.runs),
        )
        against = None
        if first is not None:
            against = First(setting=first.setting, reading=self._read(first))
        outcome = judge(
            outcome, chosen.setting, reading, first=against, limit_bytes=self.scope.limit_bytes
        )
        return outcome, reading

    def _check_first(self, run: Run) -> None:
        """Refuse to go on from a first run that tells nothing."""
        outcome = run.outcome
        log = self.bench.folder_of(run.number) / LOG
        if outcome.kind is Kind.CUT:
            raise TuneError(
                f"the budget is too small for one run: {outcome.message}",
                hint="give --minutes more, or make the command run fewer steps",
            )
        if outcome.measurement is None:
            raise TuneError(
                f"the command as it is cannot be measured: {outcome.message}",
                hint=f"its output is in {log}; mend it and type the same again",
            )
        for knob in ("microbatches", "split"):
            if contradicts(run.setting, knob, outcome.measurement):
                came = getattr(outcome.measurement, knob)
                raise TuneError(
                    f"the command was told {knob} {run.setting.written(knob)} and ran "
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
