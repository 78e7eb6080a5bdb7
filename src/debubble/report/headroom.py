"""What an option leaves of memory in → words and JSON out."""

from __future__ import annotations

from collections.abc import Sequence

from debubble.plan.option import Headroom, Option
from debubble.units import show_bytes


def least_left(ranks: Sequence[Headroom] | None) -> str | None:
    """Return what the fullest rank has left; None where that is not known."""
    least = _least(ranks)
    return None if least is None else show_bytes(least)


def short_of(option: Option) -> str:
    """Return what the fullest rank lacks."""
    return show_bytes(max(0.0, -(_least(option.headroom) or 0.0)))


def _least(ranks: Sequence[Headroom] | None) -> float | None:
    left = [one.bytes for one in ranks or () if one.bytes is not None]
    return min(left) if left else None


def headroom_json(option: Option) -> list[int | None] | None:
    """Return what each rank has left."""
    if option.headroom is None:
        return None
    return [None if one.bytes is None else round(one.bytes) for one in option.headroom]


def peaks_json(option: Option) -> list[int] | None:
    """Return the peak of each rank."""
    return None if option.headroom is None else [round(one.peak_bytes) for one in option.headroom]
