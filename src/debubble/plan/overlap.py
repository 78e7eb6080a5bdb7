"""The lever of overlap: transfers beside compute, which may slow compute down.

What it does to compute is in the trace only where something overlapped. Else nobody knows: then it
is said so, with the slowdown at which it would no longer pay.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from debubble.plan.baseline import Baseline
from debubble.plan.change import Change
from debubble.plan.option import Idea, Option, weigh
from debubble.plan.quick import quick_latency_s
from debubble.simulate.communication import Communication, usual_communication
from debubble.timeline.model import F64, I64, Flags, Passes, Timeline

# Fewer passes with and without are no comparison.
_FEWEST = 4
# Of a pass, under a transfer, for it to count as overlapped; and for it not to.
_MOSTLY, _HARDLY = 0.5, 0.05
_HALVINGS = 8
# Nobody would try more.
_MOST = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """What overlap would buy."""

    option: Option
    slowdown: float | None
    """Of compute under transfers, as the trace shows; None where nothing overlapped."""
    break_even: float
    """The slowdown at which nothing is gained."""


def consider(baseline: Baseline, timeline: Timeline) -> Overlap | None:
    """Weigh overlap; None where transfers already run beside compute."""
    waits = {Communication.FUSED, Communication.POSTED}
    if usual_communication(baseline.schedule) not in waits:
        return None
    slowdown = measure_slowdown(timeline, baseline)
    option = _with_slowdown(baseline, slowdown or 1.0, say_slowdown(slowdown))
    return Overlap(option=option, slowdown=slowdown, break_even=_break_even(baseline))


def say_slowdown(slowdown: float | None) -> str:
    """Say what is known of compute under transfers."""
    if slowdown is None:
        return "nothing overlaps in this run: what it does to compute is unknown, try it"
    return f"compute takes {slowdown:.2f} times as long under transfers, as seen in this run"


def measure_slowdown(timeline: Timeline, baseline: Baseline) -> float | None:
    """Compare passes of one class that ran under a transfer of their rank with those that did not.

    Waiting is no transfer: a message counts from when both sides are there.
    """
    passes, transfers = timeline.passes, timeline.transfers
    ratios = []
    begun = np.maximum(transfers.send_start_ns, transfers.receive_start_ns)
    for rank in baseline.ranks:
        touches = (transfers.source == rank.rank) | (transfers.destination == rank.rank)
        mine = passes.where(passes.rank == rank.rank)
        share = _share_under(mine, begun[touches], transfers.receive_end_ns[touches])
        for stage, kind in set(zip(mine.stage.tolist(), mine.kind.tolist(), strict=True)):
            alike: Flags = (mine.stage == stage) & (mine.kind == kind) & (mine.microbatch > 0)
            under, free = alike & (share > _MOSTLY), alike & (share < _HARDLY)
            if min(under.sum(), free.sum()) >= _FEWEST:
                length = mine.end_ns - mine.start_ns
                ratios.append(float(np.median(length[under]) / np.median(length[free])))
    return float(np.median(ratios)) if ratios else None


def _share_under(passes: Passes, begun: I64, over: I64) -> F64:
    """Return how much of each pass lies under some messages."""
    first = np.maximum(passes.start_ns[:, None], begun[None])
    covered = np.maximum(np.minimum(passes.end_ns[:, None], over[None]) - first, 0).sum(axis=1)
    share: F64 = covered / np.maximum(passes.end_ns - passes.start_ns, 1)
    return share


def _with_slowdown(baseline: Baseline, slowdown: float, said: str) -> Option:
    idea = Idea(
        lever="overlap", change=Change(overlap=True), assumptions=(said,), slowdown=slowdown
    )
    return weigh(baseline, idea)


def _break_even(baseline: Baseline) -> float:
    """Return the slowdown of compute at which overlap gains nothing, by means alone."""
    now = quick_latency_s(baseline, Change())
    low, high = 1.0, 1.0
    while quick_latency_s(baseline, Change(overlap=True), slowdown=high) < now and high < _MOST:
        low, high = high, high * 1.25
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        gains = quick_latency_s(baseline, Change(overlap=True), slowdown=middle) < now
        low, high = (middle, high) if gains else (low, middle)
    return (low + high) / 2
