"""A `Ledger` and hops in → what these take against their peers, and what repairing them saves.

The one place where a slow hop gets its price: `find`, `links` and `plan` all ask here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from debubble.ledger.ledger import Ledger
from debubble.ledger.savings import Remedies, saved_by
from debubble.links.expectation import Hop
from debubble.simulate.lengths import hop_of
from debubble.simulate.program import Lengths


def times_expected(ledger: Ledger, hop: Hop) -> float | None:
    """Return how many times as long a hop's messages mostly take as those of its peers."""
    number = _number(ledger, hop)
    times = [one.expected.wire_times[hop_of(one.step.program) == number] for one in ledger.remedies]
    found = np.concatenate(times) if times else np.zeros(0)
    return float(np.median(found)) if len(found) else None


def saved_by_repair(ledger: Ledger, hops: Sequence[Hop], share: float | None = None) -> int:
    """Replay the steps with some hops as fast as their peers, or at a share of what they take."""
    numbers = [_number(ledger, hop) for hop in hops]
    return saved_by(ledger.remedies, lambda one: one.repaired_hops(numbers, share))


def saved_by_repairs(ledger: Ledger, shares: Mapping[Hop, float | None]) -> int:
    """Replay the steps with all these hops repaired at once, each as `saved_by_repair` would."""
    numbers = {_number(ledger, hop): share for hop, share in shares.items()}

    def repaired(one: Remedies) -> Lengths:
        each = [one.repaired_hops([number], share) for number, share in numbers.items()]
        return replace(
            one.step.lengths,
            sending=np.minimum.reduce([lengths.sending for lengths in each]),
            wire=np.minimum.reduce([lengths.wire for lengths in each]),
            drain=np.minimum.reduce([lengths.drain for lengths in each]),
        )

    return saved_by(ledger.remedies, repaired)


def _number(ledger: Ledger, hop: Hop) -> int:
    names = [one.rank for one in ledger.ranks]
    return names.index(hop[0]) * len(names) + names.index(hop[1])
