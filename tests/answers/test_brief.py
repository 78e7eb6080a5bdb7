"""`--json=brief`: what an agent acts upon, in two kilobytes, by a schema of its own."""

from __future__ import annotations

import json

import msgspec
import pytest
from support.traces.read_once import analyse_recording
from support.traces.recordings import DATA, H200

import debubble
from debubble.answers.base import AnswerWarning
from debubble.answers.brief import BRIEFS, BriefAnswer, brief_of
from debubble.answers.compare import answer_history
from debubble.answers.schema import ANSWERS
from debubble.errors import Code

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


def read_back(brief):
    text = brief.to_json()
    return msgspec.json.decode(text, type=type(brief), strict=True), json.loads(text)


def test_find_names_the_same_in_a_fraction_of_the_bytes(run):
    whole = debubble.find(run)
    brief = brief_of(whole, ["debubble plan traces"])
    typed, data = read_back(brief)
    assert len(brief.to_json()) < FIND_BYTES < len(whole.to_json())
    assert data["schema"] == "debubble.find-brief/1"
    assert data["verdict"] == whole.verdict
    assert data["next"] == ["debubble plan traces"]
    assert [named.cause for named in typed.named] == [named.cause for named in whole.named[:3]]
    assert typed.numbers.bubble_fraction == pytest.approx(whole.numbers.bubble_fraction, rel=1e-3)
    assert typed.numbers.batch_latency_s == pytest.approx(whole.numbers.batch_latency_s, rel=1e-3)
    shares = [cause.share_fraction for cause in typed.causes]
    assert shares == sorted(shares, reverse=True)
    assert "compute" not in {cause.cause for cause in typed.causes}


@pytest.mark.parametrize("name", ["1f1b_p3_m7", "forward", "megatron"])
def test_plan_keeps_what_is_recommended(name):
    whole = debubble.plan(analyse_recording(RUNS[name]))
    brief = brief_of(whole)
    typed, _ = read_back(brief)
    assert len(brief.to_json()) < PLAN_BYTES < len(whole.to_json())
    assert typed.options_in_all == len(whole.options) >= len(typed.options)
    if whole.recommended:
        assert typed.options[0].words == whole.recommended[0].words
        assert typed.options[0].change == whole.recommended[0].change


def test_a_slow_hop_is_named_with_what_it_costs():
    run = analyse_recording(RUNS["slow link"])
    for answer in (debubble.find(run), debubble.links(run)):
        slow = brief_of(answer).slow_hops
        assert {tuple(hop.hop) for hop in slow} == {(1, 2), (3, 2)}  # into rank 2, which was paced
        assert slow[0].cost_per_batch_s >= slow[1].cost_per_batch_s > 0


def test_compare_keeps_the_verdict_as_a_word():
    run = analyse_recording(H200 / "1f1b_p3_m7")
    whole = debubble.compare(run, run)
    typed, data = read_back(brief_of(whole))
    assert (typed.verdict, typed.sentence) == (whole.verdict, whole.sentence)
    assert set(data["delta"]) <= set(whole.delta)


def test_a_simulation_keeps_its_interval():
    whole = debubble.simulate(analyse_recording(H200 / "1f1b_p3_m7"), microbatches=14)
    typed, _ = read_back(brief_of(whole))
    assert typed.batch_latency_interval_s == pytest.approx(whole.interval.batch_latency_s, rel=1e-3)


def test_a_thousand_warnings_of_a_code_are_one():
    whole = debubble.find(analyse_recording(H200 / "1f1b_p3_m7"))
    many = [
        AnswerWarning(code=Code.UNREADABLE, message="x" * 500, rank=rank) for rank in range(1000)
    ]
    full = msgspec.structs.replace(whole, warnings=many, verdict="y" * 5000)
    brief = brief_of(full)
    assert len(brief.to_json()) < FIND_BYTES
    [warning] = brief.warnings
    assert (warning.code, warning.n) == ("unreadable", 1000)


def test_an_answer_without_a_brief_form_is_given_whole():
    whole = answer_history([])
    assert brief_of(whole) is whole


def test_every_brief_answer_has_its_schema_shipped():
    shipped = {name: kind for name, kind in ANSWERS.items() if issubclass(kind, BriefAnswer)}
    assert set(shipped.values()) == set(BriefAnswer.__subclasses__())
    for name, kind in shipped.items():
        fields = {field.name: field.default for field in msgspec.structs.fields(kind)}
        assert fields["schema"] == f"debubble.{name}/1"
    assert set(BRIEFS) <= set(ANSWERS.values())
