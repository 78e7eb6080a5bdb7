"""Runs that were tried in → what `debubble tune` and `debubble demo` print of them."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Any

import msgspec

from debubble.annexes.tune.answers import say_tuning
from debubble.annexes.tune.journal import Expectation, Run
from debubble.annexes.tune.loop import Tuning
from debubble.annexes.tune.once import Improvement
from debubble.annexes.tune.prospects import Prospects
from debubble.annexes.tune.setting import Setting
from debubble.annexes.tune.trial import Kind
from debubble.ledger.causes import Cause
from debubble.measure.measurement import Measurement, ServerSamples, middle
from debubble.report.answers.base import list_warnings
from debubble.report.answers.change import ChangePart, describe, describe_refused
from debubble.report.answers.compare import answer_compare, say_comparison
from debubble.report.answers.find import answer_find
from debubble.report.text import Page, Table, refused_table
from debubble.timeline.job import Basis
from debubble.units import (
    NS_PER_S,
    UNKNOWN,
    counted,
    show_bytes,
    show_change,
    show_gain,
    show_known,
    show_largest,
    show_number,
    show_range,
    show_seconds,
    show_share,
)

_LARGER = " (larger batch)"
_WORDS = {
    Kind.MEASURED: "measured",
    Kind.OVER_MEMORY: "over memory",
    Kind.IGNORED: "ignored",
    Kind.NO_STEP: "no step",
    Kind.CRASHED: "crashed",
    Kind.OUT_OF_MEMORY: "out of memory",
    Kind.HUNG: "hung",
    Kind.UNREADABLE: "unreadable",
    Kind.OTHER_BATCH: "larger batch",
    Kind.CUT: "budget spent",
}


def tune_page(tuned: Tuning, records: str, next_command: str) -> Page:
    """Lay out the winner, every run, what was refused, and where the records are."""
    page = Page(answer=say_tuning(tuned))
    page.findings = [*_findings(tuned), *_untellable(tuned.prospects)]
    measured = [run.outcome.measurement for run in tuned.standing.runs]
    is_served = any(
        measurement is not None and measurement.served is not None for measurement in measured
    )
    page.tables = [_serving_table(tuned) if is_served else _run_table(tuned)]
    if tuned.prospects.refused:
        refused = ((describe_refused(option), option.reason) for option in tuned.prospects.refused)
        page.tables.append(refused_table(refused))
    page.notes = [f"times: {tuned.standing.basis}", f"stopped: {tuned.stop.why}"]
    if any(map(tuned.standing.grew, tuned.standing.runs)):
        page.notes.append("a larger batch changes training")
    detail = [run for run in tuned.standing.runs if run.outcome.message]
    page.notes += [f"run {run.number}: {run.outcome.message}" for run in detail]
    page.notes.append(f"records: {tuned.bench.folder}{records}")
    page.next_command = next_command
    return page


def dry_page(commands: list[tuple[Setting, tuple[str, ...]]], prospects: Prospects | None) -> Page:
    """Lay out what would be run, without running it."""
    setting, words = commands[0]
    page = Page(answer=f"First run, unchanged: {shlex.join(words)}")
    if prospects is None:
        detail = ", ".join(setting.knobs())
        page.notes = [
            f"then the best options that a plan of that run predicts, by: {detail}",
            "after the first run this lists them; of traces, debubble plan does",
        ]
        return page
    worth = [prospect for prospect in prospects.tries if prospect.worth]
    if not worth:
        page.findings = ["Then nothing: no option is predicted to gain more than the noise."]
    table = Table(columns=("would try", "throughput", "batch"), title="then, best first")
    for prospect in worth:
        table.add(
            _marked(prospect.setting, prospect.expected),
            show_known(prospect.expected, _predicted, "unknown"),
            show_known(prospect.expected, lambda expected: show_seconds(expected.batch_latency_s)),
        )
    page.tables = [table] if worth else []
    page.findings += _untellable(prospects)
    page.lines = [shlex.join(words) for _, words in commands[1:]]
    return page


def say_start(setting: Setting, why: str, expected: Expectation | None, done: int) -> str:
    """Say which run begins."""
    sentences = f", predicted {_predicted(expected)}" if expected else ""
    return f"run {done + 1}: {_marked(setting, expected)} ({why}{sentences})"


def _marked(setting: Setting, expected: Expectation | None) -> str:
    """Name a setting, marked where it trains with a larger batch."""
    return f"{setting}{_LARGER if expected and expected.changes_training else ''}"


def say_end(run: Run) -> str:
    """Say what came of a run, in a line."""
    measurement = run.outcome.measurement
    detail = f": {run.outcome.message}" if run.outcome.message else ""
    if run.outcome.kind is Kind.MEASURED and measurement is not None and measurement.served:
        out, first, later = _served(measurement.served)
        detail = f": {out} tokens/s, first token after {first}, then one every {later}"
    elif run.outcome.kind is Kind.MEASURED and measurement is not None:
        detail = f": batch latency {_latency(measurement)}, bubble {_bubble(measurement)}"
        detail += f"; {run.outcome.message}" if run.outcome.message else ""
    return f"run {run.number}: {_WORDS[run.outcome.kind]}{detail}"


def _findings(tuned: Tuning) -> list[str]:
    standing, winner = tuned.standing, tuned.winner
    sentences = [line for line in (_say_crowded(tuned), _say_unsteady(tuned)) if line]
    if winner is not None:
        before, after = standing.of(standing.now), standing.of(winner)
        counts = f"{len(before)} and {len(after)} runs, in turn"
        compared = standing.compared(winner)
        if compared is not None:
            rate = compared.deltas["throughput"]
            change = show_gain(rate.change or 0.0, *(rate.ci or (None, None)))
            sentences.append(
                f"All runs together: throughput {change}, {counts}; {compared.confidence.value}."
            )
    if standing.hold == "microbatch" and tuned.scope.hold_of(standing) == "batch":
        sentences.append(
            "The command keeps the size of a microbatch: more of them are a larger batch, which "
            "changes training; --hold microbatch tries that."
        )
    if standing.ignored_knobs:
        knobs = ", ".join(f"{{{knob}}}" for knob in sorted(standing.ignored_knobs))
        sentences.append(f"The command ignores {knobs}: the values given were not used.")
    if standing.overlap_is_idle(tuned.scope.threshold):
        sentences.append(
            "Overlap changes nothing: it gains nothing here, or the command ignores {overlap}; "
            "the traces do not show which."
        )
    return sentences


def _say_crowded(tuned: Tuning) -> str:
    """Say where ranks had to take turns on this machine's cores: no GPU, and fewer cores."""
    measured = [run.outcome.measurement for run in tuned.standing.measured]
    on_cores = [
        measurement
        for measurement in measured
        if measurement is not None and not measurement.environment.devices
    ]
    ranks, cores = (
        max((len(measurement.ranks) for measurement in on_cores), default=0),
        os.cpu_count() or 1,
    )
    if ranks <= cores:
        return ""
    crowd = f"{counted(ranks, 'rank')} on {counted(cores, 'core')}"
    return f"{crowd}: ranks share cores, so that some waits come from this machine."


