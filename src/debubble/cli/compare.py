"""`debubble compare`: did it work? One verdict, and an exit code for CI."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from debubble.cli.gates import close_gate, refuse_doubted, refuse_to_judge
from debubble.cli.history import recall, recall_predictions
from debubble.cli.options import (
    Manners,
    Reader,
    Verb,
    finish,
    input_option,
    limit_option,
    memory_limit_option,
    output_options,
    pipeline_option,
    question_option,
    report_options,
    store_option,
    trace_options,
    write_html,
)
from debubble.errors import Gap, Touch, UsageError
from debubble.trace.source import is_url
from debubble.units import NS_PER_S, counted, parse_share

if TYPE_CHECKING:
    from debubble.analysis import Analysis
    from debubble.measure.compare import Comparison, Verdict
    from debubble.measure.measurement import Measurement
    from debubble.measure.prediction import Prediction
    from debubble.report.html.views import PipelineView


def parse_verdicts(text: str) -> frozenset[Verdict]:
    """Read `worse,unsafe_memory`."""
    from debubble.measure.compare import Verdict

    known = [verdict.value for verdict in Verdict]
    words = [word.strip() for word in text.split(",")]
    wrong = [word for word in words if word not in known]
    if wrong:
        raise UsageError(f"{wrong[0]!r} is no verdict", hint=f"some of {', '.join(known)}")
    return frozenset(Verdict(word) for word in words)


@click.command(
    "compare",
    cls=Verb,
    examples=(
        "debubble compare before/ after/",
        "debubble compare main traces/ --fail-on worse,unsafe_memory",
    ),
)
@click.argument("before")
@click.argument("after")
@pipeline_option
@limit_option(
    "--threshold",
    type=parse_share,
    metavar="SHARE",
    help="Smallest change that matters.  [default: the spread of repeated runs]",
)
@memory_limit_option
@input_option(
    "--predicted",
    metavar="FILE",
    help="Answer of `plan --json` to BEFORE.  [default: what `plan --save` kept of it]",
)
@question_option(
    "--change",
    metavar="WORDS",
    help="Option of that plan that was applied, if it is not recognised.",
)
@limit_option(
    "--fail-on",
    type=parse_verdicts,
    metavar="VERDICT,...",
    help="Verdicts for which the exit code is 1.",
)
@report_options
@store_option
@trace_options
@output_options
def command(  # noqa: PLR0913 (one argument a flag)
    *,
    before: str,
    after: str,
    pipeline: int | None,
    threshold: float | None,
    limit_bytes: int | None,
    predicted: str | None,
    change: str | None,
    fail_on: frozenset[Verdict] | None,
    report_path: Path | None,
    store: str | None,
    reader: Reader,
    manners: Manners,
) -> None:
    """Compare the runs BEFORE and AFTER a change: traces, or names in the history.

    Commas join captures of one setting. Result files of load generators are taken, too.
    """
    from debubble.measure.compare import DEFAULT_THRESHOLD, Verdict, compare, compare_causes
    from debubble.report.answers.compare import answer_compare
    from debubble.report.compare import compare_page
    from debubble.report.html.reports import paired_report

    failing = fail_on or frozenset()
    sides = [_measure(words, reader, pipeline, store, manners) for words in (before, after)]
    gaps = [gap for side in sides for gap in side.gaps]
    kept = sides[0].predicted(store) if predicted is None else read_predictions(predicted)
    if change is not None and change not in {each.words for each in kept}:
        raise UsageError(
            f"nothing was predicted of {change!r}",
            hint=f"one of: {'; '.join(each.words for each in kept)}"
            if kept
            else "plan BEFORE --save NAME keeps what is predicted of it",
        )
    comparison = compare(
        replace(sides[0].measurement, predicted=kept),
        sides[1].measurement,
        change=change,
        threshold=DEFAULT_THRESHOLD if threshold is None else threshold,
        limit_bytes=limit_bytes,
    )
    answer = answer_compare(
        comparison, gaps, compare_causes(*([run.shares for run in side.captures] for side in sides))
    )
    page = compare_page(answer, manners.hint(_next_command(after, comparison)))
    if kept and comparison.predicted is None:
        count = counted(len(kept), "prediction")
        page.notes.append(f"{count} of {before}, none of this change: --change names it")
    if report_path is not None:
        slots = [("before", sides[0].shown()), ("after", sides[1].shown())]
        report = paired_report(
            "compare", "Before and after", "A step of each", slots, page, f"{before} → {after}"
        )
        write_html(report, report_path, manners)
    finish(page, answer, manners)
    if failing:
        took_ns = min(
            (
                *comparison.before.batch_latencies_s(comparison.bases[0]),
                *comparison.after.batch_latencies_s(comparison.bases[1]),
            ),
            default=0.0,
        )
        slack_ns = comparison.threshold * took_ns * NS_PER_S
        refuse_doubted("--fail-on cannot be judged", gaps, Touch.TIMES, slack_ns)
    if Verdict.UNSAFE_MEMORY in failing:
        refuse_doubted("--fail-on cannot be judged", gaps, Touch.MEMORY)
    if comparison.verdict in failing:
        close_gate()
    if failing and comparison.verdict is Verdict.NOT_COMPARABLE:
        refuse_to_judge(
            "--fail-on",
            "the runs cannot be compared",
            "compare runs of the same work, or add not_comparable to the verdicts that fail",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Side:
    """One side of a comparison: captures of one setting."""

    measurement: Measurement
    gaps: tuple[Gap, ...]
    captures: tuple[Analysis, ...]
    """Those that were read; a name in the history has numbers alone."""

    def predicted(self, store: str | None) -> tuple[Prediction, ...]:
        """Return what was predicted of changes to it, by its name or by what it measured."""
        return self.measurement.predicted or recall_predictions(
            [run.measurement for run in self.captures], store
        )

    def shown(self) -> list[PipelineView]:
        """Return its captures as they are drawn."""
        from debubble.report.html.views import PipelineView

        return [
            PipelineView(
                timeline=run.timeline, figures=run.pipeline, ledger=run.ledger, stream=run.stream
            )
            for run in self.captures
        ]


def _next_command(after: str, comparison: Comparison) -> str:
    """Name what to look at next, where AFTER is one place with traces in it."""
    from debubble.measure.compare import Verdict

    if comparison.after.served is not None or (not is_url(after) and not Path(after).exists()):
        return ""
    verb = "find" if comparison.verdict in (Verdict.WORSE, Verdict.NOT_COMPARABLE) else "plan"
    return f"debubble {verb} {shlex.quote(after)}"


def read_predictions(file: str) -> tuple[Prediction, ...]:
    """Read what `debubble plan --json` wrote."""
    import msgspec

    from debubble.report.answers.plan import PlanAnswer, predictions_of

    try:
        return predictions_of(msgspec.json.decode(Path(file).read_bytes(), type=PlanAnswer))
    except (OSError, RecursionError, msgspec.MsgspecError) as error:
        raise UsageError(
            f"this is no answer of debubble plan: {error}",
            hint="write it with: debubble plan TRACES --json > plan.json",
            file=file,
        ) from error


def _measure(
    words: str, reader: Reader, pipeline: int | None, store: str | None, manners: Manners
) -> _Side:
    """Take each word for traces, or for a name in the history where nothing is called so."""
    from debubble.measure.load_results import measure_load, read_load_result
    from debubble.measure.measurement import join_measurements
    from debubble.timeline.fleet.survey import Question

    measurements: list[Measurement] = []
    captures: list[Analysis] = []
    for word in filter(None, words.split(",")):
        loaded = read_load_result(word)
        kept = recall(word, store) if loaded is None else [measure_load(loaded)]
        measurements += kept
        if not kept:
            analysis = reader.analyse([word], Question(pipeline=pipeline), manners)
            captures.append(analysis)
            measurements.append(analysis.measurement)
    if not measurements:
        raise UsageError(f"{words!r} names no run", hint="give traces, or names in the history")
    return _Side(
        measurement=join_measurements(measurements),
        gaps=tuple(
            dict.fromkeys(
                (
                    *(gap for analysis in captures for gap in analysis.measured_warnings),
                    *(gap for measurement in measurements for gap in measurement.doubts),
                )
            )
        ),
        captures=tuple(captures),
    )
