"""The statistics against tables, and against what they promise on real noise."""

from __future__ import annotations

import numpy as np
import pytest

from debubble.measure.statistics import (
    can_be_tested,
    few_differ,
    least_samples,
    rank_test,
    ratio_interval,
    samples_needed,
    spread_of,
)


def sides_with(u, n, m):
    """Two sides of whole numbers without ties, of which the first wins exactly u pairs."""
    first, second = list(range(n)), [n + number for number in range(m)]
    places = np.zeros(n, dtype=int)
    for _ in range(u):
        row = next(row for row in reversed(range(n)) if places[row] < m)
        places[row] += 1
    return [
        second[p - 1] + 0.5 if p else value - n for p, value in zip(places, first, strict=True)
    ], second


# Critical values of Mann and Whitney's U, two-sided 5 %: the largest U that still is significant.
CRITICAL = [(4, 4, 0), (5, 5, 2), (3, 5, 0), (6, 8, 8), (8, 8, 13), (10, 10, 23), (20, 20, 127)]


@pytest.mark.parametrize(("n", "m", "critical"), CRITICAL)
def test_the_critical_values_are_those_of_the_tables(n, m, critical):
    inside = rank_test(*sides_with(critical, n, m))
    beyond = rank_test(*sides_with(critical + 1, n, m))
    assert (inside.u, beyond.u) == (critical, critical + 1)
    assert inside.exact
    assert inside.p <= 0.05 < beyond.p


def test_a_worked_example_gives_its_p():
    # The diagnosis ages of the SciPy manual: U = 17, p = 1/9.
    found = rank_test([19, 22, 16, 29, 24], [20, 11, 17, 12])
    assert found.u == 17
    assert found.p == pytest.approx(1 / 9)


def test_ties_are_counted_exactly():
    # Of the 6 ways to pick 2 of the middle ranks 1, 2.5, 2.5, 4 only the outermost two are as far.
    assert rank_test([1, 2], [2, 3]).p == pytest.approx(4 / 6)
    assert rank_test([1, 1], [1, 1]).p == 1.0


def test_the_normal_approximation_takes_over_smoothly():
    rng = np.random.default_rng(1)
    first, second = rng.normal(0, 1, 25).round(1), rng.normal(0.5, 1, 25).round(1)
    exact = rank_test(first, second)
    more = rank_test([*first, 0.0], [*second, 0.5])
    assert exact.exact
    assert not more.exact
    assert more.p == pytest.approx(exact.p, rel=0.25)


def test_three_samples_a_side_can_never_be_tested_and_four_can():
    assert not can_be_tested(3, 3)
    assert can_be_tested(4, 4)
    assert not can_be_tested(0, 9)
    assert least_samples() == 4


def test_a_median_has_an_interval_that_holds_it_and_repeats():
    samples = [10.0, 11.0, 12.0, 13.0, 30.0]
    found = spread_of(samples)
    assert found.median == 12.0
    assert 10.0 <= found.ci[0] <= 12.0 <= found.ci[1] <= 30.0
    assert found == spread_of(samples)


@pytest.mark.slow
def test_the_interval_of_a_ratio_covers_the_truth_about_as_often_as_it_says():
    rng = np.random.default_rng(7)
    covered = 0
    for _ in range(200):
        low, high = ratio_interval(rng.normal(100, 5, 20), rng.normal(110, 5, 20))
        covered += low <= 1.1 <= high
    assert covered >= 180


def test_two_steps_a_side_differ_only_where_they_lie_far_apart():
    assert few_differ([300.0, 302.0], [367.0, 365.0])
    assert not few_differ([300.0, 330.0], [340.0, 370.0])
    assert few_differ([300.0], [400.0, 401.0]) is None
    assert not few_differ([300.0, 300.0], [302.0, 302.0])


def test_the_samples_said_to_be_needed_do_find_the_change():
    rng = np.random.default_rng(5)
    before, after = rng.normal(100, 5, 10), rng.normal(105, 5, 10)
    needed = samples_needed(before, after, 0.05)
    found = sum(
        rank_test(rng.normal(100, 5, needed), rng.normal(105, 5, needed)).p <= 0.05
        for _ in range(300)
    )
    assert 0.6 <= found / 300 <= 0.97
