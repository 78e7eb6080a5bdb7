"""The skill for agents: its commands are commands, its causes causes, its fields fields."""

from __future__ import annotations

import importlib.util
import re
import shlex
import sys
from pathlib import Path

import pytest
import yaml

from debubble.cli import VERBS
from debubble.errors import Code
from debubble.ledger.causes import Cause
from debubble.report.answers.schema import schema_of

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "skills" / "debubble" / "SKILL.md").read_text("utf-8")
SPEC = importlib.util.spec_from_file_location(
    "benchmark_of_the_skill", ROOT / "benchmarks" / "skill.py"
)
skill = sys.modules[SPEC.name] = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(skill)
BRIEFS = ("find", "inspect", "links", "plan", "compare")


def test_it_says_what_it_is_for():
    _, front, _ = TEXT.split("---\n", 2)
    told = yaml.safe_load(front)
    assert told["name"] == "debubble"
    assert 100 < len(told["description"]) < 1024


@pytest.mark.parametrize("command", sorted(set(skill.commands(TEXT))))
def test_every_command_is_one_that_there_is(command):
    program, verb, *words = shlex.split(command)
    assert program == "debubble"
    assert verb in VERBS
    module = importlib.import_module(f"debubble.cli.{verb}")
    module.command.make_context(verb, words)


def test_the_table_is_about_causes_that_there_are_and_ends_with_all_others():
    conditions = [condition for condition, _ in skill.rules(TEXT)]
    causes = re.findall(r"cause` is `(\w+)`", " ".join(conditions))
    assert len(causes) > 3
    assert set(causes) <= set(Cause)
    assert conditions[-1] == "otherwise"


def test_every_word_of_an_answer_is_a_field_a_value_or_a_warning():
    schemas = " ".join(schema_of(verb) for verb in (*BRIEFS, "error"))
    fields = set(re.findall(r'"(\w+)": \{', schemas))
    values = {*Cause, *Code, "better", "no_clear_change", "not_comparable", "synchronize"}
    values |= {"_fraction", *VERBS}
    named = set(re.findall(r"`(\w+)(?:\[0\])?(?:\.\w+)?`", TEXT))
    assert named - fields - values == set()


def test_a_line_holds_for_what_find_says():
    found = {"named": [{"cause": "worker"}], "slow_hops": []}
    assert skill.holds("`named[0].cause` is `worker`", found)
    assert not skill.holds("`named[0].cause` is `data`", found)
    assert not skill.holds("`slow_hops`", found)
    assert skill.holds("`slow_hops`", found | {"slow_hops": [{"hop": [0, 1]}]})
    assert skill.holds("otherwise", found)
