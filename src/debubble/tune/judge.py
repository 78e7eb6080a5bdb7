"""A measured run in → whether it may count: it did what it was told, and it fits memory."""

from __future__ import annotations

from dataclasses import replace

from debubble.measure.compare import compare
from debubble.measure.measurement import Measurement
from debubble.tune.setting import Setting
from debubble.tune.trial import Kind, Outcome
from debubble.units import show_bytes


def judge(
    outcome: Outcome,
    setting: Setting,
    *,
    first: tuple[Setting, Measurement] | None,
    limit_bytes: int | None,
) -> Outcome:
    """Turn away a run that ignored its setting, and one that took more memory than there is."""
    if outcome.measurement is None:
        return outcome
    ignored = [] if first is None else what_was_ignored(outcome.measurement, setting, *first)
    if ignored:
        return replace(outcome, kind=Kind.IGNORED, message="; ".join(ignored))
    over = over_memory(outcome.measurement, None if first is None else first[1], limit_bytes)
    if over:
        return replace(outcome, kind=Kind.OVER_MEMORY, message=over)
    return outcome


def what_was_ignored(
    measured: Measurement, setting: Setting, told_first: Setting, first: Measurement
) -> list[str]:
    """Say which of the things that were to change did not, as far as traces tell."""
    said = []
    for knob in setting.differing(told_first):
        before, after = getattr(first, knob, None), getattr(measured, knob, None)
        if before is not None and before == after:
            said.append(
                f"{knob} {setting.written(knob)} was asked for and did not come: "
                f"measured {Setting(**{knob: after}).written(knob)}, as before"
            )
    return said


def over_memory(measured: Measurement, first: Measurement | None, limit_bytes: int | None) -> str:
    """Say which rank took more than is safe, by the rule of `compare`; nothing where all fit."""
    compared = compare(first or measured, measured, limit_bytes=limit_bytes)
    for one in compared.memory:
        left = one.headroom_bytes
        if one.unsafe and left is not None and one.after_bytes is not None:
            how = f"{show_bytes(-left)} more than its limit"
            if left >= 0:
                how = f"which leaves {show_bytes(left)}: too little to be safe"
            return f"rank {one.rank} took {show_bytes(one.after_bytes)}, {how}"
    return ""
