"""The timeline as text: every column tells pass and microbatch, with no colour at all."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from support.services.console import type_command
from support.timelines.by_hand import a_timeline

from debubble.errors import UsageError
from debubble.report.frame import frame_step
from debubble.report.lanes import draw_lanes


def drawn(timeline, step=None, width=47):
    return [line.plain for line in draw_lanes(frame_step(timeline, 0, step), width)]


# Forty columns beside a margin of seven: one millisecond each.
TWO_RANKS = [
    (0, 0, "F", 0, 0, 0, 8),
    (0, 0, "F", 1, 0, 8, 16),
    (1, 1, "F", 0, 0, 10, 18),
    (1, 1, "B", 0, 0, 18, 30),
    (0, 0, "B", 0, 0, 32, 40),
]


def test_each_column_says_which_pass_and_which_microbatch():
    lines = drawn(a_timeline(TWO_RANKS, [(0, 1, 8, 4, 10)]))
    assert lines == [
        "step 0; a column is 1.00 ms",
        "rank 0 FFFFFFFFFFFFFFFF················BBBBBBBB",
        "    mb 0000000011111111                00000000",
        "rank 1 ········==FFFFFFFFBBBBBBBBBBBB··········",
        "    mb           00000000000000000000          ",
        "       |0 ms     |10       |20       |30",
        "F forward  B backward  · wait  = wire",
        "mb microbatch",
    ]


def test_a_rank_with_two_stages_has_a_line_for_them():
    passes = [(0, 0, "F", 0, 0, 0, 20), (0, 3, "I", 0, 0, 20, 40)]
    lines = drawn(a_timeline(passes, stages=((0, 3),)))
    assert lines[1:4] == [
        "rank 0 " + "F" * 20 + "I" * 20,
        "    mb " + "0" * 40,
        " stage " + "0" * 20 + "3" * 20,
    ]


def test_passes_of_another_step_are_in_lower_case():
    passes = [*TWO_RANKS, (1, 1, "F", 0, 1, 35, 45), (0, 0, "F", 0, 1, 41, 45)]
    lines = drawn(a_timeline(passes))
    assert lines[3].endswith("·····fffff")
    assert lines[-1] == "lower case: another step"
    assert drawn(a_timeline(passes), step=1)[0].startswith("step 1;")


def test_the_command_line_draws_below_its_answer(tmp_path):
    words = "debubble find tests/data/h200/1f1b_p2_m4 --timeline --step 3"
    lines = type_command(words, tmp_path).text.splitlines()
    assert lines[0].startswith("Ranks wait")
    below = lines[lines.index("") + 1 :]
    assert below[0].startswith("step 3; a column is")
    assert any(line.startswith("longest: rank ") for line in below)
    assert below[1].startswith("rank 0 FFFF")
    refused = type_command(f"{words} --json", tmp_path)
    assert (refused.code, "--timeline" in refused.text) == (2, True)


def test_a_step_without_passes_cannot_be_drawn():
    with pytest.raises(UsageError, match="no pass in step 7"):
        drawn(a_timeline(TWO_RANKS), step=7)


def moved(timeline, by_ns, divided_by=1):
    """The same passes at another time, and as many times shorter."""
    passes = timeline.passes
    times = {
        name: getattr(passes, name) // divided_by + by_ns
        for name in ("issued_ns", "start_ns", "end_ns")
    }
    return replace(timeline, passes=replace(passes, **times))


def test_a_step_that_takes_no_time_is_drawn():
    lines = drawn(moved(a_timeline(TWO_RANKS), 0, divided_by=10**9))
    assert lines[0].startswith("step 0; a column is")
    assert lines[1].startswith("rank 0 ")


def test_lanes_do_not_depend_on_the_date():
    today = 1_763_000_000_123_456_789
    short = a_timeline(TWO_RANKS)
    assert drawn(moved(short, today, 10_000)) == drawn(moved(short, 0, 10_000))


@pytest.mark.parametrize("divided_by", [1, 7, 1000, 30_000, 91_000, 170_000])
def test_labels_of_the_axis_do_not_run_into_each_other(divided_by):
    axis = next(line for line in drawn(moved(a_timeline(TWO_RANKS), 0, divided_by)) if "|" in line)
    assert re.fullmatch(r" +\|0(\.0+)? ms( +\|[0-9.]+)+", axis), axis
