"""What `links` is given: files, folders of logs, folders of traces."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from debubble.cli.links import sort_places
from debubble.errors import UsageError
from debubble.links.live import SCHEMA

DATA = Path(__file__).parents[1] / "data"
LOGS, TRACES = DATA / "links", DATA / "h200" / "1f1b_p3_m7"


def sort(*places):
    return sort_places([str(place) for place in places])


def test_a_folder_of_logs_is_its_logs():
    assert sort(LOGS) == ("log", sorted(str(file) for file in LOGS.iterdir()))


def test_what_lies_beside_logs_is_not_read(tmp_path):
    shutil.copy(LOGS / "sendrecv_2ranks.txt", tmp_path)
    (tmp_path / "README.md").write_text("of last night", "utf-8")
    (tmp_path / "empty.json").touch()
    assert sort(tmp_path) == ("log", [str(tmp_path / "sendrecv_2ranks.txt")])


def test_a_folder_with_traces_is_of_traces(tmp_path):
    shutil.copy(LOGS / "sendrecv_2ranks.txt", tmp_path / "a.txt")
    shutil.copy(next(TRACES.glob("rank0.*")), tmp_path)
    assert sort(tmp_path)[0] == "traces"
    assert sort(TRACES)[0] == "traces"


def test_a_folder_of_nothing_known_is_left_to_the_reader_of_traces(tmp_path):
    (tmp_path / "README.md").write_text("nothing here", "utf-8")
    assert sort(tmp_path) == ("traces", [])


def test_logs_and_traces_are_read_apart():
    with pytest.raises(UsageError, match="read apart"):
        sort(LOGS, TRACES)


def test_logs_and_hop_tests_of_one_folder_are_read_apart(tmp_path):
    shutil.copy(LOGS / "sendrecv_2ranks.txt", tmp_path)
    (tmp_path / "links.json").write_text(f'{{"schema": "{SCHEMA}"}}', "utf-8")
    with pytest.raises(UsageError, match="hop tests are read apart"):
        sort(tmp_path)
