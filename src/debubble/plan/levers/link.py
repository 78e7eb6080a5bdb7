"""The lever of a link: slow hops repaired, so that their messages travel as those of others do.

`find` replays the measured steps with the hop's messages shortened; here the run is predicted, with
messages drawn from those of the other hops, tails and all. A repaired hop has bad moments, too: so
it saves less than the replay says, which is kept beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from debubble.costs.wire_pools import WirePools, pool_wires
from debubble.ledger.hop_health import LinkHealth
from debubble.links.hop_times import Hop
from debubble.plan.baseline import Baseline
from debubble.plan.change import Change
from debubble.plan.lever import Lever, Start
from debubble.plan.option import Idea, Option, weigh
from debubble.timeline.model import Timeline
from debubble.timeline.steps import only_steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Repair:
    """What a repair would buy: of a link, both ways; of all of a rank; of all there are."""

    option: Option
    baseline: Baseline
    """The run with the link repaired, for other levers to be weighed on."""
    times_expected: float
    """How many times as long messages take as they should, on the slower way."""
    replayed_ns: int | None
    """What `find` says it saves, by replaying the measured steps; None where it cannot."""


def repairs(baseline: Baseline, timeline: Timeline, links: LinkHealth | None) -> list[Repair]:
    """Weigh the repair of each slow link alone, of a rank's, and of all; what buys most first.

    A card or a slot that is ill slows all hops of its rank: repairing one of them gains nothing.
    """
    slow = {hop.hop: hop for hop in links.slow} if links else {}
    pairs = dict.fromkeys(frozenset(hop) for hop in slow)
    together = [tuple(hop for hop in slow if set(hop) == pair) for pair in pairs]
    ranks = sorted({rank for pair in pairs for rank in pair})
    together += [tuple(hop for hop in slow if rank in hop) for rank in ranks]
    together.append(tuple(slow))
    found = []
    for hops in dict.fromkeys(hops for hops in together if hops):
        mended = mend(baseline, timeline, hops)
        found.append(
            Repair(
                option=weigh(mended, Idea(lever="link", change=Change(repaired=hops))),
                baseline=mended,
                times_expected=max(slow[hop].judgement.times or 1.0 for hop in hops),
                replayed_ns=links.cost_of(hops) if links else None,
            )
        )
    return sorted(found, key=lambda repair: -repair.option.throughput_gain)


def mend(baseline: Baseline, timeline: Timeline, hops: Sequence[Hop]) -> Baseline:
    """Return the run with hops, by their ranks, that are as their peers are."""
    names = [rank.rank for rank in baseline.ranks]
    mended = {(names.index(here), names.index(there)) for here, there in hops}
    wires = baseline.source.wires
    if not mended <= set(wires.slow):
        wires = _without(baseline, timeline, hops)
    slow = {hop: times for hop, times in wires.slow.items() if hop not in mended}
    wires = replace(wires, slow=slow)
    return replace(baseline, source=replace(baseline.source, wires=wires, repaired=True))


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


def ideas(start: Start) -> list[Repair]:
    """Return the repairs of slow links, weighed."""
    return repairs(start.baseline, start.timeline, start.links)


def words(change: Change) -> str:
    """Name the hops that are repaired."""
    return f"repair {name_hops(change.repaired)}" if change.repaired else ""


def name_hops(hops: Sequence[Hop]) -> str:
    """Name a hop, both ways between two ranks, or several hops of one rank."""
    names = " and ".join(f"{here}:{there}" for here, there in hops)
    shared = frozenset.intersection(*map(frozenset, hops))
    if len(shared) == 1 and len(hops) > 1:
        return f"all slow hops of rank {min(shared)}, {names}"
    return f"hops {names}" if len(hops) > 1 else f"hop {names}"


LEVER = Lever(key="link", position=10, ideas=ideas, words=words)
