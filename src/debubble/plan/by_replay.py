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
from debubble.plan.option import Idea, Option, headroom_after, held_against
from debubble.simulate.predict import FOUR_OF_FIVE, SPREAD

# What somebody can put right, whatever the schedule.
_CURES = (Cause.WORKER, Cause.DATA, Cause.IMBALANCE, Cause.HOST, Cause.HOST_SYNC)


def replayed_options(
    baseline: Baseline, ledger: Ledger | None, links: LinkHealth | None
) -> list[Option]:
    """Return what the replay prices: repaired hops, and what else can be put right."""
    if ledger is None or not ledger.replays:
        return []
    saved: list[tuple[Idea, int | None]] = []
    if links is not None:
        saved += [
            (Idea(lever="link", change=Change(repaired=hops)), links.cost_of(hops))
            for hops in repaired_together([hop.hop for hop in links.slow])
        ]
    for cause in _CURES:
        saving = ledger.saving_of(cause)
        if saving is not None:
            change = Change(by_hand=cause.about.remedied)
            saved.append((Idea(lever=str(cause), change=change), saving.saved_ns))
    wide = hypot(SPREAD, baseline.source.window_spread) * FOUR_OF_FIVE
    wide = hypot(wide, ledger.replay_error or 0.0)
    options = []
    for idea, saved_ns in saved:
        if saved_ns is not None and saved_ns > 0:
            left = 1 - saved_ns / ledger.job_latency_ns
            window_ns = baseline.window_ns * left
            option = held_against(
                baseline,
                idea,
                (window_ns, window_ns * (1 - wide), window_ns * (1 + wide)),
                bubble_fraction=max(0.0, 1 - (1 - baseline.source.bubble_fraction) / left),
                headroom=headroom_after(baseline, Change()),
                by_replay=True,
            )
            options.append(option)
    return options
