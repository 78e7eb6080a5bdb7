"""A `Plan` in → what `debubble plan` prints out, as text or JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from debubble.errors import Gap, UsageError
from debubble.plan.change import Change
from debubble.plan.context_length import OtherLength
from debubble.plan.emit import EMITTERS, emit
from debubble.plan.link import Repair
from debubble.plan.option import Option, headroom_after
from debubble.plan.overlap import Overlap
from debubble.plan.plan import WORTH_A_TRY, Plan
from debubble.plan.schedule import Refused
from debubble.report.change import change_json, describe, name_hops, sentence, show_gain
from debubble.report.headroom import headroom_json, least_left, peaks_json
from debubble.report.inspect import gap_json
from debubble.report.plan_cache import cache_json, cache_table, say_cache
from debubble.report.plan_length import length_json, length_table, say_length
from debubble.report.text import Page, Table
from debubble.units import NS_PER_S, show_bytes, show_duration

SCHEMA = "debubble.plan/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A plan, and what else was asked of it."""

    plan: Plan
    bottleneck: str = ""
    """A sentence, where the bubble is not the bottleneck."""
    gaps: tuple[Gap, ...] = ()
    length: OtherLength | None = None
    tokens: float | None = None
    """Of a measured microbatch, where they were said."""


def plan_page(planned: Planned, framework: str | None, next_command: str) -> Page:
    """Lay out the plan: what to do, then all options, then what was refused."""
    plan, bottleneck = planned.plan, planned.bottleneck
    page = Page(answer=_answer(plan, bottleneck))
    page.findings = _findings(plan, plan.recommended if bottleneck else plan.recommended[1:])
    if plan.options:
        page.tables.append(_option_table(plan))
    if planned.length is not None:
        page.findings += say_length(plan, planned.length, planned.tokens)
        page.tables.append(length_table(planned.length, planned.tokens))
    if plan.cache is not None:
        page.findings.append(say_cache(plan, plan.cache))
        page.tables.append(cache_table(plan, plan.cache))
    if plan.refused:
        page.tables.append(_refused_table(plan))
    page.notes = _notes(planned)
    if framework is not None:
        page.notes += ["", *_applied(plan, framework)]
    page.gaps = list(planned.gaps)
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
        f"{sentence(best.change)}: {_gain(best)} throughput, "
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


def _gain(option: Option) -> str:
    return show_gain(option.throughput_gain, option.throughput_low, option.throughput_high)


def _findings(plan: Plan, others: Sequence[Option]) -> list[str]:
    """Say the best of each lever."""
    said, seen = [], set()
    for option in others:
        if option.lever not in seen:
            seen.add(option.lever)
            said.append(f"{sentence(option.change)}: {_gain(option)}.")
    said += [_repair(plan, one) for one in plan.repairs if one.option not in plan.recommended]
    if plan.overlap is not None and plan.overlap.option.fits_memory is not False:
        said += _overlap(plan.overlap)
    return said


def _repair(plan: Plan, repair: Repair) -> str:
    """Say of a slow hop that repairing it buys nothing sure."""
    option = repair.option
    link = name_hops(option.change.repaired or ())
    takes = "take" if len(option.change.repaired or ()) > 1 else "takes"
    saved = show_duration(max(0, plan.baseline.window_ns - option.window_ns))
    return (
        f"{link[:1].upper()}{link[1:]} {takes} {repair.times_expected:.1f} times as long as "
        f"others, and repairing buys little: {saved} of {show_duration(plan.baseline.window_ns)}, "
        f"{_gain(option)}: within the noise of a run."
    )


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
        columns=("option", "batch", "four of five in", "bubble", "throughput", "memory left", "do"),
        title="options, by throughput",
    )
    baseline = plan.baseline
    table.rows.append(
        (
            "as it is",
            show_duration(baseline.window_ns),
            "",
            f"{baseline.source.bubble_fraction:.0%}",
            "",
            least_left(headroom_after(baseline, Change())) or "unknown",
            "",
        )
    )
    for option in plan.options:
        table.rows.append(
            (
                describe(option.change),
                show_duration(option.window_ns),
                f"{show_duration(option.low_ns)} - {show_duration(option.high_ns)}",
                f"{option.bubble_fraction:.0%}",
                f"{option.throughput_gain:+.1%}",
                least_left(option.headroom) or "unknown",
                _advice(plan, option),
            )
        )
    return table


