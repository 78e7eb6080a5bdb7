"""An `Improvement` in → what `debubble demo` prints out: the whole loop, step by step."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from debubble.answers.base import list_warnings
from debubble.answers.change import change_part, describe
from debubble.answers.compare import answer_compare, say_comparison
from debubble.answers.find import answer_find
from debubble.ledger.causes import Cause
from debubble.report.text import Page, Table
from debubble.tune.once import Improvement
from debubble.units import NS_PER_S, show_duration, show_gain, show_number, show_share

SCHEMA = "debubble.demo/1"


def demo_page(made: Improvement, what_it_is: str, out: Path, commands: list[str]) -> Page:
    """Lay out what was found, what was predicted, what came, and where it lies."""
    page = Page(answer=say_comparison(made.compared))
    change, window_ns = describe(made.option.change), made.option.window_ns
    gain = made.option.throughput_gain
    planned = (
        f"{change}, predicted a batch in {show_duration(window_ns)}, {show_gain(gain)} throughput"
    )
    measured = (
        f"a batch in {show_duration(_latency_ns(made))}, {show_gain(error_of(made))} off that"
    )
    found = _found(made)
    page.findings = [
        f"Found: {found[:1].lower()}{found[1:]}",
        f"Planned: {planned}.",
        f"Measured: {measured}.",
    ]
    table = Table(columns=("number", "before", "after"))
    for name in ("bubble", "batch_latency", "step_time", "throughput"):
        delta = made.compared.delta(name)
        if delta.before and delta.after:
            cells = [_shown(name, side.median) for side in (delta.before, delta.after)]
            table.rows.append((name.replace("_", " "), *cells))
    page.tables, page.gaps = [table], list(made.gaps)
    page.notes = [
        what_it_is,
        f"records: {out / 'before'}, {out / 'after'}",
        "the same, command by command:",
        *(f"  {line}" for line in commands),
    ]
    return page


def demo_json(made: Improvement, what_it_is: str, out: Path, commands: list[str]) -> dict[str, Any]:
    """Return all of it as data."""
    return {
        "schema": SCHEMA,
        "demo": what_it_is,
        "found": _found(made),
        "change": msgspec.to_builtins(change_part(made.option.change)),
        "expected": {
            "batch_latency_s": made.option.window_ns / NS_PER_S,
            "throughput_gain_fraction": made.option.throughput_gain,
        },
        "measured": {"batch_latency_s": _latency_ns(made) / NS_PER_S},
        "error_fraction": error_of(made),
        "compare": answer_compare(
            made.compared, (*made.before.measured_warnings, *made.after.measured_warnings)
        ).to_dict(),
        "verdict": made.compared.verdict.value,
        "records": {"before": str(out / "before"), "after": str(out / "after")},
        "commands": commands,
        "warnings": msgspec.to_builtins(list_warnings(made.gaps)),
    }


def error_of(made: Improvement) -> float:
    """Return how far the measured batch latency is off the one that was predicted."""
    return _latency_ns(made) / made.option.window_ns - 1


def _latency_ns(made: Improvement) -> float:
    return median(made.after.measurement.batch_latencies_s) * NS_PER_S


def _found(made: Improvement) -> str:
    """Say what `find` says of the stage that takes longest, else what the medians say of it."""
    found, (stage, times) = answer_find(made.before), made.longest
    said = (
        f"stage {stage} takes {times:.1f} times as long as the others, by the medians of its passes"
    )
    for named in found.named:
        if named.cause == Cause.IMBALANCE and named.stage == stage:
            said = named.sentence
    return f"{found.verdict} {said[:1].upper()}{said[1:]}."


def _shown(name: str, value: float) -> str:
    if name == "bubble":
        return show_share(value)
    if name == "throughput":
        return f"{show_number(value)} microbatches/s"
    return show_duration(value * NS_PER_S)