def _say_unsteady(tuned: Tuning) -> str:
    """Say how far runs of the setting as it is lie apart, where that is more than is judged."""
    standing = tuned.standing
    lengths = [
        middle(run.outcome.measurement.batch_latencies_s(standing.basis))
        for run in standing.of(standing.now)
        if run.outcome.measurement
    ]
    known = [length for length in lengths if length is not None]
    if len(known) < 2 or max(known) / min(known) - 1 <= tuned.scope.threshold:
        return ""
    varied = f"The unchanged setting varied {show_range(known, show_seconds)} from run to run"
    return f"{varied}: smaller gains cannot be measured here."


def _untellable(prospects: Prospects) -> list[str]:
    return [
        f"Not tried, as the command has no {{{untold.lever}}}: {describe(untold.option.change)}, "
        f"predicted {show_gain(untold.option.throughput_gain)}."
        for untold in prospects.untellable
    ] + _larger(prospects)


def _larger(prospects: Prospects) -> list[str]:
    """Name what a larger batch would gain, where that was not asked for."""
    if prospects.larger is None:
        return []
    gain = show_gain(prospects.larger.throughput_gain)
    what = f"{describe(prospects.larger.change)}, predicted {gain}"
    return [f"Not tried, as a larger batch changes training: {what}; --hold microbatch tries it."]


def _serving_table(tuned: Tuning) -> Table:
    table = Table(
        columns=("run", "setting", "outcome", "tokens/s out", "TTFT", "TPOT", "throughput"),
        title="every run, in its order",
    )
    for run in tuned.standing.runs:
        measurement = run.outcome.measurement
        seen, gain = (UNKNOWN,) * 3, UNKNOWN
        if measurement is not None and measurement.served is not None:
            seen = _served(measurement.served)
            gain = show_change(tuned.standing.gain_of_run(run))
        mark = " ←" if run.setting == tuned.winner else ""
        table.add(str(run.number), f"{run.setting}{mark}", _WORDS[run.outcome.kind], *seen, gain)
    return table


