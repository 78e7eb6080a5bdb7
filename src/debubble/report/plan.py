"""A `Plan` in → what `debubble plan` prints out, as text or JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from debubble.errors import Gap, UsageError
from debubble.plan.change import Change
from debubble.plan.emit import EMITTERS, emit
from debubble.plan.option import Option
from debubble.plan.overlap import Overlap
from debubble.plan.plan import Plan
from debubble.plan.schedule import Refused
from debubble.report.inspect import gap_json
from debubble.report.text import Page, Table
from debubble.units import NS_PER_S, counted, show_bytes, show_duration

SCHEMA = "debubble.plan/1"


def plan_page(
    plan: Plan, bottleneck: str, gaps: Sequence[Gap], framework: str | None, next_command: str
) -> Page:
    """Lay out the plan: what to do, then all options, then what was refused."""
    page = Page(answer=_answer(plan, bottleneck))
    page.findings = _findings(plan, plan.recommended if bottleneck else plan.recommended[1:])
    if plan.options:
        page.tables.append(_option_table(plan))
    if plan.refused:
        page.tables.append(_refused_table(plan))
    page.notes = _notes(plan)
    if framework is not None:
        page.notes += ["", *_applied(plan, framework)]
    page.gaps = list(gaps)
    page.next_command = next_command
    return page


def _answer(plan: Plan, bottleneck: str) -> str:
    if bottleneck:
        return f"{bottleneck[:1].upper()}{bottleneck[1:]}."
    if not plan.recommended:
        return _nothing(plan)
    best = plan.recommended[0]
    source = plan.baseline.source
    return (
        f"{_sentence(best.change)}: {_gain(best)} throughput, "
        f"{_batch(best.change, source.microbatches)} in {show_duration(best.window_ns)} "
        f"instead of {_batch(Change(), source.microbatches, best.change)}"
        f"{show_duration(plan.baseline.window_ns)}."
    )


def _nothing(plan: Plan) -> str:
    """Say why nothing is recommended."""
    over = plan.baseline.over_limit_bytes
    if over is not None and over > 0:
        return (
            f"No memory to plan with: a rank already takes {show_bytes(over)} more than its limit."
        )
    if not plan.options and plan.refused:
        return "Nothing can be changed: every option is refused."
    return "Nothing to change: no option gains more than the noise of a run."


def _batch(change: Change, now: int, beside: Change | None = None) -> str:
    """Name a batch, with its size where sizes differ."""
    grows = (beside or change).microbatches is not None and (beside or change).hold != "batch"
    if not grows:
        return "a batch" if beside is None else ""
    if beside is not None:
        return f"{now} in "
    return f"a batch of {change.microbatches}"


def _sentence(change: Change) -> str:
    words = describe(change)
    return f"{words[:1].upper()}{words[1:]}"


def describe(change: Change) -> str:
    """Say a change in words."""
    parts = []
    if change.schedule:
        chunks = f" with {change.chunks} stages a rank" if (change.chunks or 1) > 1 else ""
        parts.append(f"schedule {change.schedule}{chunks}")
    if change.split:
        parts.append(f"split {','.join(map(str, change.split))}")
    if change.microbatches:
        of = " of the same batch" if change.hold == "batch" else ""
        parts.append(f"{counted(change.microbatches, 'microbatch', 'microbatches')}{of}")
    if change.overlap is not None:
        parts.append("transfers beside compute" if change.overlap else "no overlap")
    return ", ".join(parts) or "nothing changed"


def _gain(option: Option) -> str:
    low, high = option.throughput_low, option.throughput_high
    return f"{option.throughput_gain:+.0%} ({low:+.0%} to {high:+.0%})"


def _findings(plan: Plan, others: Sequence[Option]) -> list[str]:
    """Say the best of each lever."""
    said, seen = [], set()
    for option in others:
        if option.lever not in seen:
            seen.add(option.lever)
            said.append(f"{_sentence(option.change)}: {_gain(option)}.")
    if plan.overlap is not None and plan.overlap.option.fits_memory is not False:
        said += _overlap(plan.overlap)
    return said


def _overlap(overlap: Overlap) -> list[str]:
    even = overlap.break_even
    if even is None:
        pays = "it pays even if compute slows to a quarter beside messages"
    elif even <= 1.0:
        pays = "it gains nothing, even if compute does not slow"
    else:
        pays = f"it pays while compute slows by less than {even - 1:.0%} beside messages"
    if overlap.slowdown is None:
        return [f"Transfers beside compute: unknown, try it; {pays}."]
    seen = f"{overlap.slowdown - 1:.0%}"
    return [f"Transfers beside compute, which slows it by {seen} in this run: {pays}."]


def _option_table(plan: Plan) -> Table:
    table = Table(
        columns=("change", "batch", "four of five in", "bubble", "throughput", "memory left", "do"),
        title="options, by throughput",
    )
    for option in plan.options:
        table.rows.append(
            (
                describe(option.change),
                show_duration(option.window_ns),
                f"{show_duration(option.low_ns)} - {show_duration(option.high_ns)}",
                f"{option.bubble_fraction:.0%}",
                f"{option.throughput_gain:+.1%}",
                _memory_left(option),
                _advice(plan, option),
            )
        )
    return table


def _advice(plan: Plan, option: Option) -> str:
    if option in plan.recommended:
        return "yes"
    if option.lever == "overlap" and plan.overlap is not None and plan.overlap.slowdown is None:
        return "try" if option.throughput_gain > 0 else "no"
    return "no" if option.throughput_high < 0 else "noise"


def _memory_left(option: Option) -> str:
    left = [one.bytes for one in option.headroom or () if one.bytes is not None]
    return show_bytes(min(left)) if left else "unknown"


def _refused_table(plan: Plan) -> Table:
    table = Table(columns=("refused", "why"))
    table.rows += [(_refused_name(one), one.reason) for one in plan.refused]
    return table


def _refused_name(one: Refused) -> str:
    if one.lever == "split" and one.change.split is None:
        return "another split"
    return describe(one.change)


def _notes(plan: Plan) -> list[str]:
    notes = sorted({said for option in plan.options for said in option.assumptions})
    notes = [f"assumed: {said}" for said in notes]
    if plan.baseline.memory is None:
        notes.append(
            "memory: unknown, the traces do not tell how it grows; nothing is held against it"
        )
    elif None in plan.baseline.limits:
        notes.append("memory: the limit of a device is unknown; say it with --memory-limit")
    if plan.partition is not None and plan.partition.lower_bound_s is not None:
        bound = show_duration(plan.partition.lower_bound_s * NS_PER_S)
        proof = "no split is quicker" if plan.partition.exact else "the quickest split found"
        split = ",".join(map(str, plan.partition.split))
        notes.append(f"split {split}: {proof}; none of this schedule can be under {bound}")
    return notes


def _applied(plan: Plan, framework: str) -> list[str]:
    """Write the best option that a framework can be told."""
    reason = "nothing is recommended"
    for number, option in enumerate(plan.recommended):
        try:
            text = emit(framework, option.change, plan.baseline.setting)
        except UsageError as error:
            reason = reason if number else error.message
            continue
        better = [f"# the options before it cannot be written: {reason}"] if number else []
        return [f"for {framework}, {describe(option.change)}:", *better, *text.splitlines()]
    return [f"for {framework}: nothing to write ({reason})"]


def plan_json(plan: Plan, bottleneck: str, gaps: Sequence[Gap]) -> dict[str, Any]:
    """Return the plan as data."""
    source = plan.baseline.source
    step = plan.baseline.window_ns + source.outside_ns
    return {
        "schema": SCHEMA,
        "baseline": {
            "schedule": plan.baseline.schedule,
            "split": list(source.split) if source.split else None,
            "numbers": {
                "bubble_fraction": source.bubble_fraction,
                "batch_latency_s": plan.baseline.window_ns / NS_PER_S,
                "peak_memory_bytes": [rank.peak_memory_bytes for rank in plan.baseline.ranks],
                "microbatches_per_s": source.microbatches * NS_PER_S / step,
            },
        },
        "options": [_option_json(plan, option) for option in plan.options],
        "refused": [_refused_json(one) for one in plan.refused],
        "lower_bound_s": plan.partition.lower_bound_s if plan.partition else None,
        "overlap": None
        if plan.overlap is None
        else {"slowdown": plan.overlap.slowdown, "break_even": plan.overlap.break_even},
        "bottleneck": bottleneck or None,
        "verdict": _answer(plan, bottleneck),
        "warnings": [gap_json(gap) for gap in gaps],
    }


def _option_json(plan: Plan, option: Option) -> dict[str, Any]:
    return {
        "lever": option.lever,
        "change": _change_json(option.change),
        "numbers": {
            "bubble_fraction": option.bubble_fraction,
            "batch_latency_s": option.window_ns / NS_PER_S,
            "peak_memory_bytes": None
            if option.headroom is None
            else [round(one.peak_bytes) for one in option.headroom],
            "microbatches_per_s": option.microbatches_per_s,
        },
        "interval": {"batch_latency_s": [option.low_ns / NS_PER_S, option.high_ns / NS_PER_S]},
        "fits_memory": option.fits_memory,
        "headroom_bytes": None
        if option.headroom is None
        else [None if one.bytes is None else round(one.bytes) for one in option.headroom],
        "latency_gain_fraction": option.latency_gain,
        "throughput_gain_fraction": option.throughput_gain,
        "recommended": option in plan.recommended,
        "assumptions": list(option.assumptions),
        "apply": _apply_json(plan, option),
    }


def _apply_json(plan: Plan, option: Option) -> dict[str, str]:
    """Return the change for every framework that can be told it."""
    written = {}
    for framework in EMITTERS:
        try:
            written[framework] = emit(framework, option.change, plan.baseline.setting)
        except UsageError:
            continue
    return written


def _change_json(change: Change) -> dict[str, Any]:
    every = {
        "microbatches": change.microbatches,
        "hold": change.hold if change.microbatches else None,
        "split": list(change.split) if change.split else None,
        "schedule": change.schedule,
        "chunks": change.chunks,
        "overlap": change.overlap,
    }
    return {name: value for name, value in every.items() if value is not None}


def _refused_json(one: Refused) -> dict[str, Any]:
    return {"lever": one.lever, "change": _change_json(one.change), "reason": one.reason}
