"""Tables of many ranks, hops or pipelines: what stands out is listed, the rest is one line."""

from __future__ import annotations

import msgspec
import pytest
from support.traces.read_once import analyse_recording
from support.traces.recordings import H200

from debubble.report.answers.find import PipelinePart, answer_find
from debubble.report.answers.links import answer_links
from debubble.report.find import find_page
from debubble.report.links import links_page
from debubble.report.text import fold

RUN = H200 / "1f1b_p3_m7"
MANY = 40
GIB = 2**30
replace = msgspec.structs.replace


@pytest.fixture(scope="module")
def found():
    return answer_find(analyse_recording(RUN))


def table_of(page, *columns):
    """Return the rows of the one table that begins with these columns."""
    [table] = [table for table in page.tables if table.columns[: len(columns)] == columns]
    return table.rows


def test_the_pipeline_that_is_shown_stays_among_many_and_others_have_the_largest_peak(found):
    def pipeline(number, bubble=0.3, peak=GIB):
        return PipelinePart(
            pipeline=number,
            ranks=[2 * number, 2 * number + 1],
            missing_ranks=[],
            bubble_fraction=bubble,
            batch_latency_s=None,
            peak_memory_bytes=peak,
        )

    every = [pipeline(number) for number in range(MANY)]
    every[7] = pipeline(7, bubble=0.9)
    every[30] = pipeline(30, bubble=None, peak=3 * GIB)
    many = replace(found, pipelines=every, shown_pipeline=30)
    rows = table_of(find_page(many), "pipeline", "ranks", "bubble")
    listed = {row[0]: row[1:] for row in rows}
    assert listed["7"] == ("14-15", "90.0 %", "1.00 GiB")
    assert listed["30"] == ("60-61", "–", "3.00 GiB")
    others = MANY - len(rows) + 1
    assert rows[-1] == (f"{others} others", f"{2 * others} ranks", "30.0 %", "1.00 GiB")


def test_links_lists_every_slow_hop_of_many_and_names_the_verdicts_of_the_others():
    found = answer_links(analyse_recording(RUN))
    usual = replace(found.hops[0], verdict="healthy", one_message_bytes_per_s=5e9)
    slow = replace(usual, verdict="slow", from_rank=80, cost_per_batch_s=0.002)
    unknown = replace(
        usual, verdict="unknown", one_message_bytes_per_s=None, one_message_s=None, bytes=None
    )
    hops = [usual] * MANY + [slow] * 6 + [unknown] * 3
    rows = table_of(links_page(replace(found, hops=hops)), "hop", "size", "one message")
    listed = [row for row in rows if row[0].startswith("80 → ")]
    assert len(listed) == 6
    assert {row[-2:] for row in listed} == {("slow", "2.00 ms")}
    assert rows[-1][0] == f"{len(hops) - len(rows) + 1} others"
    assert rows[-1][1] == "unknown"
    assert rows[-1][-2] == "healthy or unknown"


def test_of_many_rows_those_that_stand_out_or_are_to_be_kept_are_lines_and_the_others_are_one():
    rows = list(enumerate([5, 5, 9, 5, 5, 1, 5]))
    assert list(fold(rows[:3], 3, lambda row: row[1])) == [("", [row]) for row in rows[:3]]
    folded = fold(rows, 3, lambda row: row[1], count=2, keep=lambda row: row[0] == 6)
    lines = [(name, [place for place, _ in alike]) for name, alike in folded]
    assert lines == [("", [2]), ("", [5]), ("", [6]), ("4 others", [0, 1, 3, 4])]
    assert list(fold(["a", "b"], 1, lambda _: None)) == [("2 others", ["a", "b"])]
