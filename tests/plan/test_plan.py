"""Plans of recorded runs, and the lines that they write for each framework."""

from __future__ import annotations

import json

import pytest
from support.services.console import type_command

from debubble.timeline.schedules import order_of, parse_order, read_order

pytestmark = pytest.mark.slow

RECORDED = "tests/data/h200/1f1b_p2_m4"


def plan_of(folder, *flags, cwd):
    answer = type_command(f"debubble plan {folder} --json {' '.join(flags)}", cwd)
    assert answer.code == 0, answer.text
    return json.loads(answer.text)


def test_what_is_to_be_pasted_is_all_that_is_on_stdout(tmp_path):
    plan = plan_of(RECORDED, cwd=tmp_path)
    best = next(one for one in plan["options"] if "torch" in one["apply"] and one["recommended"])
    answer = type_command(f"debubble plan {RECORDED} --emit torch", tmp_path)
    assert answer.out == best["apply"]["torch"]
    assert answer.err.startswith(plan["verdict"])
    assert f"for torch, {best['words']}:" in answer.err
    marked = type_command(f"debubble plan {RECORDED} --emit torch --markdown", tmp_path)
    assert marked.out == answer.out
    assert "| option | batch |" in marked.err


@pytest.mark.parametrize("framework", ["torch", "torchtitan"])
def test_an_order_that_is_needed_is_written_where_it_is_wanted(framework, tmp_path):
    words = f"debubble plan tests/data/h200/1f1b_p3_m7 --emit {framework}"
    without = type_command(words, tmp_path)
    assert "order.csv written" in without.err
    assert "order.csv" in without.out
    assert read_order(str(tmp_path / "order.csv")) == order_of("zb-h2", 3, 7)
    unforced = type_command(words, tmp_path)
    assert (unforced.code, unforced.out) == (2, "")
    assert "order.csv is there already" in unforced.err
    (tmp_path / "launch here").mkdir()
    within = type_command(f"{words} -o 'launch here'", tmp_path)
    assert "launch here/order.csv written" in within.err
    assert "launch here/order.csv" in within.out
    order = read_order(str(tmp_path / "launch here" / "order.csv"))
    assert order == order_of("zb-h2", 3, 7)
    again = type_command(f"{words} -o 'launch here'", tmp_path)
    assert again.code == 2
    assert "is there already" in again.text
    assert type_command(f"{words} -o 'launch here' --force", tmp_path).code == 0


def test_an_order_by_itself_goes_into_the_file_and_not_on_stdout(tmp_path):
    printed = type_command(f"debubble plan {RECORDED} --emit csv", tmp_path)
    written = type_command(f"debubble plan {RECORDED} --emit csv -o zbv.csv", tmp_path)
    assert written.out == ""
    assert (tmp_path / "zbv.csv").read_text("utf-8") == printed.out
    assert parse_order(printed.out)


def test_a_limit_below_the_measured_peak_refuses_everything(tmp_path):
    plan = plan_of(RECORDED, "--memory-limit", "1GiB", cwd=tmp_path)
    assert plan["options"] == []
    assert plan["refused"]
    assert plan["verdict"].startswith("Out of memory: a rank exceeds its memory limit by")


def test_a_stated_schedule_that_the_run_left_is_warned_of_as_in_find(tmp_path):
    found, planned = (
        json.loads(
            type_command(f"debubble {verb} {RECORDED} --schedule gpipe --json", tmp_path).text
        )
        for verb in ("find", "plan")
    )
    warnings = [one for one in found["warnings"] if one["code"] == "schedule_differs"]
    assert warnings
    assert [one for one in planned["warnings"] if one["code"] == "schedule_differs"] == warnings
    words = f"debubble simulate {RECORDED} --schedule-measured gpipe --json"
    simulated = json.loads(type_command(words, tmp_path).text)
    assert [one for one in simulated["warnings"] if one["code"] == "schedule_differs"] == warnings


def test_an_order_in_a_file_cannot_be_what_changes_start_from(tmp_path):
    (tmp_path / "mine.csv").write_text("0F0,0B0\n1F0,1B0\n", "utf-8")
    answer = type_command(f"debubble plan {RECORDED} --schedule mine.csv", tmp_path)
    assert answer.code == 2
    assert "must be named" in answer.text


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--layers 8,8,8", "the run has 2 stages"),
        ("--layers 0,0", "is no split"),
        ("--schedule nope", "no schedule is called 'nope'"),
        ("--emit jax", "no framework is called 'jax'"),
        ("--schedule forward-only", "the run has backward passes"),
        ("--pipeline 3", "there is no pipeline 3"),
        ("--memory-limit lots", "lots"),
        ("--max-microbatches 0", "0"),
        ("--search 0s", "--search needs more than no time"),
    ],
)
def test_what_makes_no_sense_is_refused_with_a_hint(flags, said, tmp_path):
    answer = type_command(f"debubble plan {RECORDED} {flags}", tmp_path)
    assert answer.code == 2
    assert answer.text.startswith("error: ")
    assert said in answer.text
    assert "Traceback" not in answer.text
    assert "hint: " in answer.text


def test_no_split_is_offered_where_a_layer_would_cost_several_times_as_much_elsewhere(tmp_path):
    answer = type_command(f"debubble plan {RECORDED} --layers 1,15", tmp_path)
    assert "its layers are not alike" in answer.text
    assert not any(line.startswith("split ") for line in answer.text.splitlines())
