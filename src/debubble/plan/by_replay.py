"""A run that its own simulation misses → what its replay prices all the same.

The replay moves what was measured and models nothing: it lands on the run where the simulation does
not. What it can put right (hops, hosts, devices, unequal stages) it prices.
"""

from __future__ import annotations

from math import hypot

from debubble.ledger.causes import Cause
from debubble.ledger.hop_health import LinkHealth, repaired_together
from debubble.ledger.ledger import Ledger
from debubble.plan.baseline import Baseline
from debubble.plan.change import Change
from debubble.plan.option import Idea, Option, headroom_after
from debubble.simulate.predict import FOUR_OF_FIVE, SPREAD
from debubble.units import NS_PER_S

# What somebody can put right, whatever the schedule.
_CURES = (Cause.WORKER, Cause.DATA, Cause.IMBALANCE, Cause.HOST, Cause.HOST_SYNC)


def replayed_options(
    baseline: Baseline, ledger: Ledger | None, links: LinkHealth | None
) -> list[Option]:
    """Return what the replay prices: repaired hops, and what else can be put right."""
    if ledger is None or not ledger.replays:
        return []
    slow = [hop.hop for hop in links.slow] if links else []
    saved = [
        (Idea(lever="link", change=Change(repaired=hops)), links.cost_of(hops))
        for hops in repaired_together(slow)
        if links is not None
    ]
    for cause in _CURES:
        saving = ledger.saving_of(cause)
        if saving is not None:
            change = Change(by_hand=cause.about.remedied)
            saved.append((Idea(lever=str(cause), change=change), saving.saved_ns))
    return [
        _option(baseline, ledger, idea, saved_ns)
        for idea, saved_ns in saved
        if saved_ns is not None and saved_ns > 0
    ]


def _option(baseline: Baseline, ledger: Ledger, idea: Idea, saved_ns: int) -> Option:
    source, headroom = baseline.source, headroom_after(baseline, Change())
    left = 1 - saved_ns / ledger.job_latency_ns
    wide = hypot(SPREAD, source.window_spread) * FOUR_OF_FIVE
    wide = hypot(wide, ledger.replay_error or 0.0)
    windows = [baseline.window_ns * left * times for times in (1.0, 1 - wide, 1 + wide)]
    now = baseline.window_ns + source.outside_ns
    gains = [now / (window + source.outside_ns) - 1 for window in windows]
    return Option(
        idea=idea,
        window_ns=round(windows[0]),
        low_ns=round(windows[1]),
        high_ns=round(windows[2]),
        bubble_fraction=max(0.0, 1 - (1 - source.bubble_fraction) / left),
        microbatches_per_s=source.microbatches / (windows[0] + source.outside_ns) * NS_PER_S,
        headroom=headroom,
        latency_gain=1 - left,
        throughput_gain=gains[0],
        throughput_low=gains[2],
        throughput_high=gains[1],
        assumptions=(),
        by_replay=True,
    )
