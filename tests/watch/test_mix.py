"""Traffic that moves is told from buckets that get slower."""

from __future__ import annotations

import numpy as np
import pytest

from debubble.annexes.drift import REFERENCE
from debubble.annexes.watch.mix import Mix, advance, decompose, moved


def first_moved(captures):
    mix = Mix()
    for place, counts in enumerate(captures):
        mix = advance(mix, counts)
        if moved(mix):
            return place - REFERENCE + 1
    return None


def drawn(rng, share, captures, *, requests=30, wander=None):
    for _ in range(captures):
        mine = share if wander is None else rng.dirichlet(np.array(share) * wander)
        counts = rng.multinomial(requests, mine)
        yield {512: int(counts[0]), 2048: int(counts[1]), 8192: int(counts[2])}


@pytest.mark.slow
@pytest.mark.parametrize("wander", [None, 30.0])
def test_quiet_traffic_raises_hardly_any_alarm(wander):
    rng = np.random.default_rng(5)
    captures = REFERENCE + 300
    raised = [
        first_moved(drawn(rng, (0.7, 0.2, 0.1), captures, wander=wander)) is not None
        for _ in range(60)
    ]
    assert sum(raised) <= 3  # 1 % are allowed, and three of 60 by chance


def test_traffic_that_moves_is_found_soon_even_where_shares_wander():
    rng = np.random.default_rng(6)
    delays = []
    for _ in range(40):
        before = drawn(rng, (0.8, 0.15, 0.05), REFERENCE, wander=30.0)
        after = drawn(rng, (0.3, 0.6, 0.1), 15, wander=30.0)
        delays.append(first_moved([*before, *after]))
    assert np.mean([delay is not None for delay in delays]) >= 0.95


def test_a_capture_without_requests_says_nothing():
    assert advance(Mix(), {}) == Mix()
    assert advance(Mix(), {512: 0}) == Mix()


def test_a_change_is_split_into_traffic_and_speed_exactly():
    found = decompose(
        {512: 3, 2048: 1}, {512: 1.0, 2048: 5.0}, {512: 1, 2048: 1}, {512: 2.0, 2048: 5.0}
    )
    assert found.before == pytest.approx(2.0)
    assert found.after == pytest.approx(3.5)
    assert found.traffic_moved == pytest.approx(1.0)
    assert found.buckets_slower == pytest.approx(0.5)
    assert found.after - found.before == pytest.approx(found.traffic_moved + found.buckets_slower)


def test_a_bucket_that_is_new_was_never_faster():
    found = decompose({512: 1}, {512: 1.0}, {2048: 1}, {512: 1.0, 2048: 5.0})
    assert (found.traffic_moved, found.buckets_slower) == (4.0, 0.0)
