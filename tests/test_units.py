"""Numbers as people type and read them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from debubble.errors import UsageError
from debubble.units import (
    counted,
    parse_bytes,
    parse_duration,
    parse_period,
    show_bytes,
    show_count,
    show_duration,
    show_period,
    show_share,
)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4096", 4096),
        ("80GiB", 80 * 1024**3),
        ("1.5 GB", 1_500_000_000),
        ("64k", 64_000),
        ("2 TiB", 2 * 1024**4),
        (".5KiB", 512),
    ],
)
def test_sizes_are_read_binary_with_an_i_and_decimal_without(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize(
    ("text", "nanoseconds"),
    [("18.5ms", 18_500_000), ("600 us", 600_000), ("7µs", 7_000), (".5S", 500_000_000), ("3ns", 3)],
)
def test_times_are_read_with_their_unit(text, nanoseconds):
    assert parse_duration(text) == pytest.approx(nanoseconds)


@pytest.mark.parametrize("text", ["", "5", "ms", "-1ms", "1e3ms", "5 minutes"])
def test_what_is_no_time_is_refused(text):
    with pytest.raises(UsageError, match="is no time"):
        parse_duration(text)


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1e9", "12 apples", "1 000"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(UsageError, match="is no size"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("size", "shown"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (3_930_000_000, "3.66 GiB"),
        (2**50, "1024 TiB"),
    ],
)
def test_sizes_are_shown_with_three_digits(size, shown):
    assert show_bytes(size) == shown


@pytest.mark.parametrize(
    ("nanoseconds", "shown"),
    [
        (0, "0 ns"),
        (999, "999 ns"),
        (1_000, "1.00 us"),
        (38_600, "38.6 us"),
        (302_400_000, "302 ms"),
        (999_600_000, "1.00 s"),
        (1_940_000_000, "1.94 s"),
        (-5_000_000, "-5.00 ms"),
    ],
)
def test_times_are_shown_in_the_unit_that_fits(nanoseconds, shown):
    assert show_duration(nanoseconds) == shown


@given(st.integers(min_value=0, max_value=10**15))
def test_a_shown_time_is_off_by_no_more_than_half_a_percent(nanoseconds):
    number, unit = show_duration(nanoseconds).split()
    scale = {"ns": 1, "us": 1e3, "ms": 1e6, "s": 1e9}[unit]
    assert abs(float(number) * scale - nanoseconds) <= 0.0051 * nanoseconds


def test_shares_and_counts():
    assert show_share(0.6123) == "61.2 %"
    assert show_share(None) == "–"
    assert show_count(1_301_930) == "1,301,930"
    assert counted(1, "rank") == "1 rank"
    assert counted(4, "rank") == "4 ranks"
    assert counted(2, "process", "processes") == "2 processes"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30s", 30), ("500ms", 0.5), ("5min", 300), ("1.5h", 5400), ("7d", 604800)],
)
def test_periods_are_read_with_their_unit(text, seconds):
    assert parse_period(text) == seconds


@pytest.mark.parametrize("text", ["", "5", "h", "-1h", "1 hour"])
def test_what_is_no_period_is_refused(text):
    with pytest.raises(UsageError, match="is no period"):
        parse_period(text)


@pytest.mark.parametrize(
    ("seconds", "shown"), [(3600, "1h"), (5400, "90min"), (0.5, "0.5s"), (86400, "1d"), (61, "61s")]
)
def test_periods_are_shown_as_they_are_typed(seconds, shown):
    assert show_period(seconds) == shown
