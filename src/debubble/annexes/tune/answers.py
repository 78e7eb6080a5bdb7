"""A `Tuning` in → what `debubble tune` answers: the winner, every run, and why it stopped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from debubble.annexes.tune.journal import LOG, Expectation, Run
from debubble.annexes.tune.loop import Tuning
from debubble.annexes.tune.setting import Setting
from debubble.annexes.tune.standing import Candidate
from debubble.annexes.tune.task import Task
from debubble.report.answers.base import Answer, AnswerWarning, Part
from debubble.report.answers.change import ChangePart, IntervalPart
from debubble.report.answers.compare import SidePart, answer_side
from debubble.units import NS_PER_S, counted, show_duration, show_gain

SCHEMA = "debubble.tune/1"


class ExpectedPart(Part, frozen=True, kw_only=True):
    """What was predicted of a run."""

    throughput_gain_fraction: Annotated[float, "gain"]
    interval: IntervalPart
    batch_latency_s: float
    basis: Annotated[str | None, "prediction.basis"]
    """Of the batch latency; null of a server."""


class RunPart(Part, frozen=True, kw_only=True):
    """One run of the command, and what came of it."""

    run: Annotated[int, "number"]
    setting: Setting
    why: str
    outcome: str
    message: Annotated[str | None, "outcome.message"]
    seconds: Annotated[float, "outcome.seconds"]
    measured: SidePart | None
    throughput_gain_fraction: float | None
    expected: ExpectedPart | None
    traces: str
    output: str


class RefusedOption(Part, frozen=True, kw_only=True):
    """An option that could not be tried."""

    lever: str
    change: ChangePart
    reason: str


class TuneAnswer(Answer, frozen=True, kw_only=True):
    """What `debubble tune` says."""

    schema: str = SCHEMA
    basis: str
    """Of all runs: profiled or unprofiled."""
    command: list[str]
    now: Setting
    winner: Setting | None
    winner_command: list[str]
    throughput_gain_fraction: float | None
    expected: ExpectedPart | None
    verdict: str | None
    confidence: str | None
    runs: list[RunPart]
    refused: list[RefusedOption]
    stopped: str
    budget_spent: bool
    records: str
    sentence: str
    warnings: list[AnswerWarning]


class TryPart(Part, frozen=True, kw_only=True):
    """A setting that would be tried."""

    setting: Setting
    command: list[str]
    expected: ExpectedPart | None


class DryRunAnswer(Answer, frozen=True, kw_only=True):
    """What `debubble tune --dry-run` says."""

    schema: str = SCHEMA
    dry_run: bool = True
    first: list[str]
    tries: list[TryPart]
    warnings: list[AnswerWarning]


def answer_tune(tuned: Tuning) -> TuneAnswer:
    """Say which setting won, and what came of every run."""
    standing, winner = tuned.standing, tuned.winner
    compared = None if standing.best is None else standing.compared(standing.best)
    return TuneAnswer(
        basis=standing.basis,
        command=list(standing.task.template.words),
        now=standing.now,
        winner=winner,
        winner_command=list(tuned.command),
        throughput_gain_fraction=None if winner is None else standing.gain_of(winner),
        expected=None if winner is None else _expected_part(last_expected(tuned, winner)),
        verdict=None if compared is None else compared.verdict.value,
        confidence=None if compared is None else compared.confidence.value,
        runs=[_run_part(tuned, run) for run in standing.runs],
        refused=[RefusedOption.of(option) for option in tuned.candidates.refused],
        stopped=tuned.stop.why,
        budget_spent=tuned.stop.spent,
        records=str(standing.task.folder),
        sentence=say_tuning(tuned),
        warnings=[],
    )


def answer_dry_run(task: Task, tries: Sequence[Candidate]) -> DryRunAnswer:
    """Say what would be run."""
    fill = task.template.fill
    return DryRunAnswer(
        first=list(fill(task.template.now)),
        tries=[
            TryPart(
                setting=candidate.setting,
                command=list(fill(candidate.setting)),
                expected=_expected_part(candidate.expected),
            )
            for candidate in tries
        ],
        warnings=[],
    )


def say_tuning(tuned: Tuning) -> str:
    """Say what came of it in a sentence."""
    standing, winner = tuned.standing, tuned.winner
    seconds = sum(run.outcome.seconds for run in standing.runs)
    spent = f"{counted(len(standing.runs), 'run')} in {show_duration(seconds * NS_PER_S)}"
    if winner is not None:
        words = f"{str(winner)[:1].upper()}{str(winner)[1:]}"
        predicted = last_expected(tuned, winner)
        told = f" (predicted {show_gain(predicted.gain)})" if predicted else ""
        if not standing.of(standing.now):
            return f"{words}: the best that fits memory; {spent}."
        gain = show_gain(standing.gain_of(winner))
        larger = ", with a larger batch" if any(map(standing.grew, standing.of(winner))) else ""
        return f"{words}: {gain} throughput{told}{larger}; {spent}."
    if standing.best is None:
        return f"No setting that was tried fits memory; {spent}."
    tried = {run.setting for run in standing.runs} - {standing.now}
    if tuned.stop.spent and not tried:
        return f"Nothing was tried: the budget is spent; {spent}."
    if not tried:
        return f"No option is predicted to gain more than the noise: keep {standing.now}; {spent}."
    return f"No setting is clearly better: keep {standing.now}; {spent}."


def last_expected(tuned: Tuning, setting: Setting) -> Expectation | None:
    """Return what was last predicted of a setting."""
    expected = [run.expected for run in tuned.standing.of(setting) if run.expected is not None]
    return expected[-1] if expected else None


def _expected_part(expected: Expectation | None) -> ExpectedPart | None:
    if expected is None:
        return None
    kept = expected.prediction
    return ExpectedPart.of(
        expected,
        interval=IntervalPart(
            throughput_gain_fraction=[expected.low, expected.high],
            batch_latency_s=None if kept is None else [kept.low_s, kept.high_s],
        ),
    )


def _run_part(tuned: Tuning, run: Run) -> RunPart:
    measured = run.outcome.measurement
    folder = tuned.standing.task.folder_of(run.number)
    return RunPart.of(
        run,
        outcome=run.outcome.kind.value,
        measured=None if measured is None else answer_side(measured, tuned.standing.basis),
        throughput_gain_fraction=None if measured is None else tuned.standing.gain_of_run(run),
        expected=_expected_part(run.expected),
        traces=str(folder),
        output=str(folder / LOG),
    )
