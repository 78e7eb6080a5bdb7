"""The lever of a link: slow hops repaired, so that their messages travel as those of others do.

What it buys is what `find` says: the measured steps replayed with the hop's messages as long as
those of its peers. Other levers are weighed on the run so repaired, which is simulated: it is tied
to what the replay takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from debubble.ledger.hop_health import LinkHealth, repaired_together
from debubble.links.hop_times import Hop
from debubble.plan.baseline import Baseline
from debubble.plan.change import Change
from debubble.plan.lever import Lever, Start
from debubble.plan.option import Idea, Option, predict_idea, weigh


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


def repairs(baseline: Baseline, links: LinkHealth | None) -> list[Repair]:
    """Weigh the repair of each slow link alone, of a rank's, and of all; what buys most first."""
    slow = {hop.hop: hop for hop in links.slow} if links else {}
    options = []
    for hops in repaired_together(list(slow)):
        saved_ns = links.cost_of(hops) if links else None
        idea = Idea(lever="link", change=Change(repaired=hops))
        mended = mend(baseline, hops)
        predicted = predict_idea(mended, idea)
        option = weigh(mended, idea, predicted)
        if links is not None and saved_ns is not None and links.batch_latency_ns:
            wanted = baseline.window_ns * (1 - saved_ns / links.batch_latency_ns)
            tied = mended.correction * wanted / option.window_ns
            mended = replace(mended, correction=tied)
            option = weigh(mended, idea, predicted)
        options.append(
            Repair(
                option=option,
                baseline=mended,
                times_expected=max(slow[hop].judgement.times or 1.0 for hop in hops),
                replayed_ns=saved_ns,
            )
        )
    return sorted(options, key=lambda repair: -repair.option.throughput_gain)


def mend(baseline: Baseline, hops: Sequence[Hop]) -> Baseline:
    """Return the run with hops, by their ranks, that are as their peers are."""
    names, wires = [rank.rank for rank in baseline.ranks], baseline.source.wires
    mended = {(names.index(here), names.index(there)) for here, there in hops}
    slow = {hop: own for hop, own in wires.slow.items() if hop not in mended}
    source = replace(baseline.source, wires=replace(wires, slow=slow), repaired=True)
    return replace(baseline, source=source)


def ideas(start: Start) -> list[Repair]:
    """Return the repairs of slow links, weighed."""
    return repairs(start.baseline, start.links)


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
