"""Where several captures lie, every verb says which one it read."""

from __future__ import annotations

import json
import shutil

import pytest
from support.services.console import type_command
from support.traces.recordings import H200

TWO = "tests/data/h200/1f1b_p2_m4 tests/data/h200/1f1b_p3_m7"


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["find", "plan", "links", "inspect", "simulate"])
def test_a_run_that_was_named_and_not_read_is_a_warning(tmp_path, verb):
    answer = type_command(f"debubble {verb} {TWO}", tmp_path)
    assert (
        "warning: several captures were named, and one is read: 1f1b_p3_m7; "
        "not read: tests/data/h200/1f1b_p2_m4" in " ".join(answer.text.split())
    )
    assert type_command(f"debubble {verb} {TWO} --strict", tmp_path).code == 2


def test_of_captures_over_time_the_newest_is_read_and_named(tmp_path):
    for number in (9, 10):
        shutil.copytree(H200 / "1f1b_p2_m4", tmp_path / "run" / f"iteration_{number}")
    answer = type_command("debubble find run --strict", tmp_path)
    assert answer.code == 0
    assert "read: iteration_10, of 2 captures here; --capture NAME reads another" in answer.text
    assert "captures here" not in type_command("debubble find run -q", tmp_path).text


def test_a_picture_beside_the_traces_is_left_alone(tmp_path):
    name = "rank7.json.gz"
    shutil.copytree(H200 / "1f1b_p2_m4", tmp_path / "run")
    before = type_command("debubble find run --strict", tmp_path)
    assert type_command(f"debubble find run --perfetto run/{name} -q", tmp_path).code == 0
    assert type_command("debubble find run --strict", tmp_path) == before
    files = f"run/rank0.json.gz run/rank1.json.gz run/{name}"
    assert type_command(f"debubble find {files} --strict", tmp_path).code == 0
    assert (
        f"run/{name}"
        in json.loads(type_command("debubble inspect run --json", tmp_path).text)["left_alone"]
    )
    alone = type_command(f"debubble find run/{name}", tmp_path)
    assert (alone.code, "is a picture that `--perfetto` wrote" in alone.text) == (2, True)


def test_parts_of_one_run_in_several_places_are_no_several_runs(tmp_path):
    for rank in range(3):
        folder = tmp_path / f"node{rank // 2}"
        folder.mkdir(exist_ok=True)
        shutil.copy(H200 / "1f1b_p3_m7" / f"rank{rank}.json.gz", folder)
    files = "node0/rank0.json.gz node0/rank1.json.gz node1/rank2.json.gz"
    answer = type_command(f"debubble find {files} --strict", tmp_path)
    assert (answer.code, "captures" in answer.text) == (0, False)
