"""A `Plan` in → what `debubble plan` prints out, as text or JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from debubble.errors import Gap, UsageError
from debubble.plan.change import Change
from debubble.plan.emit import EMITTERS, emit
from debubble.plan.option import Option
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
    page.findings = _findings(plan)
    page.tables = [_option_table(plan), *([_refused_table(plan)] if plan.refused else [])]
    page.notes = _notes(plan)
    if framework is not None and plan.recommended:
        page.notes += ["", *_applied(plan, plan.recommended[0], framework)]
    page.gaps = list(gaps)
    page.next_command = next_command
    return page


def _answer(plan: Plan, bottleneck: str) -> str:
    if bottleneck:
        return f"{bottleneck[:1].upper()}{bottleneck[1:]}."
    if not plan.recommended:
        return "Nothing to change: no option gains more than the noise of a run."
    best = plan.recommended[0]
    before = show_duration(plan.baseline.source.window_ns)
    return (
        f"{_sentence(best.change)}: {_gain(best)} throughput, "
        f"a batch in {show_duration(best.window_ns)} instead of {before}."
    )


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
    if change.token_scale is not None:
        parts.append(f"{change.token_scale:.3g} times as many tokens")
    return ", ".join(parts) or "nothing changed"


def _gain(option: Option) -> str:
    low, high = option.throughput_low, option.throughput_high
    return f"{option.throughput_gain:+.0%} ({low:+.0%} to {high:+.0%})"


def _findings(plan: Plan) -> list[str]:
    """Say the best of each lever."""
    said, seen = [], set()
    for option in plan.recommended[1:]:
        if option.lever not in seen:
            seen.add(option.lever)
            said.append(f"{_sentence(option.change)}: {_gain(option)}.")
    if plan.overlap is not None and plan.overlap.slowdown is None:
        said.append(
            "Transfers beside compute: unknown, try it; it pays while compute slows by less than "
            f"{plan.overlap.break_even - 1:.0%}."
        )
    return said


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
                "yes"
                if option in plan.recommended
                else "noise"
                if option.throughput_low <= 0.01
                else "try",
            )
        )
    return table


def _advice(plan: Plan, option: Option) -> str:
    if option in plan.recommended:
        return "yes"
    return "try" if option.lever == "overlap" else "within noise"


def _memory_left(option: Option) -> str:
    left = [one.bytes for one in option.headroom or () if one.bytes is not None]
    return show_bytes(min(left)) if left else "unknown"


def _refused_table(plan: Plan) -> Table:
    table = Table(columns=("refused", "why"))
    table.rows += [(describe(one.change), one.reason) for one in plan.refused]
    return table


def _notes(plan: Plan) -> list[str]:
    notes = sorted({said for option in plan.options for said in option.assumptions})
    notes = [f"assumed: {said}" for said in notes]
    if plan.partition is not None and plan.partition.lower_bound_s is not None:
        bound = show_duration(plan.partition.lower_bound_s * NS_PER_S)
        proof = "no split is quicker" if plan.partition.exact else "the quickest split found"
        split = ",".join(map(str, plan.partition.split))
        notes.append(f"split {split}: {proof}; none of this schedule can be under {bound}")
    return notes


def _applied(plan: Plan, option: Option, framework: str) -> list[str]:
    return [
        f"for {framework}:",
        *emit(framework, option.change, plan.baseline.setting).splitlines(),
    ]


def plan_json(plan: Plan, bottleneck: str, gaps: Sequence[Gap]) -> dict[str, Any]:
    """Return the plan as data."""
    source = plan.baseline.source
    step = source.window_ns + source.outside_ns
    return {
        "schema": SCHEMA,
        "baseline": {
            "schedule": plan.baseline.schedule,
            "split": list(source.split) if source.split else None,
            "numbers": {
                "bubble_fraction": source.bubble_fraction,
                "batch_latency_s": source.window_ns / NS_PER_S,
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
        "change": change_json(option.change),
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


def change_json(change: Change) -> dict[str, Any]:
    """Return what changes; what stays is left out."""
    every = {
        "microbatches": change.microbatches,
        "hold": change.hold if change.microbatches else None,
        "split": list(change.split) if change.split else None,
        "schedule": change.schedule,
        "chunks": change.chunks,
        "overlap": change.overlap,
        "token_scale": change.token_scale,
    }
    return {name: value for name, value in every.items() if value is not None}


def _refused_json(one: Refused) -> dict[str, Any]:
    return {"lever": one.lever, "change": change_json(one.change), "reason": one.reason}
