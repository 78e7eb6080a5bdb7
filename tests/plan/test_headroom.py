"""What is left of a device's memory."""

from __future__ import annotations

import pytest

from debubble.plan.option import headroom

GIB = 1024**3


def test_headroom_is_the_limit_minus_the_peak_and_the_rest_is_kept_apart():
    left = headroom(
        60 * GIB,
        limit_bytes=80 * GIB,
        measured_peak_bytes=50 * GIB,
        measured_reserved_bytes=57 * GIB,
        other_bytes=3 * GIB,
    )
    assert left.bytes == 20 * GIB
    assert left.unallocated_bytes == 7 * GIB
    assert left.fits
    assert str(left) == "20.0 GiB left of 80.0 GiB"


def test_a_peak_over_the_limit_is_said_and_negative():
    left = headroom(81 * GIB, limit_bytes=80 * GIB)
    assert left.bytes == -1 * GIB
    assert left.fits is False
    assert str(left) == "1.00 GiB over the limit of 80.0 GiB"


@pytest.mark.parametrize(("other", "fits"), [(None, True), (1 * GIB, True), (3 * GIB, False)])
def test_what_others_hold_counts_where_it_is_known(other, fits):
    assert headroom(78 * GIB, limit_bytes=80 * GIB, other_bytes=other).fits is fits


def test_without_a_limit_nothing_is_claimed():
    left = headroom(10 * GIB, limit_bytes=None)
    assert left.bytes is left.fits is None
    assert "unknown" in str(left)


def test_less_reserved_than_allocated_is_no_gain():
    left = headroom(1.0, limit_bytes=10.0, measured_peak_bytes=5.0, measured_reserved_bytes=4.0)
    assert left.unallocated_bytes == 0
