"""Files are told by what is in them."""

from __future__ import annotations

import pytest
from support.traces.kineto_events import document, kernel, write
from support.traces.recordings import PUBLIC

from debubble.trace.captures import recognise
from debubble.trace.format import OTHER, OTHER_JSON, rank_from_name


def test_a_trace_is_known_by_its_content_and_tells_its_rank(tmp_path):
    known = recognise(write(tmp_path / "anything.txt", document([kernel()], rank=3, world=8)))
    assert (known.format, known.rank, known.world_size) == ("kineto", 3, 8)


def test_a_header_longer_than_the_prefix_is_still_a_trace(tmp_path):
    content = document([kernel()], notes="x" * 1_000_000)
    assert recognise(write(tmp_path / "a.json", content)).format == "kineto"


@pytest.mark.parametrize(
    ("file", "rank"),
    [
        ("rank0.json.gz", 0),
        ("run/rank-34.Jul_15_10_52_41.1074.pt.trace.json.gz", 34),
        ("trace_8_rank_1.json", 1),
        ("dp0_pp1_tp0_dcp0_ep0_rank12.1718000000000.pt.trace.json.gz", 12),
        ("rank_3/trace.json", 3),
        ("1780800270.547418-TP-1-DECODE.trace.json.gz", 1),
        ("tp0-pp1.json", None),
        ("frank5.json", None),
        ("crankshaft7.json", None),
        ("trace.json", None),
        ("host_1234.1700000000000.pt.trace.json", None),
    ],
)
def test_ranks_in_file_names(file, rank):
    assert rank_from_name(file) == rank


@pytest.mark.parametrize("content", [{"a": 1}, [1, 2], {"schema": "1", "nodes": []}])
def test_other_json_is_left_alone(tmp_path, content):
    known = recognise(write(tmp_path / "a.json", content))
    assert known.format == OTHER_JSON
    assert known.why_not


def test_sqlite_and_parquet_are_known_by_their_first_bytes(tmp_path):
    assert recognise(write(tmp_path / "a", b"SQLite format 3\0....")).format == "nsight"
    assert recognise(write(tmp_path / "b", b"PAR1....")).format == "op table"


@pytest.mark.usefixtures("public_data")
@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("hta/*.json.gz", {"kineto", OTHER_JSON}),
        ("hta/*execution_trace*", {OTHER_JSON}),
        ("hta/*.raw.gz", {OTHER_JSON}),
        ("sglang-tp8/*.gz", {"kineto"}),
        ("tracelens/*.gz", {"kineto"}),
        ("nsys-ai/*", {"nsight"}),
        ("bytedance*/*.parquet", {"op table"}),
        ("bytedance*/*.json", {OTHER_JSON}),
        ("bytedance*/*.yaml", {OTHER}),
        ("nccl-logs/*", {OTHER}),
    ],
)
def test_every_public_file_is_taken_for_what_it_is(pattern, expected):
    files = sorted(PUBLIC.glob(pattern))
    assert files
    assert {recognise(str(file)).format for file in files} == expected
