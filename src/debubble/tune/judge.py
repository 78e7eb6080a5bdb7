"""A measured run in → whether it may count: it did what it was told, and it fits memory."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from debubble.analysis import Analysis
from debubble.measure.compare import compare
from debubble.measure.measurement import Measurement
from debubble.tune.setting import Setting
from debubble.tune.trial import Kind, Outcome
from debubble.units import show_bytes

# Of the shift in time that another split should bring, less than this is none at all.
_MOVED = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class First:
    """The first run, that others are held against."""

    setting: Setting
    reading: Analysis


def judge(
    outcome: Outcome,
    setting: Setting,
    reading: Analysis | None,
    *,
    first: First | None,
    limit_bytes: int | None,
) -> Outcome:
    """Turn away a run that ignored its setting, and one that took more memory than there is."""
    if outcome.measurement is None or reading is None:
        return outcome
    ignored = [] if first is None else what_was_ignored(setting, reading, first)
    if ignored:
        said = [_say_ignored(knob, setting, outcome.measurement) for knob in ignored]
        return replace(outcome, kind=Kind.IGNORED, message="; ".join(said), ignored=tuple(ignored))
    before = None if first is None else first.reading.measurement
    over = over_memory(outcome.measurement, before, limit_bytes)
    if over:
        return replace(outcome, kind=Kind.OVER_MEMORY, message=over)
    return outcome


def what_was_ignored(setting: Setting, reading: Analysis, first: First) -> list[str]:
    """Return which of the things that were to change did not, as far as traces tell."""
    found = []
    for knob in setting.differing(first.setting):
        before = getattr(first.reading.measurement, knob, None)
        after = getattr(reading.measurement, knob, None)
        as_before = before is not None and before == after
        if knob == "split" and after is None:
            as_before = _stages_stayed(setting, reading, first)
        if as_before or contradicts(setting, knob, reading.measurement):
            found.append(knob)
    return found


def contradicts(setting: Setting, knob: str, measured: Measurement) -> bool:
    """Tell whether another number of microbatches or another split ran than was said.

    A split with another sum is none: there layers were counted otherwise.
    """
    told, came = getattr(setting, knob), getattr(measured, knob, None)
    if knob not in ("microbatches", "split") or told is None or came is None:
        return False
    if isinstance(told, tuple) and isinstance(came, tuple):
        return sum(told) == sum(came) and told != came
    return bool(told != came)


def _say_ignored(knob: str, setting: Setting, measured: Measurement) -> str:
    asked = f"{knob} {setting.written(knob)} was asked for, and"
    if contradicts(setting, knob, measured):
        return f"{asked} {Setting(**{knob: getattr(measured, knob)}).written(knob)} ran"
    return f"{asked} the measured {knob} did not change"


def _stages_stayed(setting: Setting, reading: Analysis, first: First) -> bool:
    """Tell by the time that each stage takes whether layers moved, where none are told apart."""
    told, was = setting.split, first.setting.split
    before, after = stage_shares(first.reading), stage_shares(reading)
    if told is None or was is None or not len(before) == len(after) == len(told) == len(was):
        return False
    asked = max(abs(a / sum(told) - b / sum(was)) for a, b in zip(told, was, strict=True))
    came = max(abs(a - b) for a, b in zip(after, before, strict=True))
    return came < _MOVED * asked


def stage_shares(reading: Analysis) -> list[float]:
    """Return the share of all passes' time that each stage takes."""
    passes = reading.timeline.passes
    mine = passes.where(np.isin(passes.rank, [rank.rank for rank in reading.pipeline.ranks]))
    took = (mine.end_ns - mine.start_ns).astype(np.float64)
    sums = np.bincount(mine.stage, weights=took)
    shares: list[float] = (sums / max(float(sums.sum()), 1.0)).tolist()
    return shares


def over_memory(measured: Measurement, first: Measurement | None, limit_bytes: int | None) -> str:
    """Say which rank took more than is safe, by the rule of `compare`; nothing where all fit."""
    compared = compare(first or measured, measured, limit_bytes=limit_bytes)
    for rank in compared.memory:
        left = rank.headroom_bytes
        if rank.unsafe and left is not None and rank.after_bytes is not None:
            how = f"{show_bytes(-left)} more than its limit"
            if left >= 0:
                how = f"which leaves {show_bytes(left)}: too little to be safe"
            return f"rank {rank.rank} took {show_bytes(rank.after_bytes)}, {how}"
    return ""
