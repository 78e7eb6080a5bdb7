"""A line over message sizes: latency and bandwidth come back as they were planted."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from debubble.links.hop_times import fit_line
from debubble.links.live import sizes_of

SIZES = sizes_of(256 * 1024**2)


@given(
    latency_us=st.floats(5, 200),
    gigabytes=st.floats(1, 400),
    seed=st.integers(0, 2**32 - 1),
)
def test_medians_of_noisy_messages_give_latency_and_bandwidth(latency_us, gigabytes, seed):
    """Each message is up to 10 % off; a rung of the ladder is the median of 20."""
    random = np.random.default_rng(seed)
    size = np.array(SIZES, dtype=float)
    true = latency_us * 1000 + size / gigabytes
    noisy = true * random.uniform(0.9, 1.1, (20, len(size)))
    fit = fit_line(SIZES, np.median(noisy, axis=0))
    assert fit.latency_ns == pytest.approx(latency_us * 1000, rel=0.1)
    assert fit.bytes_per_s == pytest.approx(gigabytes * 1e9, rel=0.1)


def test_rungs_that_are_themselves_off_give_them_nearly_always():
    off = 0
    for seed in range(500):
        random = np.random.default_rng(seed)
        size = np.array(SIZES, dtype=float)
        rungs = (50_000 + size / 5) * random.uniform(0.9, 1.1, len(size))
        fit = fit_line(SIZES, rungs)
        off += abs(fit.latency_ns / 50_000 - 1) > 0.1 or abs(fit.bytes_per_s / 5e9 - 1) > 0.1
    assert off <= 5


def test_small_messages_that_a_bucket_lets_pass_bend_no_bandwidth():
    """As seen on a throttled hop of 47.9 MB/s: up to 16 KiB go at once."""
    sizes = sizes_of(1024**2)
    for ms in (
        (0.06, 0.08, 0.31, 1.34, 5.53, 21.89),
        (0.05, 0.05, 0.27, 1.31, 5.46, 21.88),
        (0.21, 0.15, 0.27, 1.34, 5.42, 21.89),
    ):
        fit = fit_line(sizes, [one * 1e6 for one in ms])
        assert fit.bytes_per_s == pytest.approx(47.9e6, rel=0.05)
        assert fit.worst_error > 0.2


def test_the_worst_rung_is_told():
    fit = fit_line([1000, 100_000, 1_000_000], [2_000, 101_000, 2_002_000])
    assert fit.worst_error > 0.1


def test_one_size_tells_no_line():
    assert fit_line([1024, 1024], [10.0, 11.0]) is None
    assert fit_line([1024, 2048], [10.0, 11.0]) is None


def test_latency_is_never_below_zero():
    fit = fit_line([1000, 100_000], [1.0, 100_000.0])
    assert fit.latency_ns == 0
