"""When a lead is called more than chance: rarely of equals, always of what is planted."""

from __future__ import annotations

import numpy as np
import pytest

from debubble.timeline.replicas.cells import middle_of_others
from debubble.timeline.replicas.judge import chance_of_last, student_tail, surely_late

SEEDS = 2000
NOISES = {
    "normal": lambda chance, shape: chance.normal(size=shape),
    "heavy-tailed": lambda chance, shape: chance.standard_t(2, size=shape),
    "spikes": lambda chance, shape: chance.exponential(size=shape) ** 3,
}


def named(arrivals):
    late = middle_of_others(-arrivals) + arrivals
    last = late == late.max(axis=1, keepdims=True)
    slowest = int(late.mean(axis=0).argmax())
    return slowest if surely_late(late, last.astype(float), slowest) else None


@pytest.mark.slow
@pytest.mark.parametrize("noise", NOISES)
@pytest.mark.parametrize("replicas", [2, 4, 16])
@pytest.mark.parametrize("steps", [1, 2, 3, 5, 8])
def test_of_equal_replicas_one_in_a_hundred_runs_names_one_at_most(noise, replicas, steps):
    wrong = 0
    for seed in range(SEEDS):
        chance = np.random.default_rng(seed)
        wrong += named(NOISES[noise](chance, (steps, replicas))) is not None
    assert wrong <= SEEDS / 100


@pytest.mark.parametrize(("replicas", "steps"), [(2, 4), (2, 8), (4, 3), (16, 3), (500, 2)])
def test_a_lead_of_ten_times_the_noise_is_named(replicas, steps):
    found = []
    for seed in range(100):
        arrivals = np.random.default_rng(seed).normal(size=(steps, replicas))
        arrivals[:, -1] += 15
        found.append(named(arrivals))
    assert found.count(replicas - 1) >= 95


def test_never_of_a_single_step():
    assert named(np.array([[0.0, 0.0, 1e9]])) is None


def test_the_middle_of_the_others_is_their_median():
    values = np.random.default_rng(1).normal(size=(3, 5, 2))
    for count in (2, 3, 4, 5):
        some = values[:, :count]
        expected = np.stack(
            [np.median(np.delete(some, one, axis=1), axis=1) for one in range(count)], axis=1
        )
        assert middle_of_others(some) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("t", "freedom", "tail"),
    [(6.314, 1, 0.05), (31.82, 1, 0.01), (6.965, 2, 0.01), (3.747, 4, 0.01), (2.821, 9, 0.01),
     (2.326, 10_000, 0.0102)],
)  # fmt: skip
def test_students_tail_is_as_in_the_tables(t, freedom, tail):
    assert student_tail(t, freedom) == pytest.approx(tail, rel=0.01)


def test_being_last_every_time_is_as_likely_as_counting_says():
    assert chance_of_last(5, 5, 2) == pytest.approx(1 / 32)
    assert chance_of_last(3, 3, 16) == pytest.approx(16**-3)
    assert chance_of_last(0, 4, 3) == pytest.approx(1)
