"""Runs that were tried in → what `debubble tune` prints of them."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from debubble.annexes.tune.answers import say_tuning
from debubble.annexes.tune.journal import Expectation, Kind, Run
from debubble.annexes.tune.loop import Next, Tuning
from debubble.annexes.tune.standing import Candidate
from debubble.annexes.tune.task import Task
from debubble.measure.measurement import Measurement, ServerSamples, middle
from debubble.report.answers.change import describe, describe_refused
from debubble.report.text import Page, Table, refused_table
from debubble.timeline.job import Basis
from debubble.units import (
    UNKNOWN,
    show_bytes,
    show_change,
    show_gain,
    show_known,
    show_largest,
    show_number,
    show_seconds,
    show_share,
)


def tune_page(tuned: Tuning, next_command: str = "") -> Page:
    """Lay out the winner, every run, what was refused, and where the records are."""
    standing = tuned.standing
    page = Page(answer=say_tuning(tuned), next_command=next_command)
    page.findings = _findings(tuned)
    served = any(
        run.outcome.measurement and run.outcome.measurement.served for run in standing.runs
    )
    page.tables = [_serving_table(tuned) if served else _run_table(tuned)]
    if tuned.candidates.refused:
        refused = ((describe_refused(option), option.reason) for option in tuned.candidates.refused)
        page.tables.append(refused_table(refused))
    page.notes = [f"times: {standing.basis}", f"stopped: {tuned.stop.why}"]
    if any(map(standing.grew, standing.runs)):
        page.notes.append("a larger batch changes training")
    page.notes += [
        f"run {run.number}: {run.outcome.message}" for run in standing.runs if run.outcome.message
    ]
    page.notes.append(f"records: {standing.task.folder}")
    return page


def dry_page(task: Task, tries: Sequence[Candidate] | None) -> Page:
    """Lay out what would be run, without running it."""
    template = task.template
    page = Page(answer=f"First run, unchanged: {shlex.join(template.fill(template.now))}")
    if tries is None:
        knobs = ", ".join(sorted(template.knobs))
        page.notes = [
            f"then the best options that a plan of that run predicts, by: {knobs}",
            "after the first run this lists them; of traces, debubble plan does",
        ]
        return page
    if not tries:
        page.findings = ["Then nothing: no option is predicted to gain more than the noise."]
        return page
    table = Table(columns=("would try", "throughput", "batch"), title="then, best first")
    for candidate in tries:
        table.add(
            str(candidate.setting),
            show_known(candidate.expected, _predicted, "unknown"),
            show_known(candidate.expected, lambda expected: show_seconds(expected.batch_latency_s)),
        )
    page.tables = [table]
    page.lines = [shlex.join(template.fill(candidate.setting)) for candidate in tries]
    return page


def say_start(chosen: Next, number: int) -> str:
    """Say which run begins."""
    expected = chosen.candidate.expected
    predicted = f", predicted {_predicted(expected)}" if expected else ""
    return f"run {number}: {chosen.candidate.setting} ({chosen.why}{predicted})"


def say_end(run: Run) -> str:
    """Say what came of a run, in a line."""
    details, measurement = [], run.outcome.measurement
    if run.outcome.kind is Kind.MEASURED and measurement is not None:
        if measurement.served:
            out, first, later = _served(measurement.served)
            details = [f"{out} tokens/s, first token after {first}, then one every {later}"]
        else:
            details = [f"batch latency {_latency(measurement)}, bubble {_bubble(measurement)}"]
    details += [run.outcome.message] if run.outcome.message else []
    return f"run {run.number}: {': '.join(filter(None, [_outcome(run), '; '.join(details)]))}"


def _findings(tuned: Tuning) -> list[str]:
    standing, winner, sentences = tuned.standing, tuned.winner, []
    compared = None if winner is None else standing.compared(winner)
    if winner is not None and compared is not None:
        rate = compared.deltas["throughput"]
        change = show_gain(rate.change or 0.0, *(rate.ci or (None, None)))
        counts = f"{len(standing.of(standing.now))} and {len(standing.of(winner))} runs, in turn"
        sentences.append(
            f"All runs together: throughput {change}, {counts}; {compared.confidence.value}."
        )
    if standing.keeps == "microbatch" and standing.held == "batch":
        sentences.append(
            "The command keeps the size of a microbatch: more of them are a larger batch, which "
            "changes training; --hold microbatch tries that."
        )
    if standing.ignored_knobs:
        knobs = ", ".join(f"{{{knob}}}" for knob in sorted(standing.ignored_knobs))
        sentences.append(f"The command ignores {knobs}: the values given were not used.")
    larger = tuned.candidates.larger
    if larger is not None:
        gain = show_gain(larger.throughput_gain)
        sentences.append(
            f"Not tried, as a larger batch changes training: {describe(larger.change)}, "
            f"predicted {gain}; --hold microbatch tries it."
        )
    return sentences


def _serving_table(tuned: Tuning) -> Table:
    table = Table(
        columns=("run", "setting", "outcome", "tokens/s out", "TTFT", "TPOT", "throughput"),
        title="every run, in its order",
    )
    for run in tuned.standing.runs:
        measurement, cells = run.outcome.measurement, (UNKNOWN,) * 4
        if measurement is not None and measurement.served is not None:
            gain = show_change(tuned.standing.gain_of_run(run))
            cells = (*_served(measurement.served), gain)
        table.add(str(run.number), _setting(tuned, run), _outcome(run), *cells)
    return table


def _served(served: ServerSamples) -> tuple[str, str, str]:
    """Return throughput, time to first token and time per token, in the middle."""
    return (
        show_known(middle(served.out_per_s), show_number),
        show_known(middle(served.ttft_s), show_seconds),
        show_known(middle(served.tpot_s), show_seconds),
    )


def _run_table(tuned: Tuning) -> Table:
    standing = tuned.standing
    table = Table(
        columns=("run", "setting", "outcome", "bubble", "batch", "peak", "throughput", "predicted"),
        title="every run, in its order",
    )
    for run in standing.runs:
        measurement, cells = run.outcome.measurement, (UNKNOWN,) * 4
        if measurement is not None:
            cells = (
                _bubble(measurement),
                _latency(measurement, standing.basis),
                show_largest([rank.peak_bytes for rank in measurement.memory], show_bytes),
                show_change(standing.gain_of_run(run)),
            )
        predicted = show_known(run.expected, _predicted)
        table.add(str(run.number), _setting(tuned, run), _outcome(run), *cells, predicted)
    return table


def _setting(tuned: Tuning, run: Run) -> str:
    larger = " (larger batch)" if tuned.standing.grew(run) else ""
    return f"{run.setting}{larger}{' ←' if run.setting == tuned.winner else ''}"


def _outcome(run: Run) -> str:
    return run.outcome.kind.value.replace("_", " ")


def _predicted(expected: Expectation) -> str:
    return show_gain(expected.gain, expected.low, expected.high)


def _bubble(measurement: Measurement) -> str:
    return show_share(middle(measurement.bubble_fractions))


def _latency(measurement: Measurement, basis: Basis | None = None) -> str:
    lengths = measurement.batch_latencies_s(basis or measurement.basis)
    return show_known(middle(lengths), show_seconds)
