"""The page about extending is executed: each example, put into one file, is known everywhere."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys

import pytest
from support.services.console import REPOSITORY

PAGE = (REPOSITORY / "docs/development/extending.md").read_text("utf-8")
SECTION = re.compile(r"^## A (\w+)\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
BLOCK = re.compile(r"^```python\n# (\S+?)(?:, (.*?))?\n(.*?)^```", re.MULTILINE | re.DOTALL)
PATHS = re.findall(
    r"^\| .*\? \| `([\w/]+\.py)`(.*?) \| `(tests/[\w/]+\.py)` \|$", PAGE, re.MULTILINE
)
EXAMPLES = {name: BLOCK.findall(text) for name, text in SECTION.findall(PAGE)}
RUN = REPOSITORY / "tests/data/frameworks/tt_1115"


@pytest.fixture
def ask(request, tmp_path):
    """A copy of the package with one file of the page in it; returns what it prints."""
    ((file, where, text),) = EXAMPLES[request.param]
    shutil.copytree(
        REPOSITORY / "src/debubble",
        tmp_path / "debubble",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    path = tmp_path / "debubble" / file
    if where == "at its end":
        text = f"{path.read_text('utf-8')}\n\n{text}"
    elif where:
        before, mark, after = path.read_text("utf-8").partition(f"    {where.split()[-1]} = ")
        assert mark, f"{file} has no {where.split()[-1]}"
        text = f"{before}{text}{mark}{after}"
    else:
        assert not path.exists(), f"{file} is there already: it is no new file"
        path.parent.mkdir(exist_ok=True)
    path.write_text(text, "utf-8")

    def run(*words, code=0):
        done = subprocess.run(
            [sys.executable, "-m", "debubble", *map(str, words)],
            env=os.environ | {"PYTHONPATH": str(tmp_path), "NO_COLOR": "1", "COLUMNS": "200"},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == code, done.stderr
        return done.stdout if code == 0 else done.stderr

    return run


@pytest.mark.parametrize(("file", "what", "test"), PATHS)
def test_each_path_leads_to_what_it_names_and_to_a_test_of_it(file, what, test):
    source = (REPOSITORY / "src/debubble" / file).read_text("utf-8")
    assert [name for name in re.findall(r"`(\w+)`", what) if name not in source] == []
    assert (REPOSITORY / test).is_file()


def test_every_question_of_the_table_has_its_path():
    table = PAGE.partition("\n\nEach addition")[0]
    assert len(PATHS) == table.count("? | ") > 5


def test_the_page_has_one_example_of_each():
    assert list(EXAMPLES) == ["schedule", "lever", "framework", "format", "cause"]
    assert [len(blocks) for blocks in EXAMPLES.values()] == [1, 1, 1, 1, 0]


def example_of(name):
    return pytest.mark.parametrize("ask", [name], indirect=True)


def write_table(path, rows, first="", between=","):
    columns = ("step", "stage", "microbatch", "op", "start_us", "duration_us")
    lines = [between.join(map(str, row)) for row in (columns, *rows)]
    path.write_text(f"{first}{chr(10).join(lines)}\n", "utf-8")
    return path


@pytest.mark.slow
@example_of("schedule")
def test_a_schedule_is_simulated_offered_and_recognised(ask, tmp_path):
    chosen = ("simulate", "--schedule", "one-at-a-time")
    alone = json.loads(ask(*chosen, "--stages", 4, "--microbatches", 8, "--json"))
    assert alone["numbers"]["bubble_fraction"] == pytest.approx(3 / 4)
    assert json.loads(ask(*chosen, RUN, "--json"))["numbers"]["bubble_fraction"] > 3 / 4
    assert "one-at-a-time" in ask("simulate", "--schedule", "no-such", RUN, code=2)
    times = {("forward", 0): 0, ("forward", 1): 1, ("backward", 1): 2, ("backward", 0): 3}
    rows = [
        (step, stage, number, op, 10_000 * step + 100 * (4 * number + at), 100)
        for step in range(3)
        for number in range(4)
        for (op, stage), at in times.items()
    ]
    found = json.loads(ask("find", write_table(tmp_path / "run.csv", rows), "--json"))
    assert found["run"]["schedule"] == "one-at-a-time"


@pytest.mark.slow
@example_of("lever")
def test_a_lever_is_weighed_in_every_view_of_a_plan(ask, tmp_path):
    plan = json.loads(ask("plan", RUN, "--json"))
    (option,) = [one for one in plan["options"] if one["lever"] == "message_size"]
    assert option["words"] == "messages of half the size"
    assert option["change"] == {"by_hand": "messages of half the size"}
    assert option["throughput_gain_fraction"] > 0
    assert option["apply"] == {}
    assert "messages of half the size" in ask("plan", RUN, "--details")
    ask("plan", RUN, "--html", tmp_path / "plan.html")
    assert "messages of half the size" in (tmp_path / "plan.html").read_text("utf-8")


@pytest.mark.slow
@example_of("framework")
def test_a_framework_can_be_written_for(ask):
    assert "export PIPELINE_SPLIT=" in ask("plan", RUN, "--emit", "shell-settings")
    plan = json.loads(ask("plan", RUN, "--json"))
    assert any("shell-settings" in one["apply"] for one in plan["options"])
    assert "shell-settings" in ask("plan", RUN, "--emit", "no-such", code=2)


@pytest.mark.slow
@example_of("format")
def test_a_format_is_read_by_every_verb_and_named_where_nothing_is(ask, tmp_path):
    rows = [
        (step, stage, number, "forward", 1000 * step + 100 * (number + stage), 100)
        for step in range(3)
        for stage in range(2)
        for number in range(4)
    ]
    write_table(tmp_path / "run.csv", rows)
    write_table(tmp_path / "run.passes", rows, "#passes\n", " ")
    mine, csv = (
        json.loads(ask("find", tmp_path / name, "--json")) for name in ("run.passes", "run.csv")
    )
    assert mine["numbers"] == csv["numbers"]
    assert mine["numbers"]["bubble_fraction"] == pytest.approx(1 / 5)
    assert "run.passes" in ask("inspect", tmp_path / "run.passes")
    (tmp_path / "run.txt").write_text("nothing of the kind\n")
    said = ask("find", tmp_path / "run.txt", code=2)
    assert "pass log" in said