def _advice(plan: Plan, option: Option) -> str:
    if option in plan.recommended:
        return "yes"
    if plan.is_guess(option):
        return "try" if option.throughput_gain > 0 else "no"
    if option.throughput_gain >= WORTH_A_TRY:
        return "maybe"
    return "no" if option.throughput_high < 0 else "noise"


def _refused_table(plan: Plan) -> Table:
    table = Table(columns=("refused", "why"))
    table.rows += [(_refused_name(one), one.reason) for one in plan.refused]
    return table


def _refused_name(one: Refused) -> str:
    if one.lever == "split" and one.change.split is None:
        return "another split"
    if one.lever == "kv_cache":
        return "room for a KV cache"
    return describe(one.change)


def _notes(planned: Planned) -> list[str]:
    plan, length = planned.plan, planned.length
    assumed = {said for option in plan.options for said in option.assumptions}
    assumed |= set(length.unchanged.assumptions if length else ())
    assumed |= set(plan.cache.assumptions if plan.cache else ())
    notes = [f"assumed: {said}" for said in sorted(assumed)]
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
    """Write the best option that a framework can be told; where none is sure, the best there is."""
    reason = ""
    for option in (*plan.recommended, *plan.unsure):
        try:
            text = emit(framework, option.change, plan.baseline.setting)
        except UsageError as error:
            reason = reason or error.message
            continue
        comments = [f"# the options before it cannot be written: {reason}"] if reason else []
        if option in plan.unsure:
            comments.append(f"# this one may be within the noise of a run: {_gain(option)}")
        return [f"for {framework}, {describe(option.change)}:", *comments, *text.splitlines()]
    return [f"for {framework}: nothing to write ({reason or 'no option gains'})"]


def plan_json(planned: Planned) -> dict[str, Any]:
    """Return the plan as data."""
    plan, bottleneck, source = planned.plan, planned.bottleneck, planned.plan.baseline.source
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
        "hops": [
            {
                "from_rank": one.hop[0],
                "to_rank": one.hop[1],
                "times_expected": one.times_expected,
                "verdict": str(one.judgement.verdict),
                "times": one.judgement.times,
                "cost_per_batch_s": None if one.cost_ns is None else one.cost_ns / NS_PER_S,
            }
            for one in (plan.links.hops if plan.links else ())
        ],
        "options": [_option_json(plan, option) for option in plan.options],
        "refused": [_refused_json(one) for one in plan.refused],
        "lower_bound_s": plan.partition.lower_bound_s if plan.partition else None,
        "overlap": None
        if plan.overlap is None
        else {"slowdown": plan.overlap.slowdown, "break_even": plan.overlap.break_even},
        "context_length": length_json(plan, planned.length, planned.tokens)
        if planned.length
        else None,
        "kv_cache": cache_json(plan, plan.cache) if plan.cache else None,
        "bottleneck": bottleneck or None,
        "verdict": _answer(plan, bottleneck),
        "warnings": [gap_json(gap) for gap in planned.gaps],
    }


def _option_json(plan: Plan, option: Option) -> dict[str, Any]:
    return {
        "lever": option.lever,
        "change": change_json(option.change),
        "numbers": {
            "bubble_fraction": option.bubble_fraction,
            "batch_latency_s": option.window_ns / NS_PER_S,
            "peak_memory_bytes": peaks_json(option),
            "microbatches_per_s": option.microbatches_per_s,
        },
        "interval": {
            "batch_latency_s": [option.low_ns / NS_PER_S, option.high_ns / NS_PER_S],
            "throughput_gain_fraction": [option.throughput_low, option.throughput_high],
        },
        "fits_memory": option.fits_memory,
        "headroom_bytes": headroom_json(option),
        "latency_gain_fraction": option.latency_gain,
        "throughput_gain_fraction": option.throughput_gain,
        "recommended": option in plan.recommended,
        "link": _link_json(plan, option),
        "assumptions": list(option.assumptions),
        "apply": _apply_json(plan, option),
    }


def _link_json(plan: Plan, option: Option) -> dict[str, Any] | None:
    """Return what is known of a slow link; `find` replays, which is another question."""
    repair = next((one for one in plan.repairs if one.option is option), None)
    if repair is None:
        return None
    return {
        "times_expected": repair.times_expected,
        "replay_saved_s": None if repair.replayed_ns is None else repair.replayed_ns / NS_PER_S,
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


def _refused_json(one: Refused) -> dict[str, Any]:
    return {"lever": one.lever, "change": change_json(one.change), "reason": one.reason}
