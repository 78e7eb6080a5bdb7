"""Numbers as people type and read them; a file is there whole, or as it was before."""

from __future__ import annotations

import os
import resource
import signal
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from debubble.errors import UsageError
from debubble.units import (
    counted,
    parse_bytes,
    parse_duration,
    parse_price,
    show_between,
    show_bytes,
    show_change,
    show_count,
    show_duration,
    show_gain,
    show_gains,
    show_members,
    show_number,
    show_percent,
    show_period,
    show_price,
    show_range,
    show_share,
    show_times,
    write_file,
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
    [
        ("18.5ms", 18_500_000),
        ("600 us", 600_000),
        ("7µs", 7_000),
        (".5S", 500_000_000),
        ("3ns", 3),
        ("1.5h", 5_400_000_000_000),
    ],
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
    ("seconds", "shown"), [(3600, "1h"), (5400, "90min"), (0.5, "0.5s"), (86400, "1d"), (61, "61s")]
)
def test_periods_are_shown_as_they_are_typed(seconds, shown):
    assert show_period(seconds) == shown


def test_a_change_has_a_sign_and_never_a_minus_before_nothing():
    assert [show_change(part) for part in (0.3421, -0.044, -0.00003)] == [
        "+34.2 %",
        "-4.4 %",
        "+0.0 %",
    ]
    assert [show_gain(part) for part in (0.342, -0.004, -0.00003)] == ["+34 %", "-0.4 %", "0 %"]
    assert show_gain(0.34, 0.2, 0.45) == "+34 % (+20 to +45 %)"
    assert show_gains(-0.04, 0.28) == "-4 to +28 %"
    assert [show_percent(part) for part in (0.551, 0.004, 0.0)] == ["55 %", "0.4 %", "0 %"]


def test_two_figures_name_a_common_unit_once():
    assert show_between("260 ms", "316 ms") == "260 to 316 ms"
    assert show_between("944 ms", "1.06 s") == "944 ms to 1.06 s"
    assert show_between("5 ms", "5 ms") == "5 ms"
    assert show_between("3", "7") == "3 to 7"


def test_a_ratio_near_one_has_a_digit_more():
    assert [show_times(ratio) for ratio in (1.04, 1.0949, 1.095, 2.38)] == [
        "1.04 times",
        "1.09 times",
        "1.1 times",
        "2.4 times",
    ]


def test_plain_numbers_have_three_digits():
    assert [show_number(one) for one in (5.416, 33.16, 1098.6)] == ["5.42", "33.2", "1,099"]


@pytest.mark.parametrize(
    ("text", "price"),
    [("2.50", (2.5, "")), ("$2.5", (2.5, "$")), ("2 EUR", (2.0, "EUR")), ("€3", (3.0, "€"))],
)
def test_prices_are_read_with_their_currency(text, price):
    assert parse_price(text) == price


@pytest.mark.parametrize("text", ["", "two", "-1", "$2€", "1e9", "2 dollars"])
def test_what_is_no_price_is_refused(text):
    with pytest.raises(UsageError, match="is no price"):
        parse_price(text)


def test_money_is_written_as_it_was_read():
    assert show_price(51.2, "$") == "$51.20"
    assert show_price(-13.031, "EUR") == "-13.03 EUR"
    assert show_price(1204.4) == "1,204"
    assert show_price(-0.001, "$") == "$0.00"


@contextmanager
def full_disk():
    """Let no file grow beyond a few bytes: not even what pytest writes its dots to."""
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)


@pytest.mark.parametrize("earlier", [None, "an earlier report"])
def test_a_full_disk_leaves_what_was_there(tmp_path, earlier):
    report = tmp_path / "report.html"
    if earlier:
        report.write_text(earlier)
    with full_disk(), pytest.raises(UsageError, match="cannot be written: File too large"):
        write_file(report, b"x" * 10_000)
    assert [file.read_text() for file in tmp_path.iterdir()] == ([earlier] if earlier else [])


def test_a_link_stays_a_link_and_a_mode_a_mode(tmp_path):
    real, link = tmp_path / "real", tmp_path / "link"
    real.write_text("old")
    real.chmod(0o640)
    link.symlink_to(real)
    write_file(link, b"new")
    assert (link.is_symlink(), real.read_text(), real.stat().st_mode & 0o777) == (
        True, "new", 0o640
    )  # fmt: skip


def test_what_is_no_plain_file_is_written_to(tmp_path):
    reading, writing = os.pipe()
    write_file(tmp_path / f"../../../../../proc/self/fd/{writing}", b"report")
    os.close(writing)
    assert os.read(reading, 100) == b"report"
    os.close(reading)


def test_without_force_nothing_is_replaced(tmp_path):
    (tmp_path / "a").write_text("old")
    with pytest.raises(UsageError, match="there already"):
        write_file(tmp_path / "a", b"new", force=False)
    assert (tmp_path / "a").read_text() == "old"


def test_a_range_that_reads_the_same_is_one_value():
    assert show_range([1_000_000, 2_000_000], show_duration) == "1.00 to 2.00 ms"
    assert show_range([1_000_001, 1_000_002], show_duration) == "1.00 ms"


def test_members_are_written_briefly():
    assert show_members([0, 1, 2, 3]) == "0-3"
    assert show_members([0, 1, 2, 7]) == "0-2, 7"
    assert show_members([1, 4, 7, 10]) == "1-10, every 3rd"
    assert show_members([0, 11, 22]) == "0-22, every 11th"
    assert show_members([0, 2, 3, 9, 40]) == "0-40, 5 of them"
