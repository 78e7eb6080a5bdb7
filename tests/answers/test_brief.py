"""`--json=brief`: what is acted upon, in two kilobytes, under the names of the whole answer."""

from __future__ import annotations

import json
import re

import msgspec
import pytest
from support.traces.read_once import analyse_recording
from support.traces.recordings import DATA, H200

import debubble
from debubble.errors import Code
from debubble.report.answers.base import AnswerWarning, json_text
from debubble.report.answers.brief import SELECTED, brief_of
from debubble.report.answers.schema import ANSWERS, schema_of

FIND_BYTES, PLAN_BYTES = 3_000, 4_000
RUNS = {
    "1f1b_p3_m7": H200 / "1f1b_p3_m7",
    "forward": H200 / "fwd_closed_m4",
    "slow link": DATA / "paced" / "1f1b_m8_slow12",
    "megatron": DATA / "frameworks" / "mg_2321",
    "deepspeed": DATA / "frameworks" / "ds_m8",
}


@pytest.fixture(scope="module", params=RUNS, ids=str)
def run(request):
    return analyse_recording(RUNS[request.param])


def leaves(value, path=()):
    """Yield what a brief answer holds, each with its path."""
    if isinstance(value, dict):
        for name, part in value.items():
            yield from leaves(part, (*path, name))
    else:
        yield path, value


def test_find_says_the_same_under_the_same_names_in_a_fraction_of_the_bytes(run):
    whole = debubble.find(run)
    brief = brief_of(whole, ["debubble plan traces"])
    assert len(json_text(brief, compact=True)) < FIND_BYTES < len(whole.to_json())
    assert brief.pop("schema") == "debubble.find-brief/1"
    assert brief.pop("next") == ["debubble plan traces"]
    assert [row["cause"] for row in brief["named"]] == [row.cause for row in whole.named[:3]]
    for path, value in leaves(brief):
        if path[0] in {"warnings", "cut"} or isinstance(value, list):
            continue
        there = whole.to_dict()
        for name in path:
            there = there[name]
        assert value == (pytest.approx(there, rel=1e-3) if isinstance(there, float) else there)


@pytest.mark.parametrize("name", ["1f1b_p3_m7", "forward", "megatron"])
def test_plan_keeps_what_is_recommended(name):
    whole = debubble.plan(analyse_recording(RUNS[name]))
    brief = brief_of(whole)
    assert len(json_text(brief, compact=True)) < PLAN_BYTES < len(whole.to_json())
    assert brief["cut"].get("options", len(brief["options"])) == len(whole.options)
    if whole.recommended:
        assert brief["options"][0]["words"] == whole.recommended[0].words


def test_only_slow_hops_are_listed_the_most_expensive_first():
    run = analyse_recording(RUNS["slow link"])
    for answer in (debubble.find(run), debubble.links(run)):
        slow = brief_of(answer)["hops"]
        # Into rank 2, which was paced.
        assert {(hop["from_rank"], hop["to_rank"]) for hop in slow} == {(1, 2), (3, 2)}
        assert slow[0]["cost_per_batch_s"] >= slow[1]["cost_per_batch_s"] > 0


def test_a_thousand_warnings_of_a_code_are_one():
    whole = debubble.find(analyse_recording(H200 / "1f1b_p3_m7"))
    many = [
        AnswerWarning(code=Code.UNREADABLE, message="x" * 500, rank=rank) for rank in range(1000)
    ]
    full = msgspec.structs.replace(whole, warnings=many, verdict="y" * 5000)
    brief = brief_of(full)
    assert len(json_text(brief, compact=True)) < FIND_BYTES
    [warning] = brief["warnings"]
    assert (warning["code"], warning["n"]) == ("unreadable", 1000)


@pytest.mark.parametrize("answer", SELECTED, ids=lambda answer: answer.__name__)
def test_every_field_that_is_selected_is_one_of_the_answer(answer):
    schema = json.loads(schema_of(next(name for name, kind in ANSWERS.items() if kind is answer)))
    fields = {name for part in schema["$defs"].values() for name in part.get("properties", {})}
    assert set(re.findall(r"\w+", SELECTED[answer])) <= fields
