"""What a program reads back by an answer's type is the answer."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from support.measurements import sampled
from support.traces.read_once import analyse_recording
from support.traces.recordings import H200

import debubble
from debubble.errors import Code, Gap
from debubble.links.live import HopTestResult, RankSite, Rung, judge_measured, times_of
from debubble.links.logs.hops import hops_in
from debubble.links.logs.read import read_log
from debubble.measure.measurement import Record
from debubble.report.answers.compare import HistoryAnswer, answer_history
from debubble.report.answers.link_tests import LiveAnswer, LogsAnswer, answer_live, answer_logs

LOGS = sorted((Path(__file__).parents[1] / "data" / "links").iterdir())


def read_back(answer):
    return msgspec.json.decode(answer.to_json(), type=type(answer), strict=True)


@pytest.mark.parametrize("file", LOGS, ids=lambda file: file.name)
def test_an_answer_about_logs(file):
    log = read_log(file.read_text("utf-8"), file.name)
    answer = answer_logs([log], hops_in([log], classes={}, history={}), log.doubts)
    assert isinstance(answer, LogsAnswer)
    assert read_back(answer) == answer
    [part] = answer.to_dict()["logs"]
    assert (part["program"], part["file"]) == ("nccl-tests", file.name)


def test_an_answer_about_a_live_test():
    rungs = tuple(
        Rung(
            source=source,
            destination=destination,
            size_bytes=size,
            one_way=times_of([size / 1e9] * 20),
            both_ways=None,
        )
        for source, destination in ((0, 1), (1, 0))
        for size in (1000, 100_000)
    )
    places = tuple(RankSite(rank=rank, host="a", device="cpu") for rank in range(2))
    measured = HopTestResult(
        backend="gloo", job_bytes=1000, places=places, rungs=rungs, second=rungs[:1]
    )
    answer = answer_live(measured, judge_measured(measured), ())
    assert isinstance(answer, LiveAnswer)
    assert read_back(answer) == answer
    assert [hop.bytes for hop in answer.hops] == [1000, 1000]


@pytest.mark.parametrize("name", ["1f1b_p3_m7", "fwd_closed_m4"])
def test_an_answer_about_a_run(name):
    run = analyse_recording(H200 / name)
    answers = (
        debubble.find(run),
        debubble.links(run),
        debubble.plan(run, emit="torch"),
        debubble.simulate(run, microbatches=14),
        debubble.compare(run, run),
    )
    for answer in answers:
        data = read_back(answer).to_dict()
        assert data == answer.to_dict()
        schema = msgspec.json.schema(type(answer))
        assert [*data] == [*schema["$defs"][type(answer).__name__]["properties"]]


@pytest.mark.parametrize("whole", [False, True])
def test_an_answer_about_the_history(whole):
    record = Record(
        number=3, name="base", created_s=0.0, measurement=sampled([1.0, 2.0]), tags={"day": "1"}
    )
    gap = Gap(code=Code.MALFORMED, message="bad line", file="rank0.json")
    answer = answer_history([record], [gap], whole=whole)
    assert isinstance(answer, HistoryAnswer)
    assert read_back(answer) == answer
    [part] = answer.to_dict()["records"]
    assert (part["created"], part["tags"], part["n"]) == ("1970-01-01T00:00:00Z", {"day": "1"}, 2)
    assert ("measurement" in part) == whole
    assert answer.to_dict()["warnings"][0]["message"] == "bad line"