def _served(served: ServerSamples) -> tuple[str, str, str]:
    """Return throughput, time to first token and time per token, in the middle."""
    return (
        show_known(middle(served.out_per_s), show_number),
        show_known(middle(served.ttft_s), show_seconds),
        show_known(middle(served.tpot_s), show_seconds),
    )


def _run_table(tuned: Tuning) -> Table:
    table = Table(
        columns=("run", "setting", "outcome", "bubble", "batch", "peak", "throughput", "predicted"),
        title="every run, in its order",
    )
    for run in tuned.standing.runs:
        measurement, cells = run.outcome.measurement, (UNKNOWN,) * 4
        if measurement is not None:
            cells = (
                _bubble(measurement),
                _latency(measurement, tuned.standing.basis),
                show_largest([rank.peak_bytes for rank in measurement.memory], show_bytes),
                show_change(tuned.standing.gain_of_run(run)),
            )
        table.add(
            str(run.number),
            f"{run.setting}{_LARGER if tuned.standing.grew(run) else ''}"
            f"{' ←' if run.setting == tuned.winner else ''}",
            _WORDS[run.outcome.kind],
            *cells,
            show_known(run.expected, _predicted),
        )
    return table


def _predicted(expected: Expectation) -> str:
    return show_gain(expected.gain, expected.low, expected.high)


def _bubble(measurement: Measurement) -> str:
    return show_share(middle(measurement.bubble_fractions))


def _latency(measurement: Measurement, basis: Basis | None = None) -> str:
    lengths = measurement.batch_latencies_s(basis or measurement.basis)
    return show_known(middle(lengths), show_seconds)


SCHEMA = "debubble.demo/1"


def demo_page(made: Improvement, what_it_is: str, out: Path, commands: list[str]) -> Page:
    """Lay out what was found, what was predicted, what came, and where it lies."""
    page = Page(answer=say_comparison(made.compared))
    change, prospects = describe(made.option.change), _found(made)
    if made.plan.baseline.trains and made.option.change.grows_batch:
        change += f"{_LARGER[:-1]}, which changes training)"
    page.findings = [
        f"Found: {prospects[:1].lower()}{prospects[1:]}",
        f"Planned: {change}: {show_gain(made.option.throughput_gain)} throughput.",
        f"Measured: a batch {made.check.sentence}.",
    ]
    table = Table(columns=("number", "before", "after"))
    for name in ("bubble", "batch_latency", "step_time", "throughput"):
        delta = made.compared.deltas[name]
        if delta.before and delta.after:
            cells = [_shown(name, side.median) for side in (delta.before, delta.after)]
            table.add(name.replace("_", " "), *cells)
    page.tables, page.gaps = [table], list(made.gaps)
    page.notes = [
        what_it_is,
        f"times: {made.compared.bases[0]}",
        f"records: {out / 'before'}, {out / 'after'}",
        "the same, command by command:",
    ]
    page.lines = [f"  {line}" for line in commands]
    return page


def demo_json(made: Improvement, what_it_is: str, out: Path, commands: list[str]) -> dict[str, Any]:
    """Return all of it as data."""
    return {
        "schema": SCHEMA,
        "demo": what_it_is,
        "found": _found(made),
        "change": msgspec.to_builtins(ChangePart.of(made.option.change)),
        "expected": {
            "batch_latency_s": made.option.window_ns / NS_PER_S,
            "throughput_gain_fraction": made.option.throughput_gain,
        },
        "measured": {"batch_latency_s": made.check.measured_s},
        "predicted": msgspec.to_builtins(made.check),
        "error_fraction": (made.check.measured_s or 0.0) * NS_PER_S / made.option.window_ns - 1,
        "basis": str(made.compared.bases[0]),
        "compare": answer_compare(
            made.compared, (*made.before.measured_warnings, *made.after.measured_warnings)
        ).to_dict(),
        "verdict": made.compared.verdict.value,
        "records": {"before": str(out / "before"), "after": str(out / "after")},
        "commands": commands,
        "warnings": msgspec.to_builtins(list_warnings(made.gaps)),
    }


def _found(made: Improvement) -> str:
    """Say what `find` says of an uneven split; else of what it names first."""
    prospects = answer_find(made.before)
    named = sorted(prospects.named, key=lambda cause: cause.cause != Cause.IMBALANCE)
    sentences = [f"{cause.sentence[:1].upper()}{cause.sentence[1:]}." for cause in named[:1]]
    return " ".join([prospects.verdict, *sentences])


def _shown(name: str, value: float) -> str:
    if name == "bubble":
        return show_share(value)
    if name == "throughput":
        return f"{show_number(value)} microbatches/s"
    return show_seconds(value)
