"""What another context length does to a plan in → its sentence, its table and its JSON out."""

from __future__ import annotations

from typing import Any

from debubble.plan.context_length import OtherLength, Survivor
from debubble.plan.plan import Plan
from debubble.report.change import change_json, describe, show_gain
from debubble.report.headroom import headroom_json, least_left, peaks_json, short_of
from debubble.report.text import Table
from debubble.units import NS_PER_S, show_duration, show_share


def say_length(plan: Plan, other: OtherLength, tokens: float | None) -> list[str]:
    """Say what the length does to the run, and what to do then."""
    then, source = other.unchanged, plan.baseline.source
    said = (
        f"With {_length(other, tokens)} a batch takes {show_duration(then.window_ns)} "
        f"({show_duration(then.low_ns)} to {show_duration(then.high_ns)}) instead of "
        f"{show_duration(plan.baseline.window_ns)}, ranks wait {show_share(then.bubble_fraction)} "
        f"instead of {show_share(source.bubble_fraction)}; {_room(other)}."
    )
    return [said, _best(other)]


def _length(other: OtherLength, tokens: float | None) -> str:
    times = f"{other.token_scale:.3g} times as many"
    if tokens is None:
        return f"{times} tokens a microbatch"
    return f"{tokens * other.token_scale:,.0f} tokens a microbatch ({times})"


def _room(other: OtherLength) -> str:
    if other.unchanged.fits_memory is False:
        return f"it does not fit: a rank would need {short_of(other.unchanged)} more memory"
    left = least_left(other.unchanged.headroom)
    return "memory is unknown" if left is None else f"{left} of memory are left"


def _best(other: OtherLength) -> str:
    best, here = other.best, other.best_here
    if best is None:
        return "At that length no option gains more than the noise of a run."
    words = describe(best.option.change)
    gain = show_gain(best.gain, best.low, best.high)
    if best.option is here:
        return f"At that length the best is still: {words}, {gain}."
    return f"At that length the best is another: {words}, {gain}."


def length_table(other: OtherLength, tokens: float | None) -> Table:
    """Lay out every option at that length, beside its rank there."""
    table = Table(
        columns=("rank there", "option", "batch", "bubble", "throughput", "memory left", "there"),
        title=f"with {_length(other, tokens)}, against the unchanged run there",
    )
    for one in other.survivors:
        table.rows.append(
            (
                "–" if one.rank is None else str(one.rank),
                describe(one.option.change),
                show_duration(one.there.window_ns),
                f"{one.there.bubble_fraction:.0%}",
                f"{one.gain:+.1%}",
                least_left(one.there.headroom) or "unknown",
                fate(other, one),
            )
        )
    return table


def fate(other: OtherLength, one: Survivor) -> str:
    """Say in a few words what becomes of an option."""
    if one.there.fits_memory is False:
        return f"no longer fits: {short_of(one.there)} short"
    if one is other.best:
        return "still best" if one.option is other.best_here else "best there"
    if one.high < 0:
        return f"loses {-one.gain:.0%}"
    if one.guess and one.gain > 0:
        return "try"
    return "gains" if one.sure else "noise"


def length_json(plan: Plan, other: OtherLength, tokens: float | None) -> dict[str, Any]:
    """Return the same as data."""
    then = other.unchanged
    return {
        "token_scale": other.token_scale,
        "tokens": None if tokens is None else tokens * other.token_scale,
        "unchanged": {
            "numbers": {
                "bubble_fraction": then.bubble_fraction,
                "batch_latency_s": then.window_ns / NS_PER_S,
                "peak_memory_bytes": peaks_json(then),
                "microbatches_per_s": then.microbatches_per_s,
            },
            "interval": {"batch_latency_s": [then.low_ns / NS_PER_S, then.high_ns / NS_PER_S]},
            "fits_memory": then.fits_memory,
            "headroom_bytes": headroom_json(then),
        },
        "options": [
            {
                "option": plan.options.index(one.option),
                "change": change_json(one.option.change),
                "rank": one.rank,
                "numbers": {
                    "bubble_fraction": one.there.bubble_fraction,
                    "batch_latency_s": one.there.window_ns / NS_PER_S,
                    "peak_memory_bytes": peaks_json(one.there),
                },
                "throughput_gain_fraction": one.gain,
                "interval": {"throughput_gain_fraction": [one.low, one.high]},
                "fits_memory": one.there.fits_memory,
                "headroom_bytes": headroom_json(one.there),
                "recommended": one.sure,
                "fate": fate(other, one),
            }
            for one in other.survivors
        ],
        "assumptions": list(then.assumptions),
    }
