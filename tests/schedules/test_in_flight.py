"""Microbatches in flight: counted, against closed forms and torch's own orders."""

from __future__ import annotations

from itertools import product

import pytest

from debubble.timeline.schedules import hold, order_of

SIZES = list(product(range(2, 7), range(1, 25)))


def most_in_flight(order):
    return tuple(int(hold(actions).in_flight.sum(axis=1).max()) for actions in order)


@pytest.mark.parametrize(("p", "m"), SIZES)
def test_one_stage_a_rank_holds_all_of_gpipe_and_as_many_as_lie_ahead_of_1f1b(p, m):
    assert most_in_flight(order_of("gpipe", p, m)) == (m,) * p
    assert most_in_flight(order_of("forward-only", p, m)) == (m,) * p
    assert most_in_flight(order_of("1f1b", p, m)) == tuple(min(m, p - r) for r in range(p))


@pytest.mark.parametrize(("p", "v", "rounds"), list(product(range(2, 7), (2, 3), (1, 2, 3, 4))))
def test_interleaving_holds_more_chunks(p, v, rounds):
    m = p * rounds
    expected = tuple(min(m * v, (p - r - 1) * 2 + (v - 1) * p + 1) for r in range(p))
    assert most_in_flight(order_of("interleaved-1f1b", p, m, v)) == expected


@pytest.mark.parametrize("p", range(2, 7))
def test_split_backward_passes_hold_two_chunks_for_each_rank(p):
    m = 4 * p
    assert most_in_flight(order_of("zbv", p, m)) == (2 * p,) * p
    assert most_in_flight(order_of("interleaved-zb", p, m)) == (2 * p,) * p
    assert set(most_in_flight(order_of("dualpipe-v", p, m))) <= {2 * p, 2 * p + 1}
    assert most_in_flight(order_of("zb-h1", p, m)) == (p,) * p
    assert most_in_flight(order_of("zb-h2", p, m)) == (2 * p - 1,) * p


def test_microbatches_between_their_two_backward_passes_grow_along_zbv():
    held = [hold(actions) for actions in order_of("zbv", 4, 8)]
    assert [int(one.halfway.sum(axis=1).max()) for one in held] == [1, 3, 5, 7]
    assert held[0].stages == (0, 7)
    assert all((one.in_flight[-1] == 0).all() and (one.halfway[-1] == 0).all() for one in held)
    assert all((one.halfway <= one.in_flight).all() for one in held)
