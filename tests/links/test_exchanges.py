"""Exchanges of a slow hop: which of them its other direction made long."""

from __future__ import annotations

import numpy as np
import pytest
from support.timelines.noisy_links import Case, tell

from debubble.links.hop_times import of_other_way

# Nine of ten lie around what is usual, and one is late.
HEALTHY = np.concatenate((np.linspace(0.9, 1.1, 90), np.linspace(2.0, 7.0, 10)))


def test_an_exchange_as_slow_as_its_hop_is_of_its_hop():
    assert not of_other_way(np.array([1.9, 2.0, 2.2]), 2.0, HEALTHY).any()


def test_an_exchange_that_no_slow_message_explains_is_of_the_other_way():
    assert of_other_way(np.array([3.0]), 2.0, HEALTHY).all()


def test_an_exchange_slower_than_any_late_one_is_of_its_hop():
    assert not of_other_way(np.array([40.0]), 10.0, HEALTHY).any()


def test_without_healthy_exchanges_nothing_is_said_of_the_other_way():
    assert not of_other_way(np.array([1.0, 2.0, 9.0]), 2.0, np.zeros(0)).any()


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [4, 8])
def test_late_messages_the_other_way_are_no_price_of_a_hop_at_half_speed(ranks):
    """With tails as recorded. Counted as the hop's own they doubled the error."""
    case = Case(schedule="1f1b", ranks=ranks, microbatches=2 * ranks)
    found = []
    for seed, hop in enumerate(((1, 2), (2, 3), (2, 1), (0, 1)) * 3):
        told = tell(case, seed, hop, 2.0)
        found += [(one.cost_ns, told.true_cost_ns) for one in told.health.slow if one.hop == hop]
    said, true = np.array(found, dtype=float).T
    assert len(found) >= 10
    assert np.sqrt(np.mean((said - true) ** 2)) < 0.15 * true.mean()
