"""A `Change` in → its words and its JSON out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from debubble.plan.change import Change
from debubble.units import counted


def describe(change: Change) -> str:
    """Say a change in words."""
    parts = []
    if change.repaired:
        parts.append(f"repair {name_hops(change.repaired)}")
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
    if change.recompute is not None:
        parts.append("activations recomputed" if change.recompute else "activations kept")
    if change.token_scale is not None:
        parts.append(f"{change.token_scale:.3g} times as many tokens")
    return ", ".join(parts) or "nothing changed"


def sentence(change: Change) -> str:
    """Begin a sentence with a change."""
    words = describe(change)
    return f"{words[:1].upper()}{words[1:]}"


def name_hops(hops: Sequence[tuple[int, int]]) -> str:
    """Name a hop, or both ways between two ranks."""
    names = " and ".join(f"{here}:{there}" for here, there in hops)
    return f"hops {names}" if len(hops) > 1 else f"hop {names}"


def show_gain(middle: float, low: float, high: float) -> str:
    """Write a gain with what four of five lie in."""
    return f"{middle:+.0%} ({low:+.0%} to {high:+.0%})"


def change_json(change: Change) -> dict[str, Any]:
    """Return what changes; what stays is left out."""
    every = {
        "microbatches": change.microbatches,
        "hold": change.hold if change.microbatches else None,
        "split": list(change.split) if change.split else None,
        "schedule": change.schedule,
        "chunks": change.chunks,
        "overlap": change.overlap,
        "recompute": change.recompute,
        "repaired_hops": [list(hop) for hop in change.repaired] if change.repaired else None,
        "token_scale": change.token_scale,
    }
    return {name: value for name, value in every.items() if value is not None}
