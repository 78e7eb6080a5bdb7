"""What is left out of a table, and how the rest is summed up."""

from __future__ import annotations

from debubble.report.text import farthest
from debubble.units import show_duration, show_members, show_range


def test_those_farthest_from_the_middle_stand_out():
    assert farthest([5, 5, 9, 5, 1, 5], 2) == {2, 4}
    assert farthest([None, 3, 3, 8], 1) == {3}
    assert farthest([None, None]) == set()


def test_a_range_that_reads_the_same_is_one_value():
    assert show_range([1_000_000, 2_000_000], show_duration) == "1.00 to 2.00 ms"
    assert show_range([1_000_001, 1_000_002], show_duration) == "1.00 ms"


def test_members_are_written_briefly():
    assert show_members([0, 1, 2, 3]) == "0-3"
    assert show_members([0, 1, 2, 7]) == "0-2, 7"
    assert show_members([1, 4, 7, 10]) == "1-10, every 3rd"
    assert show_members([0, 11, 22]) == "0-22, every 11th"
    assert show_members([0, 2, 3, 9, 40]) == "0-40, 5 of them"
