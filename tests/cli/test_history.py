"""Runs kept by name, and used by name."""

from __future__ import annotations

import json
import shutil

import pytest
from support.services.console import REPOSITORY, type_command

STORE = "--store sqlite:///history.db"
RUN = "tests/data/h200/1f1b_p2_m4"


@pytest.mark.slow
def test_a_run_is_kept_listed_shown_compared_and_dropped(tmp_path):
    def answer(words, code=0):
        found = type_command(f"debubble {words}", tmp_path)
        assert found.code == code, found.text
        return found.text

    assert answer(f"history add {RUN} --name base --tag commit=abc {STORE}").startswith("Kept as")
    assert answer(f"history add {RUN} --name base {STORE}").startswith("Kept as base.")
    listed = answer(f"history {STORE}")
    assert listed.startswith("2 measurements of 1 name in the history.")
    assert "commit=abc" in listed
    shown = json.loads(answer(f"history show base --json {STORE}"))
    assert [record["tags"] for record in shown["records"]] == [{"commit": "abc"}, {}]
    assert len(shown["records"][0]["measurement"]["samples"]) == 2
    found = json.loads(answer(f"compare base {RUN} --json {STORE}"))
    assert (found["before"]["n"], found["after"]["n"]) == (2, 2)
    assert found["verdict"] == "no_clear_change"
    assert "the same capture was given more than once: 1 before left out" in found["notes"]
    assert answer(f"history prune --keep 1 {STORE}") == "1 dropped.\n"


def test_a_store_given_before_the_subcommand_is_the_one_that_is_used(tmp_path):
    added = type_command(f"debubble history {STORE} add {RUN} --name base", tmp_path)
    assert "next: debubble history --store sqlite:///history.db" in added.text
    assert (tmp_path / "history.db").exists()
    assert type_command(f"debubble history {STORE} show base", tmp_path).code == 0
    assert type_command(f"debubble history {STORE} prune --keep 0", tmp_path).text == "1 dropped.\n"


def test_an_empty_history_says_how_to_begin(tmp_path):
    found = type_command(f"debubble history {STORE}", tmp_path)
    assert found.code == 0
    assert found.text.startswith("The history is empty.")
    assert "next: debubble history add TRACES --name NAME" in found.text


def test_a_name_that_is_nowhere_is_an_error(tmp_path):
    found = type_command(f"debubble compare base tuned {STORE}", tmp_path)
    assert found.code == 2
    assert found.text.startswith("error:")
    found = type_command(f"debubble history show base {STORE}", tmp_path)
    assert found.code == 2
    assert "nothing in the history is called 'base'" in found.text


@pytest.mark.slow
def test_what_the_traces_lack_is_a_warning_in_the_text_and_in_the_data(tmp_path):
    shutil.copy(REPOSITORY / RUN / "rank0.json.gz", tmp_path / "rank0.json.gz")
    words = f"debubble history add rank0.json.gz --name part {STORE}"
    text = type_command(words, tmp_path)
    assert "warning: " in text.text
    data = json.loads(type_command(f"{words} --json", tmp_path).text)
    assert data["warnings"]
