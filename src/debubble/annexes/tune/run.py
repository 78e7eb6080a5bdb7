"""A command or a server, and what may be spent, in → a tuning: the door of this package."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from debubble.annexes.tune.jobs import JobTrials
from debubble.annexes.tune.journal import NAME, SCHEMA, Heading, Journal, Run, begin_anew, remember
from debubble.annexes.tune.loop import Budget, Loop, Next, Trials, Tuning
from debubble.annexes.tune.once import Improvement, improve_once
from debubble.annexes.tune.prospects import Prospects, Scope
from debubble.annexes.tune.server import Server, ServerTrials
from debubble.annexes.tune.setting import (
    SERVING_KNOBS,
    TRAINING_KNOBS,
    Setting,
    Template,
    read_setting,
    read_template,
)
from debubble.annexes.tune.trial import Bench, clear_trial
from debubble.capture.settings import Settings

if TYPE_CHECKING:
    from debubble.measure.store import Store

__all__ = [
    "Bench",
    "Budget",
    "Improvement",
    "Next",
    "Prospects",
    "Run",
    "Scope",
    "Server",
    "Setting",
    "Template",
    "Tuning",
    "TuningRequest",
    "begin_anew",
    "clear_trial",
    "improve_once",
    "read_request",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningRequest:
    """What is to be tuned, and what that may take."""

    bench: Bench
    server: Server | None
    budget: Budget
    scope: Scope

    @property
    def heading(self) -> Heading:
        """Whose journal this is."""
        return Heading(
            schema=SCHEMA,
            words=self.bench.template.words,
            now=self.bench.template.now,
            steps=self.bench.steps,
            wait=self.bench.wait,
            server="" if self.server is None else str(self.server),
        )

    def tune(
        self,
        history: Store | None,
        name: str,
        *,
        on_start: Callable[[Next, int], None],
        on_end: Callable[[Run], None],
    ) -> Tuning:
        """Run the loop to its end, and keep each run in the history."""

        def end(run: Run) -> None:
            if history is not None:
                remember(history, name, run)
            on_end(run)

        with Journal(self.bench.folder, self.heading) as journal:
            if history is not None:
                for run in journal.runs:  # a tuning that was killed may not have come to it
                    remember(history, name, run)
            return self._loop(journal, on_start, end).run()

    def look_ahead(self) -> Prospects | None:
        """Plan from what has been run; None where nothing has."""
        if not (self.bench.folder / NAME).exists():
            return None
        with Journal(self.bench.folder, self.heading) as journal:
            loop = self._loop(journal, lambda _chosen, _done: None, lambda _run: None)
            return loop.look() if loop.standing.first is not None else None

    def _loop(
        self,
        journal: Journal,
        on_start: Callable[[Next, int], None],
        on_end: Callable[[Run], None],
    ) -> Loop:
        trials: Trials = JobTrials(bench=self.bench, scope=self.scope)
        if self.server is not None:
            trials = ServerTrials(bench=self.bench, scope=self.scope, server=self.server)
        return Loop(
            trials=trials,
            journal=journal,
            budget=self.budget,
            scope=self.scope,
            on_start=on_start,
            on_end=on_end,
        )


def read_request(  # noqa: PLR0913 (what was typed)
    words: Sequence[str],
    now: Sequence[str],
    *,
    server: Server | None,
    budget: Budget,
    scope: Scope,
    steps: int,
    wait: int,
    folder: Path,
) -> TuningRequest:
    """Check that every placeholder is known and has a value, and that a capture can be made."""
    knobs = TRAINING_KNOBS if server is None else SERVING_KNOBS
    template = read_template(words, read_setting(now), knobs)
    Settings(steps=steps, wait=wait)  # refuses what no capture can do
    bench = Bench(template=template, steps=steps, wait=wait, folder=folder)
    return TuningRequest(bench=bench, server=server, budget=budget, scope=scope)
