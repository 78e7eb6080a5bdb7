"""The lever of a link: slow hops repaired, so that their messages travel as those of others do.

`find` replays the measured steps with the hop's messages shortened; here the run is foretold, with
messages drawn from those of the other hops, tails and all. A repaired hop has bad moments, too: so
it saves less than the replay says, which is kept beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from debubble.costs.wire_pools import WirePools, pool_wires
from debubble.ledger.ledger import Ledger
from debubble.ledger.repair import saved_by_repair
from debubble.links.classes import wires_between
from debubble.links.expectation import Hop
from debubble.links.hop_times import time_hops
from debubble.links.judge import judge_hops
from debubble.plan.baseline import Baseline
from debubble.plan.change import Change
from debubble.plan.option import Idea, Option, weigh
from debubble.timeline.hops import measure_hops
from debubble.timeline.keep import only_steps
from debubble.timeline.model import Timeline


@dataclass(frozen=True, slots=True, kw_only=True)
class Repair:
    """What repairing a link would buy: one hop, or both ways between two ranks."""

    option: Option
    baseline: Baseline
    """The run with the link repaired, for other levers to be weighed on."""
    times_expected: float
    """How many times as long messages take as they should, on the slower way."""
    replayed_ns: int | None
    """What `find` says it saves, by replaying the measured steps; None where it cannot."""


def repairs(baseline: Baseline, timeline: Timeline, ledger: Ledger | None) -> list[Repair]:
    """Weigh the repair of each slow link alone; the one that buys most first."""
    slow = _slow(baseline, timeline)
    found = []
    for link in dict.fromkeys(frozenset(hop) for hop in slow):
        hops = tuple(hop for hop in slow if set(hop) == link)
        mended = mend(baseline, timeline, hops)
        found.append(
            Repair(
                option=weigh(mended, Idea(lever="link", change=Change(repaired=hops))),
                baseline=mended,
                times_expected=max(slow[hop] for hop in hops),
                replayed_ns=saved_by_repair(ledger, hops) if ledger and ledger.replays else None,
            )
        )
    return sorted(found, key=lambda one: -one.option.throughput_gain)


def mend(baseline: Baseline, timeline: Timeline, hops: Sequence[Hop]) -> Baseline:
    """Return the run with hops, by their ranks, that are as their peers are."""
    names = [rank.rank for rank in baseline.ranks]
    places = {(names.index(here), names.index(there)) for here, there in hops}
    wires = baseline.source.wires
    if not places <= set(wires.slow):
        wires = _without(baseline, timeline, hops)
    slow = {hop: times for hop, times in wires.slow.items() if hop not in places}
    return replace(baseline, source=replace(baseline.source, wires=replace(wires, slow=slow)))


def _without(baseline: Baseline, timeline: Timeline, hops: Sequence[Hop]) -> WirePools:
    """Pool messages again without those of some hops, which will be otherwise."""
    kept = only_steps(timeline, baseline.source.steps)
    moved = kept.transfers
    mine = np.zeros(len(moved.source), dtype=bool)
    for here, there in hops:
        mine |= (moved.source == here) & (moved.destination == there)
    others = replace(kept, transfers=moved.where(~mine))
    pools = pool_wires(others, baseline.ranks[0].pipeline)
    return replace(pools, other=baseline.source.wires.other)


def _slow(baseline: Baseline, timeline: Timeline) -> dict[Hop, float]:
    """Return the hops that `links` calls slow, and those that this run is foretold with as slow."""
    names = [rank.rank for rank in baseline.ranks]
    slow = {
        (names[here], names[there]): times
        for (here, there), times in baseline.source.wires.slow.items()
    }
    kept = only_steps(timeline, baseline.source.steps)
    timed = time_hops(kept, measure_hops(kept, baseline.ranks))
    judged = judge_hops(timed, wires=wires_between(baseline.ranks), classes={}, history={})
    return slow | {hop: one.times or 1.0 for hop, one in judged.items() if one.slow}
