"""A `Comparison` in → what `debubble compare` prints out, as text, JSON or Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from debubble.errors import Gap
from debubble.measure.comparison import (
    Comparison,
    Confidence,
    Delta,
    Difference,
    MemoryChange,
    Verdict,
)
from debubble.measure.measurement import Measurement, middle
from debubble.measure.statistics import Spread, least_samples
from debubble.report.inspect import gap_json
from debubble.report.text import Page, Table
from debubble.units import NS_PER_S, show_bytes, show_duration, show_share

SCHEMA = "debubble.compare/1"
LABELS = {
    "bubble": "bubble",
    "batch_latency": "batch latency",
    "step_time": "step time",
    "throughput": "throughput",
    "unprofiled_step_time": "step, unprofiled",
}


def compare_page(found: Comparison, gaps: Sequence[Gap], next_command: str) -> Page:
    """Lay out the verdict, the numbers behind it, memory, and what else differs."""
    page = Page(answer=compare_answer(found))
    page.findings = list(found.reasons) if found.verdict is not Verdict.NOT_COMPARABLE else []
    page.tables = [_number_table(found), _memory_table(found)]
    if found.setting or found.environment:
        page.tables.append(_difference_table(found))
    page.notes = list(found.notes)
    page.gaps = list(gaps)
    page.next_command = next_command
    return page


def compare_answer(found: Comparison) -> str:
    """Say the verdict in a sentence."""
    if found.verdict is Verdict.NOT_COMPARABLE:
        return f"Not comparable: {'; '.join(found.reasons)}."
    if found.verdict is Verdict.UNSAFE_MEMORY:
        return f"Unsafe: {_tight(found)}; {_speed(found)}."
    what = {
        Verdict.BETTER: "Better",
        Verdict.WORSE: "Worse",
        Verdict.NO_CLEAR_CHANGE: "No clear change",
    }[found.verdict]
    if found.confidence is Confidence.TESTED:
        return f"{what}: {_speed(found)}{_because(found)}."
    first, second = found.deciding.before, found.deciding.after
    counts = f"{first.count if first else 0} and {second.count if second else 0}"
    needed = found.needed or least_samples()
    return (
        f"{what}, as far as {counts} steps tell: {_speed(found)}{_because(found)}; "
        f"indicative, a test needs about {needed} steps a side."
    )


def compare_markdown(found: Comparison) -> str:
    """Write the same for a pull request."""
    lines = [f"**{compare_answer(found)}**", ""]
    if found.verdict is not Verdict.NOT_COMPARABLE:
        lines += [f"- {reason}" for reason in found.reasons]
        lines += [""] if found.reasons else []
    for table in compare_page(found, (), "").tables:
        lines += [
            f"| {' | '.join(table.columns)} |",
            f"|{'---|' * len(table.columns)}",
            *(f"| {' | '.join(_cell(cell) for cell in row)} |" for row in table.rows),
            "",
        ]
    lines += [f"- {note}" for note in found.notes]
    return "\n".join(lines).rstrip()


def compare_json(found: Comparison, gaps: Sequence[Gap]) -> dict[str, Any]:
    """Return the comparison as data."""
    return {
        "schema": SCHEMA,
        "before": measurement_json(found.before),
        "after": measurement_json(found.after),
        "delta": {one.name: _delta_json(one) for one in found.deltas},
        "memory": [_memory_json(one) for one in found.memory],
        "setting": [_difference_json(one) for one in found.setting],
        "environment": [_difference_json(one) for one in found.environment],
        "verdict": found.verdict.value,
        "confidence": found.confidence.value,
        "decided_by": found.decided_by,
        "threshold_fraction": found.threshold,
        "samples_needed": found.needed,
        "detectable_fraction": found.detectable,
        "throughput_unit": found.throughput_unit,
        "reasons": list(found.reasons),
        "notes": list(found.notes),
        "sentence": compare_answer(found),
        "warnings": [gap_json(gap) for gap in gaps],
    }


def measurement_json(one: Measurement) -> dict[str, Any]:
    """Return a measurement as data: medians, their count, the setting."""
    rates = one.rates_per_s("step_times_s" if one.step_times_s else "batch_latencies_s")
    rate = middle(rates)
    return {
        "numbers": {
            "bubble_fraction": middle(one.bubble_fractions),
            "batch_latency_s": middle(one.batch_latencies_s),
            "step_time_s": middle(one.step_times_s),
            "unprofiled_step_time_s": middle(one.unprofiled_step_times_s),
            "peak_memory_bytes": [rank.peak_bytes for rank in one.memory],
            "microbatches_per_s": rate,
            "tokens_per_s": rate * one.tokens if rate and one.tokens else None,
        },
        "n": len(one.samples),
        "captures": len(one.captures),
        "kind": one.kind,
        "ranks": list(one.ranks),
        "microbatches": one.microbatches,
        "schedule": one.schedule,
        "split": list(one.split) if one.split else None,
        "context_lengths_up_to": sorted(one.contexts) or None,
        "devices": list(one.environment.devices),
        "versions": _versions(one),
    }


def _versions(one: Measurement) -> dict[str, str]:
    """Return what ran, by name; what differs from rank to rank with all its values."""
    by_name: dict[str, list[str]] = {}
    for name, value in one.environment.versions:
        by_name.setdefault(name, []).append(value)
    return {name: ", ".join(values) for name, values in by_name.items()}


def _speed(found: Comparison) -> str:
    delta = found.deciding
    if delta.change is None or delta.before is None or delta.after is None:
        return f"{LABELS[delta.name]} is not known"
    said = f"{LABELS[delta.name]} {show_change(delta)}{_range(delta)}"
    first, second = show_number(delta.name, delta.before), show_number(delta.name, delta.after)
    if delta.name == "throughput":
        return f"{said}, {first} to {second} {found.throughput_unit} per second"
    return f"{said}, {first} to {second}"


def _because(found: Comparison) -> str:
    return f"; {found.reasons[0]}" if found.reasons else ""


def _tight(found: Comparison) -> str:
    worst = min((one for one in found.memory if one.unsafe), key=_left)
    limit = show_bytes(worst.limit_bytes or 0)
    left = _left(worst)
    if left < 0:
        return f"rank {worst.rank} is {show_bytes(-left)} over its {limit}"
    return f"rank {worst.rank} has {show_bytes(left)} left of {limit}"


def _left(one: MemoryChange) -> int:
    return one.headroom_bytes or 0


def _number_table(found: Comparison) -> Table:
    table = Table(columns=("number", "before", "after", "change", "95 % of it in", "p", "n"))
    for delta in found.deltas:
        if delta.before is None and delta.after is None:
            continue
        first, second = delta.before, delta.after
        counts = f"{first.count if first else 0}, {second.count if second else 0}"
        table.rows.append(
            (
                LABELS[delta.name] + (" (decides)" if delta.name == found.decided_by else ""),
                show_number(delta.name, first),
                show_number(delta.name, second),
                show_change(delta),
                _range(delta).strip(" ()") or "–",
                "–" if delta.p is None else f"{delta.p:.2g}",
                counts,
            )
        )
    return table


def _memory_table(found: Comparison) -> Table:
    table = Table(columns=("rank", "peak before", "peak after", "left after", ""))
    for one in found.memory:
        left = one.headroom_bytes
        table.rows.append(
            (
                str(one.rank),
                "–" if one.before_bytes is None else show_bytes(one.before_bytes),
                "–" if one.after_bytes is None else show_bytes(one.after_bytes),
                "not known" if left is None else show_bytes(left),
                "unsafe" if one.unsafe else "",
            )
        )
    return table


def _difference_table(found: Comparison) -> Table:
    table = Table(columns=("differs", "before", "after"))
    for one in (*found.setting, *found.environment):
        table.rows.append((one.what, one.before, one.after))
    return table


def show_number(name: str, spread: Spread | None) -> str:
    """Write one of the numbers in its unit."""
    if spread is None:
        return "–"
    if name == "bubble":
        return show_share(spread.median)
    if name == "throughput":
        return f"{spread.median:.4g}"
    return show_duration(spread.median * NS_PER_S)


def show_change(delta: Delta) -> str:
    """Write what a number did."""
    if delta.change is None:
        return "–"
    return f"{100 * delta.change:+.1f} {'points' if delta.name == 'bubble' else '%'}"


def _range(delta: Delta) -> str:
    if delta.low is None or delta.high is None:
        return ""
    return f" ({100 * delta.low:+.1f} to {100 * delta.high:+.1f})"


def _delta_json(one: Delta) -> dict[str, Any]:
    return {
        "before": _spread_json(one.before),
        "after": _spread_json(one.after),
        "change": one.change,
        "ci": None if one.low is None else [one.low, one.high],
        "p": one.p,
        "direction": one.direction.value,
        "tested": one.tested,
    }


def _spread_json(one: Spread | None) -> dict[str, Any] | None:
    if one is None:
        return None
    ci = None if one.low is None else [one.low, one.high]
    return {"median": one.median, "ci": ci, "n": one.count}


def _memory_json(one: MemoryChange) -> dict[str, Any]:
    return {
        "rank": one.rank,
        "before_bytes": one.before_bytes,
        "after_bytes": one.after_bytes,
        "limit_bytes": one.limit_bytes,
        "headroom_bytes": one.headroom_bytes,
        "unsafe": one.unsafe,
    }


def _difference_json(one: Difference) -> dict[str, Any]:
    return {"what": one.what, "before": one.before, "after": one.after}


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
