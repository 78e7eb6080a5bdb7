"""What was said of a tuning in → what may be spent on it, and what may be tried."""

from __future__ import annotations

from dataclasses import dataclass

import click

from debubble.cli.flags import gathered
from debubble.errors import UsageError
from debubble.measure.compare import DEFAULT_THRESHOLD
from debubble.plan.change import Hold
from debubble.schedules import SCHEDULES
from debubble.tune.decide import Budget
from debubble.tune.prospects import Scope
from debubble.units import parse_bytes, parse_duration, parse_share

# The setting as it is, three or four tries, and two runs more of the best and of the first.
_RUNS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetSaid:
    """What may be spent, as it was typed."""

    runs: int
    minutes: float | None
    timeout: str | None

    def read(self) -> Budget:
        """Return it in seconds."""
        return Budget(
            runs=self.runs,
            seconds=None if self.minutes is None else 60 * self.minutes,
            timeout_s=None if self.timeout is None else parse_duration(self.timeout) / 1e9,
        )


budget_options = gathered(
    "budget_said",
    BudgetSaid,
    click.option("--runs", type=int, default=_RUNS, show_default=True, help="Runs at most."),
    click.option("--minutes", type=float, help="Time that runs may take in all."),
    click.option("--timeout", metavar="TIME", help="When a run hangs; by the first run without."),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScopeSaid:
    """What may be tried, as it was typed."""

    schedules: str | None
    max_microbatches: int | None
    hold: Hold
    memory_limit: str | None
    threshold: str

    def read(self) -> Scope:
        """Return it in names, bytes and fractions."""
        return Scope(
            schedules=read_schedules(self.schedules),
            most_microbatches=self.max_microbatches,
            hold=self.hold,
            limit_bytes=None if self.memory_limit is None else parse_bytes(self.memory_limit),
            threshold=parse_share(self.threshold),
        )


scope_options = gathered(
    "scope_said",
    ScopeSaid,
    click.option("--schedules", metavar="NAME,...", help="Those that COMMAND knows; all without."),
    click.option(
        "--max-microbatches",
        type=click.IntRange(min=1),
        metavar="N",
        help="Try no more than these.",
    ),
    click.option(
        "--hold",
        type=click.Choice(["microbatch", "batch"]),
        default="microbatch",
        show_default=True,
        help="What COMMAND keeps when microbatches change; seen by itself after the first such "
        "run.",
    ),
    click.option("--memory-limit", metavar="SIZE", help="Of each rank, such as 80GiB."),
    click.option(
        "--threshold",
        metavar="SHARE",
        default=f"{DEFAULT_THRESHOLD:.0%}",
        show_default=True,
        help="The smallest gain that is worth a run.",
    ),
)


def read_schedules(text: str | None) -> frozenset[str]:
    """Read `1f1b,gpipe`."""
    names = frozenset(SCHEDULES) if text is None else frozenset(text.split(","))
    wrong = sorted(names - set(SCHEDULES))
    if wrong:
        raise UsageError(
            f"no schedule is called {wrong[0]!r}", hint=f"some of {', '.join(SCHEDULES)}"
        )
    return names
