"""A `Ledger` and a hop in → what the hop takes against its peers, and what repairing it buys.

The one place where a slow hop gets its price: `find` and `links` agree because both ask here.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import numpy as np

from debubble.ledger.ledger import Ledger
from debubble.ledger.savings import Remedies, run_together
from debubble.links.expectation import Hop
from debubble.simulate.engine import Engine
from debubble.simulate.lengths import hop_of
from debubble.simulate.program import Lengths


def saved_by(ledger: Ledger, remedy: Callable[[Remedies], Lengths]) -> int:
    """Replay every step with something put right; return what that saves, the median."""
    saved = []
    for one in ledger.remedies:
        before, after = run_together(Engine(one.step.program), [one.step.lengths, remedy(one)])
        saved.append(before - after)
    return round(median(saved))


def saved_by_repair(ledger: Ledger, hop: Hop, share: float | None = None) -> int:
    """Return what a batch would save with a hop as fast as its peers, or a share of what it is."""
    number = _number(ledger, hop)
    return saved_by(ledger, lambda one: one.repaired_hop(number, share))


def times_expected(ledger: Ledger, hop: Hop) -> float | None:
    """Return how many times as long a hop's messages mostly take as those of its peers."""
    number = _number(ledger, hop)
    shares = [one.expected.of_hop[hop_of(one.step.program) == number] for one in ledger.remedies]
    found = np.concatenate(shares) if shares else np.zeros(0)
    return float(1 / np.median(found)) if len(found) else None


def _number(ledger: Ledger, hop: Hop) -> int:
    names = [one.rank for one in ledger.ranks]
    return names.index(hop[0]) * len(names) + names.index(hop[1])
