"""How much may be spent, and what is left of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from debubble.errors import UsageError
from debubble.tune.journal import Run
from debubble.tune.trial import Kind

# A run that takes this many times as long as the longest good one, and a minute, hangs: starting
# up on a busy machine may take long, but not so long.
_HANGS_AFTER, _GRACE_S = 3.0, 60.0


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
        longest = _longest(runs)
        in_time = left is None or (left > 0 and left >= (longest or 0.0))
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
