"""What is to be tuned, and what that may take."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from debubble.annexes.tune.setting import Template
from debubble.errors import UsageError
from debubble.plan.change import Hold


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """Where a server answers, what puts it under a load, and which engine it is."""

    url: str
    load: tuple[str, ...]
    """Words of the load's command: {url} is the address, {out} a folder for its result."""
    kind: str | None = None
    """vllm or sglang, by which it is captured; None where it is not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What the user allows; time counts while runs run, over all resumptions."""

    runs: int
    seconds: float | None = None

    def __post_init__(self) -> None:
        if self.runs < 1:
            raise UsageError("the budget is too small for one run", hint="give --runs 1 or more")
        if self.seconds is not None and not self.seconds > 0:
            raise UsageError("the budget is too small for one run", hint="give --minutes more")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How long one run may take; None is no limit."""

    hangs_s: float | None = None
    """Beyond this it hangs."""
    budget_s: float | None = None
    """Beyond this the budget is spent, whatever it does."""

    @property
    def timeout_s(self) -> float | None:
        """The shorter of the two."""
        known = [limit for limit in (self.hangs_s, self.budget_s) if limit is not None]
        return min(known, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """What may be tried."""

    most_microbatches: int | None = None
    hold: Hold | None = None
    """What was said to be kept where microbatches change; None: the batch of a run that trains."""
    limit_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A command or a server, how its runs are captured, and the limits of what is tried."""

    template: Template
    server: Server | None = None
    steps: int
    wait: int
    folder: Path
    budget: Budget
    scope: Scope = field(default_factory=Scope)

    def folder_of(self, number: int) -> Path:
        """Return where a run leaves its traces and its output."""
        return self.folder / f"run{number:03}"
