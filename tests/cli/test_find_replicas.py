"""`find` over replicas: a sentence, a table, an object; none of it for one pipeline alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.services.console import type_command
from support.simulator.analysis import setup_of
from support.simulator.replicas import members_of, replicas_of, write_replicas

BASE = setup_of("1f1b", 2, 4, fused=True, steps=4)


@pytest.fixture(scope="module")
def dragged(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dragged")
    write_replicas(folder, replicas_of(BASE, 4, weights=(1.0, 1.4)).play())
    return folder


def test_the_replica_that_drags_is_named_with_its_reason_and_cost(dragged):
    answer = type_command("debubble find . --details", dragged)
    assert answer.code == 0
    assert "- Pipeline 3 (ranks 3, 7) slows the 3 others: its stage 1 takes " in answer.text
    assert " ms elsewhere. It comes " in answer.text
    assert "replica" in answer.text
    assert "4 of 4" in answer.text


def test_equal_replicas_are_said_to_be_equal(tmp_path):
    write_replicas(tmp_path, replicas_of(BASE, 2).play())
    assert "- No replica slows the others: " in type_command("debubble find .", tmp_path).text


def test_missing_replicas_are_said(tmp_path):
    write_replicas(tmp_path, replicas_of(BASE, 3, weights=(1.0, 1.4)).play())
    for rank in members_of(0, 3, 2):
        (tmp_path / f"rank{rank}.json").unlink()
    data = json.loads(type_command("debubble find . --json", tmp_path).text)
    assert data["replicas"]["missing_ranks"] == [0, 3]
    assert "missing_replicas" in [gap["code"] for gap in data["warnings"]]


def test_a_slow_device_comes_before_the_replica_that_it_drags(tmp_path):
    sample = Path("tests/data/formats/slow_device.csv").resolve()
    text = type_command(f"debubble find {sample}", tmp_path).text
    assert (
        0
        < text.index("- The device of rank 4 is slow")
        < text.index("- Pipeline 1 (ranks 1, 4) slows")
    )
