"""The runs so far in → the next one out, or why there is none.

First the setting as it is. Then, as long as something is foretold to gain beyond the noise, the
most promising one, each time with costs fitted anew; after every third the first setting again.
At last the winner and the first setting in turn, the latter at the end: runs of it stand before and
after all others, so that a machine that gets slower or faster fools nobody. The same runs give the
same decision: whoever is killed goes on as if nothing had been.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from debubble.tune.budget import Budget
from debubble.tune.journal import Expected
from debubble.tune.prospects import Prospects
from debubble.tune.setting import Setting
from debubble.tune.standing import Standing

# Runs of the winner and of the first setting: two each show what differs from run to run; a third,
# where two leave it open.
_CONFIRMED, _AT_MOST = 2, 3
# So many tries without a run of the first setting between them, and drift goes unseen.
_TRIES_IN_A_ROW = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Next:
    """What to run."""

    setting: Setting
    why: str
    expected: Expected | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """Why nothing more is run."""

    why: str
    spent: bool = False
    """Whether only the budget ended it."""


def decide(standing: Standing, budget: Budget, look: Callable[[], Prospects]) -> Next | Stop:
    """Choose the next run; `look` is asked only where the answer depends on it."""
    if standing.first is None:
        return Next(setting=standing.now, why="as it is")
    if not budget.has_room(standing.runs):
        return Stop(why="the budget is spent", spent=True)
    left = budget.runs_left(standing.runs)
    duel = _duel(standing, standing.best)
    if left > len(duel):
        found = next((one for one in look().tries if one.worth), None)
        if found is not None:
            if _unwatched(standing) >= _TRIES_IN_A_ROW and left > 1:
                return Next(setting=standing.now, why="drift")
            return Next(setting=found.setting, why="try", expected=found.expected)
    if not duel:
        return Stop(why="nothing more is foretold to gain beyond the noise")
    return Next(setting=duel[-left:][0], why="confirm")


def _duel(standing: Standing, best: Setting | None) -> list[Setting]:
    """Return the runs that are still owed to the winner and to the setting as it is, in turn.

    That setting comes last: what lies between its runs is rid of drift, what lies after is not.
    """
    if best is None or best == standing.now:
        return []
    counts = {one: len(standing.of(one)) for one in (standing.now, best)}
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


def _unwatched(standing: Standing) -> int:
    """Count the runs since the last one of the first setting."""
    count = 0
    for run in reversed(standing.runs):
        if run.setting == standing.now:
            break
        count += 1
    return count
