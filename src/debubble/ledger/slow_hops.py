"""A `Ledger` in → the hops that are slower than their peers, and what repairing some would save."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from debubble.ledger.ledger import Ledger
from debubble.ledger.savings import saved_by
from debubble.simulate.lengths import hop_of

# A hop whose messages mostly take so many times what its peers take is slow, not just unsteady.
SLOW = 1.5

Hop = tuple[int, int]
"""The rank that sends and the rank that receives."""


def slow_hops(ledger: Ledger) -> dict[Hop, float]:
    """Return the slow hops, and how many times as long their messages take as they should."""
    names = [one.rank for one in ledger.ranks]
    numbers = {int(hop) for step in ledger.steps for hop in np.unique(hop_of(step.program))}
    hops = [(names[one // len(names)], names[one % len(names)]) for one in sorted(numbers)]
    return {hop: times for hop in hops if (times := times_expected(ledger, hop)) >= SLOW}


def times_expected(ledger: Ledger, hop: Hop) -> float:
    """Return how many times as long a hop's messages mostly take as they should."""
    number = _number(ledger, hop)
    shares = [one.expected.of_hop[hop_of(one.step.program) == number] for one in ledger.remedies]
    return float(1 / np.median(np.concatenate(shares)))


def saved_by_repair(ledger: Ledger, hops: Sequence[Hop]) -> int:
    """Replay the steps with some hops as fast as their peers."""
    numbers = [_number(ledger, hop) for hop in hops]
    return saved_by(ledger.remedies, lambda one: one.repaired_hops(numbers))


def _number(ledger: Ledger, hop: Hop) -> int:
    names = [one.rank for one in ledger.ranks]
    return names.index(hop[0]) * len(names) + names.index(hop[1])
