"""A kind of trial and a budget in → all runs made, each in the journal and the history.

First the setting as it is. Then, as long as something is predicted to gain beyond the noise, the
most promising one, each time with costs fitted anew; after every third the first setting again.
At last the winner and the first setting in turn, the latter at the end: runs of it stand before and
after all others, so that a machine that gets slower or faster fools nobody. The same runs give the
same decision: whoever is killed goes on as if nothing had been.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from debubble.annexes.tune.journal import Expectation, Journal, Run, RunStart
from debubble.annexes.tune.prospects import Prospects, Scope, Standing
from debubble.annexes.tune.setting import Setting
from debubble.annexes.tune.trial import Bench, Kind, Outcome, end_marked
from debubble.errors import UsageError
from debubble.measure.compare import Verdict

# A run that takes this many times as long as the longest good one, and a minute, hangs: starting
# up on a busy machine may take long, but not so long.
_HANGS_AFTER, _GRACE_S = 3.0, 60.0
# Runs of the winner and of the first setting: two each show what differs from run to run; a third,
# where two leave it open.
_CONFIRMED, _AT_MOST = 2, 3
# So many tries without a run of the first setting between them, and drift goes unseen.
_TRIES_IN_A_ROW = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What the user allows; time counts while runs run, over all resumptions."""

    runs: int
    seconds: float | None
    timeout_s: float | None

    def __post_init__(self) -> None:
        if self.runs < 1:
            raise UsageError("the budget is too small for one run", hint="give --runs 1 or more")
        for name, value in (("--minutes", self.seconds), ("--timeout", self.timeout_s)):
            if value is not None and not value > 0:
                raise UsageError("the budget is too small for one run", hint=f"give {name} more")

    def runs_left(self, runs: Sequence[Run]) -> int:
        """Return how many runs may still be made."""
        return max(0, self.runs - len(runs))

    def seconds_left(self, runs: Sequence[Run]) -> float | None:
        """Return how long runs may still take; None where that is not limited."""
        if self.seconds is None:
            return None
        return max(0.0, self.seconds - sum(run.outcome.seconds for run in runs))

    def has_room(self, runs: Sequence[Run]) -> bool:
        """Tell whether another run can be made to its end."""
        left = self.seconds_left(runs)
        in_time = left is None or (left > 0 and left >= (_longest(runs) or 0.0))
        return self.runs_left(runs) > 0 and in_time

    def timeout_for(self, runs: Sequence[Run]) -> float | None:
        """Return when a run hangs."""
        longest = _longest(runs)
        if self.timeout_s is not None or longest is None:
            return self.timeout_s
        return _HANGS_AFTER * longest + _GRACE_S


def _longest(runs: Sequence[Run]) -> float | None:
    good = [run.outcome.seconds for run in runs if run.outcome.kind is Kind.MEASURED]
    return max(good, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Next:
    """What to run."""

    setting: Setting
    why: str
    expected: Expectation | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """Why nothing more is run."""

    why: str
    spent: bool = False
    """Whether only the budget ended it."""


def decide(  # noqa: PLR0911 (one answer each)
    standing: Standing, budget: Budget, look: Callable[[], Prospects]
) -> Next | Stop:
    """Choose the next run; `look` is asked only where the answer depends on it.

    What came slower than predicted on a busy machine is run once more.
    """
    if standing.first is None:
        return Next(setting=standing.now, why="unchanged")
    if not budget.has_room(standing.runs):
        return Stop(why="the budget is spent", spent=True)
    left = budget.runs_left(standing.runs)
    last_run = standing.runs[-1]
    if last_run.outcome.disturbed and len(standing.of(last_run.setting)) == 1:
        return Next(
            setting=last_run.setting,
            why="again: the machine was busy",
            expected=last_run.expected,
        )
    duel = _duel(standing, standing.best)
    if left > len(duel):
        prospect = next((prospect for prospect in look().tries if prospect.worth), None)
        if prospect is not None:
            last = [run.setting for run in standing.runs[-_TRIES_IN_A_ROW:]]
            if len(last) == _TRIES_IN_A_ROW and standing.now not in last and left > 1:
                return Next(setting=standing.now, why="drift")
            return Next(setting=prospect.setting, why="try", expected=prospect.expected)
    if not duel:
        return Stop(why="nothing more is predicted to gain beyond the noise")
    return Next(setting=duel[-left:][0], why="confirm")


def _duel(standing: Standing, best: Setting | None) -> list[Setting]:
    """Return the runs that are still owed to the winner and to the setting as it is, in turn.

    That setting comes last: what lies between its runs is rid of drift, what lies after is not.
    """
    if best is None or best == standing.now:
        return []
    counts = {setting: len(standing.of(setting)) for setting in (standing.now, best)}
    # A first setting that does not fit memory is no match: nothing is to be confirmed against it.
    if not counts[standing.now]:
        return []
    wanted = _CONFIRMED
    if min(counts.values()) >= _CONFIRMED and not standing.is_clear(best):
        wanted = _AT_MOST
    owed: list[Setting] = []  # from the last one to the first
    mine, other = standing.now, best
    while min(counts.values()) < wanted:
        if counts[mine] < wanted:
            owed.append(mine)
            counts[mine] += 1
        mine, other = other, mine
    return owed[::-1]


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


class Trials(Protocol):
    """One kind of trial: a command that is run to its end, or a server that is put under a load."""

    @property
    def bench(self) -> Bench:
        """How runs are made."""

    def run(
        self, chosen: Next, standing: Standing, budget: Budget, *, number: int, token: str
    ) -> Outcome:
        """Run a setting once; nothing of it is left when this returns."""

    def look(self, standing: Standing) -> Prospects:
        """Plan from the best run so far."""

    def refuse(self, first: Run) -> None:
        """Refuse to go on from a first run that tells nothing."""


@dataclass(slots=True, kw_only=True)
class Loop:
    """One tuning under way."""

    trials: Trials
    journal: Journal
    budget: Budget
    scope: Scope
    on_start: Callable[[Next, int], None]
    """Told of each run before it starts, with how many are over."""
    on_end: Callable[[Run], None]
    clock: Callable[[], float] = time.time
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
                bench=self.trials.bench,
                standing=self.standing,
                prospects=self.look(),
                stop=chosen,
                scope=self.scope,
            )

    @property
    def standing(self) -> Standing:
        """How all settings stand."""
        return Standing(
            now=self.trials.bench.template.now,
            runs=self.journal.runs,
            limit_bytes=self.scope.limit_bytes,
        )

    def look(self) -> Prospects:
        """Plan from the best run so far; once for each number of runs."""
        done = len(self.journal.runs)
        if done not in self._looks:
            self._looks[done] = self.trials.look(self.standing)
        return self._looks[done]

    def _run(self, chosen: Next) -> None:
        standing, number, token = self.standing, self.journal.next_number, secrets.token_hex(8)
        self.on_start(chosen, len(standing.runs))
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
        outcome = self.trials.run(chosen, standing, self.budget, number=number, token=token)
        run = self.journal.end(number, outcome)
        self.on_end(run)
        if standing.first is None:
            self.trials.refuse(run)
