"""A task in → all its runs made, each in the journal: a command's, or a server's under a load.

First the setting as it is. Then, as long as something is predicted to gain beyond the noise, the
most promising one, each time with costs fitted anew. At last the winner and the first setting in
turn, the latter at the end, so that a machine that gets slower or faster fools nobody. The same
runs give the same decision: whoever is killed goes on as if nothing had been.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Protocol

from debubble.annexes.tune.job import Job
from debubble.annexes.tune.journal import NAME, Journal, Kind, Outcome, Run
from debubble.annexes.tune.process import end_marked
from debubble.annexes.tune.server import Service
from debubble.annexes.tune.setting import Setting
from debubble.annexes.tune.standing import Candidate, Candidates, Standing
from debubble.annexes.tune.task import Budget, Limits, Task
from debubble.measure.compare import Verdict

# A run that takes this many times as long as the longest good one, and a minute, hangs: starting
# up on a busy machine may take long, but not so long.
_HANGS_AFTER, _GRACE_S = 3.0, 60.0
# Runs of the winner and of the first setting: two each show what differs from run to run.
_CONFIRMED = 2


class Trials(Protocol):
    """One kind of trial: a command that is run to its end, or a server that is put under a load."""

    def run(self, run: Run, standing: Standing, limits: Limits) -> Outcome:
        """Run a setting once; nothing of it is left when this returns."""

    def candidates(self, standing: Standing) -> Candidates:
        """Plan from the best run so far."""

    def refuse(self, first: Run) -> None:
        """Refuse to go on from a first run that tells nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Next:
    """What to run."""

    candidate: Candidate
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """Why nothing more is run."""

    why: str
    spent: bool = False
    """Whether only the budget ended it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """What came of it all."""

    standing: Standing
    candidates: Candidates
    """What the last plan held."""
    stop: Stop

    @property
    def winner(self) -> Setting | None:
        """The best setting, where it is surely better, or where the first does not fit memory."""
        best = self.standing.best
        if best is None or best == self.standing.now:
            return None
        compared = self.standing.compared(best)
        return best if compared is None or compared.verdict is Verdict.BETTER else None

    @property
    def command(self) -> tuple[str, ...]:
        """The command to run from now on."""
        return self.standing.task.template.fill(self.winner or self.standing.now)


def tune(
    task: Task, *, on_start: Callable[[Next, int], None], on_end: Callable[[Run], None]
) -> Tuning:
    """Run until nothing more can be gained, or the budget is spent."""
    trials = _trials_of(task)
    with closing(Journal(task)) as journal:
        for run in journal.known.values():
            if run.outcome.kind is Kind.UNFINISHED:  # it may still run
                end_marked(run.token)
        while True:
            standing = Standing(task=task, runs=journal.ended)
            plan = cache(partial(trials.candidates, standing))
            chosen = decide(standing, plan)
            if isinstance(chosen, Stop):
                return Tuning(standing=standing, candidates=plan(), stop=chosen)
            on_start(chosen, len(standing.runs) + 1)
            run = Run(
                number=max(journal.known, default=0) + 1,
                token=secrets.token_hex(8),
                setting=chosen.candidate.setting,
                why=chosen.why,
                expected=chosen.candidate.expected,
            )
            journal.write(run)
            limits = Limits(
                hangs_s=_hangs_s(standing.runs),
                budget_s=_seconds_left(task.budget, standing.runs),
            )
            outcome = trials.run(run, standing, limits)
            run = replace(run, outcome=outcome)
            journal.write(run)
            on_end(run)
            if standing.first is None:
                trials.refuse(run)


def look_ahead(task: Task) -> Candidates | None:
    """Plan from what has been run, and run nothing; None where nothing has."""
    if not (task.folder / NAME).exists():
        return None
    with closing(Journal(task)) as journal:
        standing = Standing(task=task, runs=journal.ended)
    return None if standing.first is None else _trials_of(task).candidates(standing)


def _trials_of(task: Task) -> Trials:
    return Job(task=task) if task.server is None else Service(task=task, server=task.server)


def decide(standing: Standing, plan: Callable[[], Candidates]) -> Next | Stop:
    """Choose the next run; `plan` is asked only where the answer depends on it."""
    now, best, budget = standing.now, standing.best, standing.task.budget
    if standing.first is None:
        return Next(candidate=Candidate(setting=now, expected=None), why="unchanged")
    runs_left = budget.runs - len(standing.runs)
    seconds_left = _seconds_left(budget, standing.runs)
    if runs_left <= 0 or (seconds_left is not None and seconds_left <= _longest_s(standing.runs)):
        return Stop(why="the budget is spent", spent=True)
    # The setting as it is comes last. One that does not fit memory is no match for the winner.
    owed = []
    if best is not None and best != now and standing.of(now):
        counts = {setting: len(standing.of(setting)) for setting in (best, now)}
        owed = [setting for setting in (best, now) if counts[setting] < _CONFIRMED]
    if runs_left > len(owed):
        tries = plan().tries
        if tries:
            return Next(candidate=tries[0], why="try")
    if not owed:
        return Stop(why="nothing more is predicted to gain beyond the noise")
    setting = owed[-runs_left:][0]
    return Next(candidate=Candidate(setting=setting, expected=None), why="confirm")


def _seconds_left(budget: Budget, runs: Sequence[Run]) -> float | None:
    """Return how long runs may still take; None where that is not limited."""
    if budget.seconds is None:
        return None
    return max(0.0, budget.seconds - sum(run.outcome.seconds for run in runs))


def _longest_s(runs: Sequence[Run]) -> float:
    """Return what the longest good run took; 0 where none was good."""
    good = [run.outcome.seconds for run in runs if run.outcome.kind is Kind.MEASURED]
    return max(good, default=0.0)


def _hangs_s(runs: Sequence[Run]) -> float | None:
    """Return when a run hangs; None before a good one has shown how long they take."""
    longest_s = _longest_s(runs)
    return _HANGS_AFTER * longest_s + _GRACE_S if longest_s else None
